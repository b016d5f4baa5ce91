"""Cases of ``block_quantize`` for tests in interpret mode and for compilation."""

from __future__ import annotations

import dataclasses

from jaxquant.core.recipe import TensorSpec
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE
from jaxquant.kernels.block_quantize.reference import Cast


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      shape, x_dtype: shape and dtype of x.
      casts: casts of x.
    """

    shape: tuple[int, int]
    x_dtype: str
    casts: tuple[Cast, ...]

    def __str__(self) -> str:
        words = [
            f"{'x'.join(map(str, one.block))}{'q' * one.has_elements}{'v' * one.has_values}{'t' * one.is_transposed}"
            for one in self.casts
        ]
        spec = self.casts[0].spec
        return "-".join(["x".join(map(str, self.shape)), self.x_dtype, spec.dtype, spec.scale_dtype, *words])


def _case(shape: tuple[int, int], x_dtype: str, spec: TensorSpec, *casts: tuple[tuple[int, int], str]) -> Case:
    made = (Cast(spec, block, SMALLEST_GRADIENT_SCALE, *(word in kinds for word in "qvt")) for block, kinds in casts)
    return Case(shape, x_dtype, tuple(made))


_TILE = TensorSpec("float8_e4m3fn", "per_tile", tile_size=128)
_MX = TensorSpec("float8_e4m3fn", "per_tile", tile_size=32, scale_dtype="float8_e8m0fnu", scale_rounding="up")
_UP = TensorSpec("float8_e5m2", "per_tile", tile_size=128, scale_rounding="up")
CASES = (
    _case((256, 384), "bfloat16", _TILE, ((1, 128), "v"), ((128, 1), "q")),
    _case((128, 256), "float32", _TILE, ((1, 128), "v"), ((128, 1), "v")),
    _case((384, 128), "bfloat16", _TILE, ((1, 128), "q"), ((128, 1), "qv")),
    _case((256, 128), "float32", _TILE, ((128, 128), "qv"), ((128, 128), "qvt")),
    _case((256, 256), "bfloat16", _MX, ((1, 32), "v"), ((32, 1), "q")),
    _case((128, 384), "float32", _MX, ((1, 32), "q"), ((32, 1), "v")),
    _case((128, 128), "bfloat16", _UP, ((1, 128), "qv"), ((128, 1), "v")),
)
