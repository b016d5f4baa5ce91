"""GGML's block formats, encoded as in ggml's reference (without an importance matrix).

A block is first divided by a power of two, so that sums of squares are finite. This changes no bit of the result,
because the algorithm is homogeneous. A scale that is too large for float16 saturates (ggml stores an infinity); a block
that contains a value that is not finite decodes to NaN.

Source: ``quantize_row_q*_ref``, ``make_qkx2_quants`` and ``make_qx_quants`` of ggml/src/ggml-quants.c.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxquant.core.rounding import prevent_excess_precision
from jaxquant.formats.codec import merge_last, split_blocks
from jaxquant.formats.minifloat import SMALLEST_NORMAL, amax, exponent, power_of_two

_F16_MAX = 65504.0
_Q6_EPSILON = 1e-15
_CACHED = 1 << 15
"""Number of elements that fit into a core's cache together with their intermediate results."""


def _bytes(x: Array) -> UInt8[Array, "... n"]:
    parts = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return parts if parts.ndim == x.ndim else merge_last(parts)


def _f16(x: Float[Array, ...], finite: Array) -> Float[Array, ...]:
    """Return a float16 scale, saturated, or NaN if the block is not finite."""
    return prevent_excess_precision(jnp.where(finite, jnp.clip(x, -_F16_MAX, _F16_MAX), jnp.nan).astype(jnp.float16))


def _divide(x: Float[Array, ...] | float, by: Float[Array, ...]) -> Float[Array, ...]:
    """Return ``x / by``, or 0 if ``by`` is 0 or subnormal, because the quotient could overflow."""
    usable = jnp.abs(by) >= SMALLEST_NORMAL
    return jnp.where(usable, x / jnp.where(usable, by, 1), 0)


def _normalized(x: Float[Array, "... n"]) -> tuple[Float[Array, "... n"], Float[Array, ...]]:
    """Return ``x / 2**e`` with a largest magnitude of about 1, and ``2**e``; values that are not finite become 0."""
    x = jnp.where(jnp.isfinite(x), x, 0)
    power = jnp.clip(exponent(amax(x)), -126, 126)
    return x * power_of_two(-power)[..., None], power_of_two(power)


def _signed_amax(x: Float[Array, "... n"]) -> Float[Array, ...]:
    """Return the element of largest magnitude with its sign (the first of several), using only reductions."""
    magnitude, place = jnp.abs(x), jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    largest = amax(x)
    # A number that contains the index and the sign; the smallest number belongs to the first such element.
    key = jnp.where(magnitude == largest[..., None], 2 * place + (x < 0).astype(place.dtype), 2 * x.shape[-1])
    return jnp.where(jnp.min(key, axis=-1) & 1, -largest, largest)


def encode_f16(x: Float[Array, "... 1"]) -> UInt8[Array, "... 2"]:
    return _bytes(prevent_excess_precision(x.astype(jnp.float16)))


