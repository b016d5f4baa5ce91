"""Dtypes of matmuls: what is low precision, and how it is spelled."""

from jaxquant.core.matmul_dtypes import MatmulDtypes, OperandDtype

CASES = [
    (MatmulDtypes.of_specs("int8", "int8"), "int8 × int8"),
    (MatmulDtypes.of_specs("float8_e4m3fn", "int4"), "float8_e4m3fn × int4"),
    (MatmulDtypes.of_specs(None, "int8"), "float (int8 dequantized)"),
    (MatmulDtypes.of_specs(None, None), "float"),
    (MatmulDtypes(OperandDtype("bfloat16"), OperandDtype("int8")), "float (int8)"),
]


def test_text_comes_from_the_data():
    for dtypes, text in CASES:
        assert str(dtypes) == text
        assert dtypes.is_low == bool(dtypes.elements) == (not text.startswith("float ") and text != "float")
