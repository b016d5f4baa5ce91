"""``quantize`` on TPUs: one read of x writes q and the amax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jaxquant.core.dtypes import element
from jaxquant.core.rounding import saturating_cast_in_kernel
from jaxquant.kernels.quantize.reference import MAGNITUDE, NAME, Quantized
from jaxquant.kernels.quantize.tuning import ROWS, blocks_for
from jaxquant.kernels.varying import vary_alike

_SUBLANES = 8


def quantize(
    x: Float[Array, "M N"],
    scale: Float[Array, "1 1"],
    *,
    dtype: str,
    compute_dtype: str = "float32",
    interpret: bool = False,
    in_steps: bool = True,
) -> Quantized:
    """Compute ``reference.quantize`` without a transposed copy.

    The amax is NaN if x has a NaN: magnitudes are compared as integers, and a NaN is then above infinity.

    Args:
      x, scale, dtype, compute_dtype: arguments of the reference.
      interpret: whether to run without a TPU.
      in_steps: whether to read a block a few rows at a time, to fit a TPU's registers.
    """
    M, N = x.shape
    block_m, block_n = blocks_for((M, N))
    (x, scale), result = vary_alike(x, scale)
    of_x = pl.BlockSpec((block_m, block_n), lambda i, j: (i, j))
    of_one = pl.BlockSpec((1, 1), lambda i, j: (0, 0), memory_space=pltpu.SMEM)
    q, amax = pl.pallas_call(
        functools.partial(_kernel, shape=(M, N), dtype=dtype, compute_dtype=compute_dtype, in_steps=in_steps),
        grid=(pl.cdiv(M, block_m), pl.cdiv(N, block_n)),
        in_specs=[of_x, of_one],
        out_specs=[of_x, of_one],
        out_shape=[result((M, N), dtype), result((1, 1), jnp.int32)],
        scratch_shapes=[pltpu.VMEM((_SUBLANES, block_n), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name=NAME,
    )(x, scale)
    return Quantized(q, None, jax.lax.bitcast_convert_type(amax.reshape(()), jnp.float32))


def _kernel(
    x_ref: Any,
    scale_ref: Any,
    q_ref: Any,
    amax_ref: Any,
    largest_ref: Any,
    *,
    shape: tuple[int, int],
    dtype: str,
    compute_dtype: str,
    in_steps: bool,
) -> None:
    i, j = pl.program_id(0), pl.program_id(1)
    block_m, block_n = x_ref.shape
    rows = ROWS if in_steps else block_m
    is_ragged = bool(shape[0] % block_m or shape[1] % block_n)

    @pl.when((i == 0) & (j == 0))
    def _() -> None:
        largest_ref[...] = jnp.zeros_like(largest_ref)

    def step(k: Any, largest: Array) -> Array:
        part = pl.ds(pl.multiple_of(k * rows, rows), rows) if in_steps else slice(None)
        x = x_ref[part, :].astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE
        if is_ragged:
            down = i * block_m + k * rows + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            across = j * block_n + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
            bits = jnp.where((down < shape[0]) & (across < shape[1]), bits, 0)
        largest = jnp.maximum(largest, bits.reshape(-1, _SUBLANES, block_n).max(axis=0))
        scaled = _round_to(_round_to(x, compute_dtype) / _round_to(scale_ref[0, 0], compute_dtype), compute_dtype)
        q_ref[part, :] = saturating_cast_in_kernel(scaled, element(dtype))
        return largest

    before = largest_ref[...]
    largest_ref[...] = jax.lax.fori_loop(0, block_m // rows, step, before) if in_steps else step(0, before)

    @pl.when((i == pl.num_programs(0) - 1) & (j == pl.num_programs(1) - 1))
    def _() -> None:
        amax_ref[0, 0] = jnp.max(largest_ref[...])


def _round_to(x: Array, dtype: str) -> Array:
    """Round to a dtype in float32. The float32 quotient of two bfloat16 numbers rounds to their bfloat16 quotient."""
    return x if dtype == "float32" else x.astype(dtype).astype(jnp.float32)