def encode_bf16(x: Float[Array, "... 1"]) -> UInt8[Array, "... 2"]:
    """Round to nearest even with integer arithmetic, which keeps subnormal numbers; a NaN becomes quiet."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    quiet = (bits >> 16 | 0x40).astype(jnp.uint16)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(jnp.uint16)
    return _bytes(jnp.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded))


def encode_q4_0(x: Float[Array, "... 32"]) -> UInt8[Array, "... 18"]:
    """Encode ``d = m / −8``, where m is the element of largest magnitude, ``q = min(15, trunc(x / d + 8.5))``."""
    largest = _signed_amax(x)
    finite = jnp.isfinite(largest)
    step = jnp.clip(jnp.where(finite, largest, 0) / -8, -_F16_MAX, _F16_MAX)
    scaled = jnp.where(finite[..., None], x * _divide(1, step)[..., None], 0)
    codes = jnp.clip(jnp.trunc(scaled + 8.5), 0, 15).astype(jnp.uint8)
    nibbles = codes[..., :16] | codes[..., 16:] << 4
    return jnp.concatenate([_bytes(_f16(step, finite)[..., None]), nibbles], axis=-1)


def encode_q8_0(x: Float[Array, "... 32"]) -> UInt8[Array, "... 34"]:
    """Encode ``d = max|x| / 127``, ``q = x / d`` rounded half away from zero."""
    largest = amax(x)
    finite = jnp.isfinite(largest)
    step = jnp.clip(jnp.where(finite, largest, 0) / 127, -_F16_MAX, _F16_MAX)
    scaled = jnp.where(finite[..., None], x * _divide(1, step)[..., None], 0)
    rounded = jnp.clip(jax.lax.round(scaled, jax.lax.RoundingMethod.AWAY_FROM_ZERO), -127, 127)
    codes = jax.lax.bitcast_convert_type(rounded.astype(jnp.int8), jnp.uint8)
    return jnp.concatenate([_bytes(_f16(step, finite)[..., None]), codes], axis=-1)


def _blocks_last(x: Float[Array, "... super sub n"]) -> Float[Array, "... n blocks"]:
    """Return the sub-blocks of a row side by side, with elements along the second-last axis."""
    return jnp.swapaxes(x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1]), -1, -2)


def _map_batches(fit: Callable[[Array], tuple[Array, ...]], x: Float[Array, "... n blocks"]) -> tuple[Array, ...]:
    """Apply ``fit`` to rows; on CPUs in batches, so that the loop over trials reads a batch from the cache.

    On other platforms, and if a mesh with explicit axes shards the rows, all rows are computed at once.
    """
    rows = max(1, _CACHED // max(1, x.shape[-2] * x.shape[-1]))
    lead = x.shape[:-2]
    if math.prod(lead) <= rows or any(axis is not None for axis in jax.typeof(x).sharding.spec):
        return fit(x)

    def parts(x: jax.Array) -> tuple[jax.Array, ...]:
        found = jax.lax.map(fit, x.reshape(-1, *x.shape[-2:]), batch_size=rows)
        return tuple(part.reshape(*lead, x.shape[-1]) for part in found)

    return jax.lax.platform_dependent(x, cpu=parts, default=fit)


def _sums(*terms: Float[Array, "... n blocks"]) -> list[Float[Array, "... blocks"]]:
    """Return the sums over each block, in one pass, in the order in which ggml adds.

    Elements lie along the second-last axis, so that neighbours in memory belong to different blocks and XLA:CPU can
    vectorize; separate sums would compute the shared terms again.
    """
    zeros = (jnp.float32(0),) * len(terms)
    return jax.lax.reduce(terms, zeros, lambda x, y: tuple(map(jnp.add, x, y)), (terms[0].ndim - 2,))


def _fit_affine(
    x: Float[Array, "... 32 blocks"], qmax: int, start: float, steps: int
) -> tuple[Float[Array, "... blocks"], Float[Array, "... blocks"]]:
    """Fit ``x ≈ scale · q − minimum`` with q in 0 … qmax and minimum ≥ 0; ``make_qkx2_quants``.

    Weights are ``rms(x) + |x|``. For each of ``steps + 1`` trial scales, q is computed by rounding, and (scale,
    minimum) by weighted least squares; the pair with the smallest weighted squared error is selected. As in ggml, a
    trial starts from the minimum of the best pair so far.
    """
    (sum_squares,) = _sums(x * x)
    rms = jnp.sqrt(sum_squares / x.shape[-2])[..., None, :]
    high = jnp.max(x, axis=-2)
    lowest = low = jnp.minimum(jnp.min(x, axis=-2), 0)
    weights = rms + jnp.abs(x)
    sum_w, sum_x = _sums(weights, weights * x)

    def quantize(inverse: jax.Array, low: jax.Array) -> jax.Array:
        return jnp.clip(jnp.round(inverse[..., None, :] * (x - low[..., None, :])), 0, qmax)

    def error_of(scale: jax.Array, low: jax.Array, q: jax.Array) -> jax.Array:
        weights = rms + jnp.abs(x)
        return _sums(weights * (scale[..., None, :] * q + low[..., None, :] - x) ** 2)[0]

    inverse = _divide(qmax, high - low)
    scale = _divide(1, inverse)
    state = scale, low, error_of(scale, low, quantize(inverse, low))

    def trial(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        _, low, error = state
        q = quantize(_divide(start + 0.1 * index + qmax, high - low), low)
        weighted = (rms + jnp.abs(x)) * q
        sum_q, sum_qq, sum_qx = _sums(weighted, weighted * q, weighted * x)
        determinant = sum_w * sum_qq - sum_q * sum_q
        new_scale = _divide(sum_w * sum_qx - sum_x * sum_q, determinant)
        new_low = _divide(sum_qq * sum_x - sum_q * sum_qx, determinant)
        new_scale = jnp.where(new_low > 0, _divide(sum_qx, sum_qq), new_scale)
        new_low = jnp.minimum(new_low, 0)
        new_error = error_of(new_scale, new_low, q)
        better = (determinant > 0) & (new_error < error)
        new_state = new_scale, new_low, new_error
        return tuple(jnp.where(better, new, old) for new, old in zip(new_state, state, strict=True))

    scale, low, _ = jax.lax.fori_loop(0, steps + 1, trial, state)
    return jnp.where(high == lowest, 0, scale), -low


def _six_bits(values: Float[Array, "... 8"]) -> tuple[Float[Array, ...], Int[Array, "... 8"]]:
    """Return the largest value, and each value as a multiple of 1/63 of it."""
    largest = jnp.abs(jnp.maximum(jnp.max(values, axis=-1), 0))  # avoids a negative zero
    codes = jnp.round(_divide(63, largest)[..., None] * values)
    return largest, jnp.clip(codes, 0, 63).astype(jnp.int32)


def _pack_scales(scales: Int[Array, "... 8"], minimums: Int[Array, "... 8"]) -> UInt8[Array, "... 12"]:
    first = scales[..., :4] | scales[..., 4:] >> 4 << 6
    second = minimums[..., :4] | minimums[..., 4:] >> 4 << 6
    third = scales[..., 4:] & 0xF | (minimums[..., 4:] & 0xF) << 4
    return jnp.concatenate([first, second, third], axis=-1).astype(jnp.uint8)


def _encode_affine_k(x: Float[Array, "... 256"], qmax: int, start: float, steps: int) -> UInt8[Array, "... bytes"]:
    finite = jnp.isfinite(amax(x))
    x = split_blocks(jnp.where(finite[..., None], x, 0), 32)
    normalized, unit = _normalized(x)
    fits = _map_batches(lambda part: _fit_affine(part, qmax, start, steps), _blocks_last(normalized))
    scales, minimums = (value.reshape(unit.shape) * unit for value in fits)
    largest_scale, scale_codes = _six_bits(scales)
    largest_minimum, minimum_codes = _six_bits(minimums)
    step, offset = _f16(largest_scale / 63, finite), _f16(largest_minimum / 63, finite)
    # Quantize again with the stored scales.
    sub_step = step.astype(jnp.float32)[..., None] * scale_codes.astype(jnp.float32)
    sub_offset = offset.astype(jnp.float32)[..., None] * minimum_codes.astype(jnp.float32)
    codes = jnp.round(_divide(x + sub_offset[..., None], sub_step[..., None]))
    codes = jnp.clip(jnp.where(finite[..., None, None], codes, 0), 0, qmax).astype(jnp.uint8)
    nibbles = codes[..., 0::2, :] & 0xF | codes[..., 1::2, :] << 4
    header = [_bytes(step[..., None]), _bytes(offset[..., None]), _pack_scales(scale_codes, minimum_codes)]
    if qmax == 31:
        shifts = jax.lax.broadcasted_iota(jnp.uint8, codes.shape, codes.ndim - 2)
        header.append(jnp.sum(codes >> 4 << shifts, axis=-2, dtype=jnp.uint8))
    return jnp.concatenate([*header, merge_last(nibbles)], axis=-1)


encode_q4_k = functools.partial(_encode_affine_k, qmax=15, start=-1.0, steps=20)
encode_q5_k = functools.partial(_encode_affine_k, qmax=31, start=-0.5, steps=15)


def _fit_symmetric(x: Float[Array, "... 16 blocks"]) -> tuple[Float[Array, "... blocks"]]:
    """Fit ``x ≈ scale · q`` with q in −32 … 31, weighted by x²; ``make_qx_quants`` with rmse_type 1.

    Selects among 19 trial scales around −32 / m, where m is the element of largest magnitude. The best q has the
    largest ``(Σ w x q)² / Σ w q²``.
    """
    largest = _signed_amax(jnp.swapaxes(x, -1, -2))
    trials = jnp.arange(-9.0, 10.0, dtype=jnp.float32).reshape((1,) * (largest.ndim - 1) + (-1, 1))
    inverse = _divide(-(32 + 0.1 * trials), largest[..., None, :])[..., None, :]
    x = x[..., None, :, :]
    q = jnp.clip(jnp.round(inverse * x), -32, 31)
    weighted = x * x * q
    sums_xq, sums_qq = _sums(weighted * x, weighted * q)  # [..., trials, blocks]

    def trial(index: jax.Array | int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scale, best = state
        sum_xq, sum_qq = (jax.lax.dynamic_index_in_dim(sums, index, -2, False) for sums in (sums_xq, sums_qq))
        better = (sum_qq > 0) & (sum_xq * sum_xq > best * sum_qq)
        new_scale = _divide(sum_xq, sum_qq)
        return jnp.where(better, new_scale, scale), jnp.where(better, new_scale * sum_xq, best)

    # Start with the scale of the trial with −32 / m.
    scale = _divide(sums_xq[..., 9, :], sums_qq[..., 9, :])
    return jax.lax.fori_loop(0, 19, trial, (scale, scale * sums_xq[..., 9, :]))[:1]


def encode_q6_k(x: Float[Array, "... 256"]) -> UInt8[Array, "... 210"]:
    """Encode sixteen sub-blocks of 16 with int8 multiples of a float16 scale; a block below 1e-15 becomes 0."""
    finite = jnp.isfinite(amax(x))
    x = split_blocks(jnp.where(finite[..., None], x, 0), 16)
    normalized, unit = _normalized(x)
    is_zero = amax(x) < _Q6_EPSILON
    (fit,) = _map_batches(_fit_symmetric, _blocks_last(normalized))
    scales = jnp.where(is_zero, 0, fit.reshape(unit.shape) * unit)
    largest = _signed_amax(scales)
    used = jnp.abs(largest) >= _Q6_EPSILON
    inverse = jnp.where(used, _divide(-128, largest), 0)
    step = jnp.where(finite & ~used, 0, _f16(_divide(1, inverse), finite)).astype(jnp.float16)
    scale_codes = jnp.minimum(jnp.round(inverse[..., None] * scales), 127).astype(jnp.int8)
    sub_step = step.astype(jnp.float32)[..., None] * scale_codes.astype(jnp.float32)
    codes = jnp.round(_divide(x, sub_step[..., None]))
    codes = jnp.clip(jnp.where(finite[..., None, None], codes, 0), -32, 31).astype(jnp.int32) + 32
    # As in ggml, the codes of a zero sub-block are 0, and all bytes of a block of zero sub-blocks are 0.
    codes = jnp.where(used[..., None, None] & ~is_zero[..., None], codes, 0).astype(jnp.uint8)
    groups = merge_last(codes).reshape(*codes.shape[:-2], 2, 4, 32)  # [..., half, group, 32]
    low = merge_last(groups[..., 0:2, :] & 0xF | groups[..., 2:4, :] << 4)
    high = groups >> 4
    pairs = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    return jnp.concatenate([merge_last(low), merge_last(pairs), _bytes(scale_codes), _bytes(step[..., None])], axis=-1)
