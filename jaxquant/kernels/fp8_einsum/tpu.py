"""``matmul`` on TPUs: a grid over batch, rows, columns and depth; sums stay in VMEM until the scales are applied."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from jaxquant.kernels.fp8_einsum.reference import NAME, Major, rescale, sum_dtype
from jaxquant.kernels.fp8_einsum.tuning import VMEM_BYTES, blocks_for
from jaxquant.kernels.varying import vary_alike


def matmul(
    lhs: Shaped[Array, "B M K"],
    rhs: Shaped[Array, "B N K"],
    scale: Float[Array, 1] | None = None,
    *,
    left: Float[Array, "B M 1"] | None = None,
    right: Float[Array, "B 1 N"] | None = None,
    out_dtype: str,
    accumulator: str,
    lhs_major: Major = "k",
    rhs_major: Major = "k",
    interpret: bool = False,
) -> Float[Array, "B M N"]:
    """Compute ``reference.matmul``; the depth is padded with zeros to whole blocks.

    Args:
      lhs, rhs, scale, left, right, out_dtype, accumulator, lhs_major, rhs_major: arguments of the reference.
      interpret: whether to run without a TPU.
    """
    B = lhs.shape[0]
    M, K = lhs.shape[1:] if lhs_major == "k" else lhs.shape[:0:-1]
    N = rhs.shape[1 if rhs_major == "k" else 2]
    block_m, block_n, block_k = blocks_for(M, N, K)
    lhs, rhs = _pad_depth(lhs, lhs_major, block_k), _pad_depth(rhs, rhs_major, block_k)
    (lhs, rhs, scale, left, right), result = vary_alike(lhs, rhs, scale, left, right)
    lhs_map = (lambda b, i, j, k: (b, i, k)) if lhs_major == "k" else (lambda b, i, j, k: (b, k, i))
    rhs_map = (lambda b, i, j, k: (b, j, k)) if rhs_major == "k" else (lambda b, i, j, k: (b, k, j))
    in_specs = [
        pl.BlockSpec((None, *_order(lhs_major, block_m, block_k)), lhs_map),
        pl.BlockSpec((None, *_order(rhs_major, block_n, block_k)), rhs_map),
    ]
    if scale is not None:
        scale = scale.reshape(1, 1)
        in_specs.append(pl.BlockSpec((1, 1), lambda b, i, j, k: (0, 0), memory_space=pltpu.SMEM))
    else:
        in_specs.append(pl.BlockSpec((None, block_m, 1), lambda b, i, j, k: (b, i, 0)))
        in_specs.append(pl.BlockSpec((None, 1, block_n), lambda b, i, j, k: (b, 0, j)))
    kernel = functools.partial(
        _kernel, lhs_major=lhs_major, rhs_major=rhs_major, accumulator=accumulator, out_dtype=out_dtype
    )
    return pl.pallas_call(
        kernel,
        grid=(B, pl.cdiv(M, block_m), pl.cdiv(N, block_n), pl.cdiv(K, block_k)),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((None, block_m, block_n), lambda b, i, j, k: (b, i, j)),
        out_shape=result((B, M, N), out_dtype),
        scratch_shapes=[pltpu.VMEM((block_m, block_n), jnp.dtype(sum_dtype(lhs.dtype.name)))],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name=NAME,
    )(*(each for each in (lhs, rhs, scale, left, right) if each is not None))


def _order(major: Major, free: int, depth: int) -> tuple[int, int]:
    return (free, depth) if major == "k" else (depth, free)


def _pad_depth(x: Array, major: Major, block_k: int) -> Array:
    axis = 2 if major == "k" else 1
    missing = -x.shape[axis] % block_k
    return jnp.pad(x, [(0, missing if each == axis else 0) for each in range(3)]) if missing else x


def _kernel(
    lhs_ref: Any, rhs_ref: Any, *refs: Any, lhs_major: Major, rhs_major: Major, accumulator: str, out_dtype: str
) -> None:
    *scales, out_ref, sum_ref = refs
    k = pl.program_id(3)

    @pl.when(k == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    numbers = (((1 if lhs_major == "k" else 0,), (1 if rhs_major == "k" else 0,)), ((), ()))
    sum_ref[...] += jax.lax.dot_general(lhs_ref[...], rhs_ref[...], numbers, preferred_element_type=sum_ref.dtype)

    @pl.when(k == pl.num_programs(3) - 1)
    def _() -> None:
        arguments = (scales[0][0, 0], None, None) if len(scales) == 1 else (None, *(ref[...] for ref in scales))
        out_ref[...] = rescale(sum_ref[...], *arguments, out_dtype=out_dtype, accumulator=accumulator)
