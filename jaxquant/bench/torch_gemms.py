"""torch's ``_scaled_mm`` (cuBLASLt) on the GEMM set, with operands quantized in advance: only the matmuls are timed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from jaxquant.bench.timing import CompiledRow


def prepare_torch(tokens: int, gemms: Sequence[tuple[int, int]], *, is_fast: bool) -> CompiledRow:
    """Return the forward and backward GEMMs in e4m3 with e5m2 gradients and per-tensor scales.

    cuBLASLt requires K-major operands, so each operand is stored in both layouts.

    Args:
      tokens: number of rows of every activation.
      gemms: (K, N) of each GEMM.
      is_fast: whether the tensor cores accumulate in fewer bits ("fast accumulation").

    Raises:
      ImportError: torch is not installed.
      NotImplementedError: torch found no GPU with float8 matmuls.
    """
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        raise NotImplementedError("torch found no GPU with float8 matmuls; use a GPU of compute capability 8.9+")
    e4m3, e5m2, one = torch.float8_e4m3fn, torch.float8_e5m2, torch.ones((), device="cuda")
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    pairs: dict[str, list[tuple[Any, Any]]] = {"fwd": [], "bwd": []}
    for k, n in gemms:
        x, kernel, gradient = draw((tokens, k)), draw((n, k)), draw((tokens, n))
        pairs["fwd"].append((x.to(e4m3), kernel.to(e4m3).t()))
        pairs["bwd"].append((gradient.to(e5m2), kernel.t().contiguous().to(e4m3).t()))
        pairs["bwd"].append((gradient.t().contiguous().to(e5m2), x.t().contiguous().to(e4m3).t()))

    def run(name: str) -> None:
        for lhs, rhs in pairs[name]:
            options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": is_fast}
            torch._scaled_mm(lhs, rhs, **options)
        torch.cuda.synchronize()

    for name in pairs:
        run(name)
    return CompiledRow({name: functools.partial(run, name) for name in pairs})
