"""``optimizer_update`` on TPUs: every byte is read once and written once, in place. Groups are along the rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxquant.kernels.optimizer_update.reference import NAME, Body, Result
from jaxquant.kernels.optimizer_update.tuning import VMEM_BYTES, blocks_for
from jaxquant.kernels.varying import vary_alike

Array = jax.Array


def update(
    body: Body,
    scalars: Sequence[Array],
    arrays: Sequence[Array],
    results: Sequence[Result],
    *,
    step: int,
    changes: Array | None = None,
    interpret: bool = False,
) -> list[Array]:
    """Compute ``reference.update``.

    Args:
      body, scalars, arrays, results, changes: arguments of the reference.
      step: number of rows in a call of ``body``, a multiple of every group size.
      interpret: whether to run without a TPU.
    """
    A, rows, *tail = max((x.shape for x in arrays), key=lambda shape: shape[1])
    shares = [rows // x.shape[1] for x in arrays]
    block, last = blocks_for(rows, tuple(tail), step, max([*shares, *(result.rows for result in results)]))
    flag = jnp.float32(1) if changes is None else changes.astype(jnp.float32)
    (packed, *operands), result = vary_alike(jnp.stack([*scalars, flag]), *arrays)

    def spec(share: int) -> pl.BlockSpec:
        between = (0,) * (len(tail) - 1)
        return pl.BlockSpec((None, block // share, *tail[:-1], last), lambda a, i, j: (a, i, *between, j))

    return pl.pallas_call(
        functools.partial(
            _kernel if changes is None else _guarded_kernel,
            body=body,
            step=step,
            scalars=len(scalars),
            shares=shares,
            results=results,
        ),
        grid=(A, pl.cdiv(rows, block), pl.cdiv(tail[-1], last)),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *map(spec, shares)],
        out_specs=[spec(each.rows) for each in results],
        out_shape=[result((A, rows // each.rows, *tail), each.dtype) for each in results],
        input_output_aliases={1 + each.replaces: i for i, each in enumerate(results) if each.replaces is not None},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3, vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name=NAME,
    )(packed, *operands)


def _guarded_kernel(
    scalars_ref: Any, *refs: Any, scalars: int, shares: Any, results: Sequence[Result], **options: Any
) -> None:
    """Run ``_kernel`` if the flag after the scalars is not 0; otherwise keep the old arrays."""
    changes = scalars_ref[scalars] != 0
    pl.when(changes)(lambda: _kernel(scalars_ref, *refs, scalars=scalars, shares=shares, results=results, **options))

    @pl.when(jnp.logical_not(changes))
    def _() -> None:
        for result, ref in zip(results, refs[len(shares) :], strict=True):
            kept = None if result.replaces is None else refs[result.replaces]
            ref[...] = jnp.zeros_like(ref) if kept is None else kept[...]


def _kernel(
    scalars_ref: Any, *refs: Any, body: Body, step: int, scalars: int, shares: Sequence[int], results: Sequence[Result]
) -> None:
    values = [scalars_ref[i] for i in range(scalars)]
    in_refs, out_refs = refs[: len(shares)], refs[len(shares) :]
    # Arrays with one number per group are read and written whole, because a single row of bytes is not accessible.
    group_values = {i: _wide(ref[...]) for i, (ref, share) in enumerate(zip(in_refs, shares, strict=True)) if share > 1}
    made: list[list[Array]] = [[] for _ in results]
    for k in range(max(ref.shape[0] for ref in in_refs) // step):

        def part(share: int, k: int = k) -> slice:
            return slice(k * (step // share), (k + 1) * (step // share))

        parts = [group_values[i][part(n)] if i in group_values else in_refs[i][part(n)] for i, n in enumerate(shares)]
        for result, ref, kept, x in zip(results, out_refs, made, body(values, parts), strict=True):
            if result.rows > 1:
                kept.append(x)
            else:
                ref[part(1)] = x.astype(result.dtype)
    for result, ref, kept in zip(results, out_refs, made, strict=True):
        if result.rows > 1:
            whole = kept[0] if len(kept) == 1 else jnp.concatenate(kept)
            ref[...] = (whole.astype(jnp.int32) if result.dtype == "uint8" else whole).astype(result.dtype)


def _wide(x: Array) -> Array:
    return x.astype(jnp.int32) if x.dtype == jnp.uint8 else x
