"""Cases of ``matmul`` and its grouped forms for tests in interpret mode and for ahead-of-time compilation."""

from __future__ import annotations

import dataclasses

from jaxquant.kernels.block_matmul.reference import BLOCK

_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      sizes: batch (or matrices of rhs, for grouped rows), rows, columns and depth.
      lhs_dtype, rhs_dtype, out_dtype: dtypes.
      per_column: whether rhs has a scale for each column, rather than for each block of 128.
      form: "matmul", "grouped" or "grouped_drhs".
      groups: ``groups`` of ``grouped``, or ``starts`` of ``grouped_drhs``.
    """

    sizes: tuple[int, int, int, int]
    lhs_dtype: str = _E4M3
    rhs_dtype: str = _E4M3
    out_dtype: str = "bfloat16"
    per_column: bool = False
    form: str = "matmul"
    groups: tuple[int, ...] = ()

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the arguments."""
        B, M, N, K = self.sizes
        T, columns = K // BLOCK, N if self.per_column else -(-N // BLOCK)
        left = () if self.groups else (B,)
        right = () if self.form == "grouped_drhs" else (B,)
        found = [((*left, M, K), self.lhs_dtype), ((*right, N, K), self.rhs_dtype)]
        found += [((*left, M, T), "float32"), ((*right, columns, T), "float32")]
        return found + ([((len(self.groups),), "int32")] if self.groups else [])

    def __str__(self) -> str:
        kinds = f"{self.lhs_dtype}x{self.rhs_dtype}-{self.out_dtype}"
        scales = "columns" if self.per_column else "blocks"
        return f"{self.form}-{'x'.join(map(str, self.sizes))}-{kinds}-{scales}"


CASES = (
    Case((2, 65, 130, 384), _E4M3, _E5M2),
    Case((1, 1, 128, 128), _E5M2, _E4M3, "float32", per_column=True),
    Case((1, 393, 200, 256), _E5M2, _E5M2, "float32", per_column=True),
    Case((1, 256, 128, 640)),
    Case((3, 512, 200, 256), form="grouped", groups=(0, 2, 2, -1)),
    Case((1, 100, 130, 640), _E4M3, _E5M2, "float32", per_column=True, form="grouped_drhs", groups=(0, 1, 1, 5)),
)
"""Cases: incomplete tiles, one row, mixed element types, clusters, empty groups, tiles without a group."""
