"""Cases of ``matmul`` for tests in interpret mode and for compilation."""

from __future__ import annotations

import dataclasses

from jaxquant.kernels.fp8_einsum.reference import Major

_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      sizes: batch, rows, columns and depth.
      lhs_dtype, rhs_dtype, out_dtype, accumulator: dtypes.
      lhs_major, rhs_major: last axis of each operand in memory.
      per_channel: whether there is a scale for each row and column.
    """

    sizes: tuple[int, int, int, int]
    lhs_dtype: str = _E4M3
    rhs_dtype: str = _E4M3
    out_dtype: str = "bfloat16"
    accumulator: str = "bfloat16"
    lhs_major: Major = "k"
    rhs_major: Major = "k"
    per_channel: bool = False

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.sizes))
        kinds = f"{self.lhs_dtype}x{self.rhs_dtype}-{self.accumulator}-{self.out_dtype}"
        return f"{sizes}-{kinds}-{self.lhs_major}{self.rhs_major}" + ("-per_channel" if self.per_channel else "")


CASES = (
    Case((1, 256, 384, 512)),
    Case((1, 256, 256, 256), _E5M2, _E4M3, lhs_major="k", rhs_major="n"),
    Case((1, 256, 256, 256), _E4M3, _E5M2, "float32", "float32", lhs_major="m", rhs_major="n"),
    Case((1, 256, 256, 256), _E5M2, _E5M2, "float32", "float32", lhs_major="m"),
    Case((2, 128, 256, 384), "int8", "int8", accumulator="int32", rhs_major="n"),
    Case((1, 256, 256, 256), "int8", "int8", "float32", "int32", lhs_major="m", rhs_major="n"),
    Case((2, 256, 384, 256), "int8", "int8", accumulator="int32", rhs_major="n", per_channel=True),
    Case((3, 40, 72, 136), accumulator="float32", rhs_major="n", per_channel=True),
    Case((1, 5, 200, 72), _E5M2, _E4M3, lhs_major="m"),
    Case((1, 100, 136, 1100), "int8", "int8", "bfloat16", "int32"),
)
