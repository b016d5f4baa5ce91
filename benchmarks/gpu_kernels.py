"""Our kernels for GPUs, run on one: their numbers against the references, their time beside XLA's program."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.schemes import Row
from benchmarks.timing import seconds, undisturbed
from jaxquant.kernels.fp8_einsum import cases as products
from jaxquant.kernels.fp8_einsum import reference as matmul_reference
from jaxquant.kernels.quantize import cases as casts
from jaxquant.kernels.quantize import reference as quantize_reference

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CASTS = tuple(
    casts.Case(shape, dtype, x_dtype, noisy=noisy, transposed=transposed)
    for shape in ((1024, 512), (15872, 4096))
    for dtype, x_dtype, noisy, transposed in (
        (E4M3, "bfloat16", False, True),
        (E5M2, "bfloat16", False, True),
        (E4M3, "float32", False, True),
        ("int8", "bfloat16", False, False),
        ("int8", "bfloat16", True, True),
    )
)
PRODUCTS = tuple(
    products.Case(sizes, lhs, rhs, "bfloat16", accumulator, per_channel=per_channel)
    for sizes in ((2, 256, 512, 256), (1, 15872, 4096, 4096))
    for lhs, rhs, accumulator, per_channel in (
        (E4M3, E4M3, "bfloat16", False),
        (E5M2, E4M3, "bfloat16", False),
        (E4M3, E4M3, "float32", True),
        ("int8", "int8", "int32", True),
    )
)


def measure_kernels(rounds: int = 20, cases: Sequence[Any] = (*CASTS, *PRODUCTS)) -> list[Row]:
    """Compare each kernel with its reference on the device, bit for bit, and time it beside XLA's program for it.

    Operands of matmuls are small integers, of which every sum is exact. `equal` is the share of equal elements; times
    are medians, and `ratio` is XLA's over the kernel's. A case that the kernel refuses says why.

    Args:
      rounds: measurements of each.
      cases: calls of ``quantize`` and ``matmul``.
    """
    return [_cast(case, rounds) if isinstance(case, casts.Case) else _product(case, rounds) for case in cases]


def _cast(case: casts.Case, rounds: int) -> Row:
    from jaxquant.kernels.quantize import gpu

    row = {"kernel": "quantize", "case": str(case)}
    if why := gpu.refusal(case.shape, case.x_dtype, (1, 1), dtype=case.dtype, compute_dtype=case.compute_dtype):
        return _refused(row, why)
    x = (3 * jax.random.normal(jax.random.key(0), case.shape)).astype(case.x_dtype)
    seeds = jax.random.bits(jax.random.key(1), (2,), jnp.uint32) if case.noisy else None
    options: dict[str, Any] = {"dtype": case.dtype, "transposed": case.transposed, "compute_dtype": case.compute_dtype}

    def on(function: Any) -> Callable[..., Any]:
        return jax.jit(lambda x, scale, seeds: function(x, scale, seeds=seeds, **options))

    args = x, jnp.full((1, 1), 0.0123, jnp.float32), seeds
    return row | _compared(on(gpu.quantize), on(quantize_reference.quantize), args, rounds)


def _product(case: products.Case, rounds: int) -> Row:
    from jaxquant.kernels.fp8_einsum import gpu

    row = {"kernel": "matmul", "case": str(case)}
    B, M, N, K = case.sizes
    options: dict[str, Any] = {"out_dtype": case.out_dtype, "accumulator": case.accumulator}
    if why := gpu.refusal((B, M, K), (B, N, K), case.lhs_dtype, case.rhs_dtype, **options):
        return _refused(row, why)
    keys = jax.random.split(jax.random.key(0), 2)
    lhs = jax.random.randint(keys[0], (B, M, K), -3, 4).astype(case.lhs_dtype)
    rhs = jax.random.randint(keys[1], (B, N, K), -3, 4).astype(case.rhs_dtype)
    scales = {"left": jnp.full((B, M, 1), 0.5), "right": jnp.full((B, 1, N), 0.25)}
    scales = scales if case.per_channel else {"scale": jnp.full((1,), 0.125)}

    def on(function: Any) -> Callable[..., Any]:
        return jax.jit(lambda lhs, rhs, scales: function(lhs, rhs, **scales, **options))

    return row | _compared(on(gpu.matmul), on(matmul_reference.matmul), (lhs, rhs, scales), rounds)


def _refused(row: Row, why: str) -> Row:
    return row | dict.fromkeys(("equal", "kernel ms", "xla ms", "ratio"), "–") | {"note": f"refused: {why}"}


def _compared(kernel: Callable[..., Any], reference: Callable[..., Any], args: Any, rounds: int) -> Row:
    found, expected = (jax.block_until_ready(run(*args)) for run in (kernel, reference))
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    equal = sum(int(jnp.sum(a == b)) for a, b in wide) / sum(a.size for a, _ in wide)
    times: tuple[list[float], list[float]] = ([], [])
    with undisturbed():
        for _ in range(rounds):
            for run, own in zip((kernel, reference), times, strict=True):
                own.append(seconds(lambda run=run: run(*args)))
    ours, theirs = (1000 * statistics.median(own) for own in times)
    values = {"equal": equal, "kernel ms": round(ours, 3), "xla ms": round(theirs, 3), "ratio": round(theirs / ours, 3)}
    return values | {"note": "" if equal == 1 else "WRONG: differs from its reference"}
