"""Cases of ``quantize`` for tests in interpret mode and for compilation."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      shape: shape of x.
      x_dtype, dtype, compute_dtype: dtypes of x, of q and of the division.
      transposed: whether a GPU kernel writes the transposed copy.
    """

    shape: tuple[int, int]
    dtype: str
    x_dtype: str = "bfloat16"
    compute_dtype: str = "float32"
    transposed: bool = False

    def __str__(self) -> str:
        flags = ["transposed"] * self.transposed
        sizes = "x".join(map(str, self.shape))
        return "-".join([sizes, self.x_dtype, self.dtype, f"in_{self.compute_dtype}", *flags])


CASES = (
    Case((256, 256), "float8_e4m3fn"),
    Case((256, 256), "float8_e5m2", "float32"),
    Case((256, 384), "int8"),
    Case((128, 1152), "int8", "float32"),
    Case((544, 256), "float8_e4m3fn", compute_dtype="bfloat16"),
    Case((256, 256), "float8_e5m2"),
    Case((100, 200), "int8", compute_dtype="bfloat16"),
    Case((5, 1300), "float8_e4m3fn", "float32"),
    Case((3, 7), "float8_e4m3fn"),
)
