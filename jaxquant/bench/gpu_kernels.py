"""Comparison of jaxquant's GPU kernels with their references (results) and with XLA's programs (times)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.bench.schemes import Row
from jaxquant.bench.timing import FAILURES, gc_disabled, seconds
from jaxquant.kernels import mosaic_gpu
from jaxquant.kernels.block_matmul import cases as blocks
from jaxquant.kernels.block_matmul import gpu as blocks_gpu
from jaxquant.kernels.block_matmul import reference as blocks_reference
from jaxquant.kernels.block_quantize import cases as block_casts
from jaxquant.kernels.block_quantize import reference as block_casts_reference
from jaxquant.kernels.fp8_einsum import cases as products
from jaxquant.kernels.fp8_einsum import reference as matmul_reference
from jaxquant.kernels.platforms import capability_of
from jaxquant.kernels.quantize import cases as casts
from jaxquant.kernels.quantize import reference as quantize_reference

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CASTS = tuple(
    casts.Case(shape, dtype, x_dtype, transposed=transposed)
    for shape in ((1024, 512), (15872, 4096))
    for dtype, x_dtype, transposed in (
        (E4M3, "bfloat16", True),
        (E5M2, "bfloat16", True),
        (E4M3, "float32", True),
        ("int8", "bfloat16", False),
        ("int8", "bfloat16", True),
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
BLOCK_CASTS = tuple(
    dataclasses.replace(case, shape=shape) for shape in ((1024, 512), (15872, 4096)) for case in block_casts.CASES
)
BLOCKS = (
    *blocks.CASES,
    blocks.Case((1, 15872, 4096, 4096)),
    blocks.Case((1, 4096, 4096, 15872), out_dtype="float32", per_column=True),
    blocks.Case((8, 15872, 4096, 4096), form="grouped", groups=tuple(tile * 8 // 124 for tile in range(124))),
)
CASES = tuple(case for each in itertools.zip_longest(CASTS, PRODUCTS, BLOCK_CASTS, BLOCKS) for case in each if case)
"""Calls of all kernels in alternation, so that any prefix covers every kind of kernel."""


Pair = tuple[Row, Sequence[Callable[[], Any]]]
"""Row of a kernel, and compiled calls of the kernel and of its peer; no calls if the kernel does not run."""


def compare_kernels(cases: Sequence[Any] = CASES, rounds: int = 5) -> Iterator[Row]:
    """Compare each kernel with its reference on the device, bit for bit, and time it next to XLA's program.

    Operands of matmuls are small integers, so every sum is exact. The peer of a dense block-scaled matmul is XLA's
    bfloat16 matmul of the dequantized operands; the peer of a grouped block-scaled matmul is its reference. `equal` is
    the share of equal elements. Times are medians of ten consecutive calls, taken in turns, and `ratio` is XLA's time
    divided by the kernel's. If the kernel or its compiler raises an error, the note has the reason.

    Args:
      cases: calls of ``quantize``, ``block_quantize``, ``matmul`` and the block-scaled matmuls.
      rounds: number of measurements of each call.
    """
    make = {casts.Case: _cast, block_casts.Case: _block_cast, products.Case: _product, blocks.Case: _blocks}
    for case in cases:
        row, runs = make[type(case)](case)
        cells: Row = {}
        if runs:
            with gc_disabled():
                times = [[seconds(call, calls=10) for call in runs] for _ in range(rounds)]
            ours, theirs = (1000 * statistics.median(taken) for taken in zip(*times, strict=True))
            cells = {"kernel ms": round(ours, 4), "xla ms": round(theirs, 4), "ratio": round(theirs / ours, 3)}
        yield row | cells


def _cast(case: casts.Case) -> Pair:
    from jaxquant.kernels.quantize import gpu

    row = {"kernel": "quantize", "case": str(case)}
    kinds: dict[str, Any] = {"dtype": case.dtype, "compute_dtype": case.compute_dtype}
    if why := gpu.refusal(case.shape, case.x_dtype, **kinds, capability=capability_of()):
        return _refused(row, why)
    x = (3 * jax.random.normal(jax.random.key(0), case.shape)).astype(case.x_dtype)
    options: dict[str, Any] = {"dtype": case.dtype, "transposed": case.transposed, "compute_dtype": case.compute_dtype}
    args = x, jnp.full((1, 1), 0.0123, jnp.float32), {}
    return _compared(row, (gpu.quantize, quantize_reference.quantize), args, options)


def _block_cast(case: block_casts.Case) -> Pair:
    from jaxquant.kernels.block_quantize import gpu

    row = {"kernel": "block_quantize", "case": str(case)}
    if why := mosaic_gpu.device_refusal(capability_of(), 9, 9, interpret=False):
        return _refused(row, why)
    x = (3 * jax.random.normal(jax.random.key(0), case.shape)).astype(case.x_dtype)
    both = (functools.partial(place.block_quantize, casts=case.casts) for place in (gpu, block_casts_reference))
    return _compared(row, both, (x, {}), {})


def _product(case: products.Case) -> Pair:
    from jaxquant.kernels.fp8_einsum import gpu

    row = {"kernel": "matmul", "case": str(case)}
    B, M, N, K = case.sizes
    options: dict[str, Any] = {"out_dtype": case.out_dtype, "accumulator": case.accumulator}
    kinds = case.lhs_dtype, case.rhs_dtype
    if why := gpu.refusal((B, M, K), (B, N, K), *kinds, **options, capability=capability_of()):
        return _refused(row, why)
    keys = jax.random.split(jax.random.key(0), 2)
    lhs = jax.random.randint(keys[0], (B, M, K), -3, 4).astype(case.lhs_dtype)
    rhs = jax.random.randint(keys[1], (B, N, K), -3, 4).astype(case.rhs_dtype)
    scales = {"left": jnp.full((B, M, 1), 0.5), "right": jnp.full((B, 1, N), 0.25)}
    scales = scales if case.per_channel else {"scale": jnp.full((1,), 0.125)}
    return _compared(row, (gpu.matmul, matmul_reference.matmul), (lhs, rhs, scales), options)


def _blocks(case: blocks.Case) -> Pair:
    row = {"kernel": f"block_{case.form}", "case": str(case)}
    is_mixed = case.lhs_dtype != case.rhs_dtype and not mosaic_gpu.HAS_JAX_0_11
    if why := mosaic_gpu.device_refusal(capability_of(), 9, 9, interpret=False) or (
        "operands of different dtypes" if is_mixed else None
    ):
        return _refused(row, why)
    keys = jax.random.split(jax.random.key(0), 4)
    args: list[Any] = [
        jax.random.randint(key, shape, -3, 4).astype(dtype) if "float8" in dtype else jnp.full(shape, 0.5)
        for key, (shape, dtype) in zip(keys, case.shapes[:4], strict=True)
    ]
    args += [jnp.array(case.groups, jnp.int32)] if case.groups else []

    def xla(x: jax.Array, w: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        scales = (left, blocks_reference.repeat_per_row(right, w.shape[1]))
        sides = [
            (side.astype(jnp.float32) * jnp.repeat(scale, blocks_reference.BLOCK, axis=2)).astype(jnp.bfloat16)
            for side, scale in zip((x, w), scales, strict=True)
        ]
        return jnp.einsum("bmk,bnk->bmn", *sides, preferred_element_type=case.out_dtype)

    peer = None if case.groups else jax.jit(lambda *args: xla(*args[:4]))
    both = (getattr(place, case.form) for place in (blocks_gpu, blocks_reference))
    return _compared(row, both, (*args, {}), {"out_dtype": case.out_dtype}, peer)


def _refused(row: Row, why: str) -> Pair:
    return row | {"equal": "–", "note": f"refused: {why}"}, ()


def _compared(row: Row, both: Iterable[Any], args: Any, options: Row, peer: Callable[..., Any] | None = None) -> Pair:
    """Compare two functions; the last of ``args`` is a dict of named arguments, and ``options`` are static."""
    on = lambda function: jax.jit(lambda *args: function(*args[:-1], **args[-1], **options))  # noqa: E731
    kernel, reference = map(on, both)
    try:
        found = jax.block_until_ready(kernel(*args))
    except FAILURES as error:
        return row | {"equal": "–", "note": f"WRONG: does not run: {' '.join(str(error).split())[:300]}"}, ()
    expected = jax.block_until_ready(reference(*args))
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    equal = sum(int(jnp.sum(a == b)) for a, b in wide) / sum(a.size for a, _ in wide)
    runs = (kernel, peer or reference)
    jax.block_until_ready(runs[1](*args))  # compiled before timing
    far = max(float(jnp.max(jnp.abs(a - b))) for a, b in wide)
    note = "" if equal == 1 else f"WRONG: differs from its reference by up to {far:g}"
    return row | {"equal": equal, "note": note}, [functools.partial(run, *args) for run in runs]
