"""Dtypes of matmuls: what is low precision, how it is spelled, and that nothing is lost in a file."""

import dataclasses
import json

import pytest

from jaxquant.core.matmul_dtypes import MatmulDtypes, OperandDtype

CASES = [
    (MatmulDtypes.of_specs("int8", "int8"), "int8 × int8", "int"),
    (MatmulDtypes.of_specs("float8_e5m2", "float8_e4m3fn"), "float8_e5m2 × float8_e4m3fn", "low"),
    (MatmulDtypes.of_specs("float8_e4m3fn", "int4"), "float8_e4m3fn × int4", "low"),
    (MatmulDtypes.of_specs(None, "int8"), "float (int8 dequantized)", "float"),
    (MatmulDtypes.of_specs(None, None), "float", "float"),
    (MatmulDtypes(OperandDtype("float32", "int8"), OperandDtype("float32")), "float (int8 dequantized)", "float"),
    (MatmulDtypes(OperandDtype("bfloat16"), OperandDtype("int8")), "float (int8)", "float"),
]


@pytest.mark.parametrize(("dtypes", "text", "kind"), CASES)
def test_text_and_kind_come_from_the_data_and_a_file_keeps_it(dtypes, text, kind):
    assert (str(dtypes), dtypes.kind) == (text, kind)
    assert dtypes.is_low == bool(dtypes.elements) == (kind != "float")
    assert MatmulDtypes.from_json(json.loads(json.dumps(dataclasses.asdict(dtypes)))) == dtypes


def test_an_operand_says_what_its_values_were_rounded_to():
    assert str(OperandDtype("float32", "int8")) == "float32 (int8 dequantized)"
    assert not OperandDtype("float32", "int8").is_low


@pytest.mark.parametrize(
    "data", ["int8 × int8", None, {}, {"lhs": {"dtype": "int8"}}, {"lhs": {"dtype": 8, "rounded_to": None}, "rhs": {}}]
)
def test_what_is_no_matmul_is_refused(data):
    with pytest.raises(ValueError, match="does not give the dtypes of a matmul; write the file anew"):
        MatmulDtypes.from_json(data)
