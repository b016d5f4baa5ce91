"""torch's ``_scaled_mm`` (cuBLASLt) on the GEMM set, of operands that were quantized before: the matmuls alone."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from benchmarks.timing import MatmulPrograms


class TorchSet(MatmulPrograms):
    """All GEMMs in e4m3, gradients in e5m2, per tensor. cuBLASLt wants K-major operands: each is there both ways.

    Args:
      tokens: rows of every activation.
      gemms: (K, N) of each.
      programs: which of ``PROGRAMS``.

    Raises:
      ImportError: torch is not installed.
      NotImplementedError: torch sees no GPU with float8.
    """

    share = 1.0

    def __init__(self, tokens: int, gemms: Sequence[tuple[int, int]], programs: Sequence[str]):
        self._torch: Any = importlib.import_module("torch")
        cuda = self._torch.cuda
        if not cuda.is_available() or cuda.get_device_capability() < (8, 9):
            raise NotImplementedError("torch sees no GPU that multiplies float8")
        e4m3, e5m2 = self._torch.float8_e4m3fn, self._torch.float8_e5m2
        self._one = self._torch.ones((), device="cuda")
        pairs: dict[str, list[tuple[Any, Any]]] = {"fwd": [], "dlhs": [], "drhs": []}
        for k, n in gemms:
            x, kernel = self._draw(tokens, k), self._draw(n, k)
            gradient = self._draw(tokens, n)
            pairs["fwd"].append((x.to(e4m3), kernel.to(e4m3).t()))
            pairs["dlhs"].append((gradient.to(e5m2), kernel.t().contiguous().to(e4m3).t()))
            pairs["drhs"].append((gradient.t().contiguous().to(e5m2), x.t().contiguous().to(e4m3).t()))
        self._pairs = pairs | {"bwd": pairs["dlhs"] + pairs["drhs"]}
        super().__init__({name: functools.partial(self._run, name) for name in programs})

    def _draw(self, rows: int, columns: int) -> Any:
        return self._torch.randn((rows, columns), device="cuda", dtype=self._torch.bfloat16)

    def _run(self, name: str) -> None:
        for lhs, rhs in self._pairs[name]:
            self._torch._scaled_mm(
                lhs, rhs, scale_a=self._one, scale_b=self._one, out_dtype=self._torch.bfloat16, use_fast_accum=True
            )
        self._torch.cuda.synchronize()
