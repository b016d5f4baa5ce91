"""Dtypes of matmuls: what is low precision, and how it is spelled."""

import pytest

from jaxquant.core.matmul_dtypes import MatmulDtypes, OperandDtype

CASES = [
    (MatmulDtypes.of_specs("int8", "int8"), "int8 × int8"),
    (MatmulDtypes.of_specs("float8_e5m2", "float8_e4m3fn"), "float8_e5m2 × float8_e4m3fn"),
    (MatmulDtypes.of_specs("float8_e4m3fn", "int4"), "float8_e4m3fn × int4"),
    (MatmulDtypes.of_specs(None, "int8"), "float (int8 dequantized)"),
    (MatmulDtypes.of_specs(None, None), "float"),
    (MatmulDtypes(OperandDtype("float32", "int8"), OperandDtype("float32")), "float (int8 dequantized)"),
    (MatmulDtypes(OperandDtype("bfloat16"), OperandDtype("int8")), "float (int8)"),
]


@pytest.mark.parametrize(("dtypes", "text"), CASES)
def test_text_comes_from_the_data(dtypes, text):
    assert str(dtypes) == text
    assert dtypes.is_low == bool(dtypes.elements) == (not text.startswith("float ") and text != "float")


def test_an_operand_says_what_its_values_were_rounded_to():
    assert str(OperandDtype("float32", "int8")) == "float32 (int8 dequantized)"
    assert not OperandDtype("float32", "int8").is_low
