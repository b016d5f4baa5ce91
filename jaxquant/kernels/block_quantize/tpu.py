"""``block_quantize`` on TPUs: one read of x writes elements, scales and values of every block shape."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jaxquant.core.dtypes import Element, element
from jaxquant.core.qtensor import QTensor
from jaxquant.core.rounding import saturating_cast_in_kernel
from jaxquant.core.scales import scale_of_amax
from jaxquant.kernels.block_quantize.reference import Blocks, Cast, kernel_name, stored_scale
from jaxquant.kernels.block_quantize.tuning import TILE, blocks_for
from jaxquant.kernels.varying import vary_alike

_MANTISSA_BITS = 23
_EXPONENT = 0xFF << _MANTISSA_BITS
_SIGN = -(2**31)
_ROWS = 8
"""Rows of a TPU vector register. XLA can fuse the preceding cast into a matrix that is stored in this order."""


def block_quantize(x: Float[Array, "M N"], casts: tuple[Cast, ...], *, interpret: bool = False) -> tuple[Blocks, ...]:
    """Compute ``reference.block_quantize`` of matrices of whole tiles.

    Args:
      x, casts: arguments of the reference.
      interpret: whether to run without a TPU.
    """
    M, N = x.shape
    block_m, block_n = blocks_for((M, N))
    (x,), result = vary_alike(x)
    whole = pl.BlockSpec((block_m, block_n), lambda i, j: (i, j))
    specs, shapes = [], []
    for cast in casts:
        if cast.has_elements:
            size = cast.block[1] if cast.block[0] == 1 else cast.block[0]
            (sizes, blocks), is_transposed = ((M, block_m), (N, block_n)), cast.block[0] == 1
            (along, block_along), (scaled, block_scaled) = (sizes, blocks) if is_transposed else (blocks, sizes)
            index = (lambda i, j: (j, 0, i)) if is_transposed else (lambda i, j: (i, 0, j))
            specs += [whole, pl.BlockSpec((block_scaled // TILE, TILE // size, block_along), index)]
            shapes += [result((M, N), cast.spec.dtype), result((scaled // TILE, TILE // size, along), jnp.float32)]
        if cast.has_values:
            specs.append(whole)
            shapes.append(result((M, N), jnp.bfloat16))
    out = pl.pallas_call(
        functools.partial(_kernel, casts=casts, interpret=interpret),
        grid=(M // block_m, N // block_n),
        in_specs=[pl.BlockSpec((block_m // _ROWS, block_n // TILE, _ROWS, TILE), lambda i, j: (i, j, 0, 0))],
        out_specs=specs,
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name=kernel_name(casts),
    )(x.reshape(M // _ROWS, _ROWS, N // TILE, TILE).swapaxes(1, 2))
    return tuple(_results(cast, iter_out) for iter_out in [iter(out)] for cast in casts)


def _results(cast: Cast, out: Any) -> Blocks:
    """Return the results of a cast, with scales in the shape and dtype of a ``QTensor``."""
    tensor = None
    if cast.has_elements:
        q, scale = next(out), next(out)
        scale = scale.reshape(-1, scale.shape[-1])
        scale = scale.T if cast.block[0] == 1 else scale[:, :: cast.block[1]]
        tensor = QTensor(q, stored_scale(scale, cast.spec))
    return Blocks(tensor, next(out) if cast.has_values else None)


def _kernel(x_ref: Any, *out_refs: Any, casts: tuple[Cast, ...], interpret: bool) -> None:
    groups = TILE // _ROWS

    def rows(k: Any, _: Any) -> None:
        for j in range(x_ref.shape[1]):
            x = x_ref[pl.ds(pl.multiple_of(k * groups, groups), groups), j].reshape(TILE, TILE).astype(jnp.float32)
            magnitude = jnp.where(x == x, jnp.abs(x), jnp.inf) if interpret else jnp.abs(x)
            refs = iter(out_refs)
            for cast in casts:
                _cast_tile(x, magnitude, cast, refs, (k, j))

    jax.lax.fori_loop(0, x_ref.shape[0] // groups, rows, None)


def _cast_tile(x: Array, magnitude: Array, cast: Cast, refs: Iterator[Any], place: tuple[Any, int]) -> None:
    """Cast a tile, and write its elements with their scales, its values, or both.

    Args:
      x, magnitude: tile, and the magnitudes from which its scales are computed.
      cast: cast of the tile.
      refs: references to results, beginning with the results of this cast.
      place: position of the tile in the program's block.
    """
    (k, j), kind = place, element(cast.spec.dtype)
    part, columns = pl.ds(pl.multiple_of(k * TILE, TILE), TILE), slice(j * TILE, (j + 1) * TILE)
    is_transposed, is_power = cast.block[0] == 1, cast.spec.scale_rounding == "up"
    scale = _scale(_block_amax(magnitude, cast.block), cast)
    divisor = _repeat_scale(_reciprocal(scale, cast) if is_power else scale, is_transposed)
    scaled = x * divisor if is_power else x / divisor
    near = None
    if cast.has_elements:
        q = saturating_cast_in_kernel(scaled, kind)
        near = q.astype(jnp.float32)
        next(refs)[part, columns] = q
        at = (j, slice(None), part) if is_transposed else (k, slice(None), columns)
        next(refs)[at] = scale
    if cast.has_values:
        near = _round_to(scaled, kind) if near is None else near
        factor = _repeat_scale(scale, is_transposed) if is_power else divisor
        next(refs)[part, columns] = (near * factor).astype(jnp.bfloat16)


def _block_amax(magnitude: Array, block: tuple[int, ...]) -> Array:
    """Return the largest magnitude of each block; row blocks lie along the lanes, and square blocks repeat theirs."""
    if block[0] == 1:
        magnitude = magnitude.T
    rows, columns = (block[1], 1) if block[0] == 1 else block
    largest = jnp.max(magnitude.reshape(-1, rows, TILE), axis=1)
    return jnp.broadcast_to(jnp.max(largest, axis=1, keepdims=True), largest.shape) if columns > 1 else largest


def _repeat_scale(scale: Array, is_transposed: bool) -> Array:
    """Repeat the scale of each block for all elements of the block."""
    whole = jnp.broadcast_to(scale[:, None], (len(scale), TILE // len(scale), TILE)).reshape(TILE, TILE)
    return whole.T if is_transposed else whole


def _scale(amax: Array, cast: Cast) -> Array:
    """Return float32 scales, or NaN instead of infinity if scales are e8m0."""
    spec = cast.spec
    scale, _ = scale_of_amax(
        amax, element(spec.dtype).bound, dataclasses.replace(spec, scale_dtype="float32"), cast.floor
    )
    return jnp.where(scale == jnp.inf, jnp.nan, scale) if spec.scale_dtype == "float8_e8m0fnu" else scale


def _reciprocal(scale: Array, cast: Cast) -> Array:
    """Return the exact reciprocal of a power of two."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    inverse = jax.lax.bitcast_convert_type((254 << _MANTISSA_BITS) - bits, jnp.float32)
    return (
        jnp.where(bits == _EXPONENT, 0.0, inverse)
        if cast.spec.scale_dtype == "float32"
        else jnp.where(scale == scale, inverse, scale)
    )


def _round_to(x: Array, kind: Element) -> Array:
    """Round as ``saturating_cast`` does, but in float32: add a number whose last bit is the element's last bit."""
    x = jnp.clip(x, -kind.max, kind.max)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    smallest = kind.min_exponent + 127 << _MANTISSA_BITS
    power = jnp.maximum(bits & _EXPONENT, smallest)
    large = jax.lax.bitcast_convert_type(power, jnp.float32) * (1.5 * 2.0 ** (_MANTISSA_BITS - kind.mantissa_bits))
    near = jax.lax.bitcast_convert_type(x + large - large, jnp.int32)
    return jax.lax.bitcast_convert_type(near | (bits & _SIGN), jnp.float32)  # the sum loses the sign of -0
