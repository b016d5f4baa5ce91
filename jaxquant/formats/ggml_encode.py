"""GGML's block formats, encoded as ggml's reference does (no importance matrix).

All numbers of a block are divided by a power of two first, which changes no bit of the algorithm (it is homogeneous)
and keeps its sums of squares finite. A scale beyond float16 saturates, where ggml stores an infinity; a block that
holds a value that is not finite decodes to NaN.

Source: ``quantize_row_q*_ref``, ``make_qkx2_quants`` and ``make_qx_quants`` of ggml/src/ggml-quants.c.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxquant.formats.codec import blocks_of, joined
from jaxquant.formats.minifloat import SMALLEST_NORMAL, exponent, power_of_two

_F16_MAX = 65504.0
_Q6_EPSILON = 1e-15


def _bytes(x: Array) -> UInt8[Array, "... n"]:
    parts = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return parts if parts.ndim == x.ndim else joined(parts)


def _f16(x: Float[Array, ...], finite: Array) -> Float[Array, ...]:
    """Return a float16 scale, saturated, or NaN for a block that is not finite."""
    return jnp.where(finite, jnp.clip(x, -_F16_MAX, _F16_MAX), jnp.nan).astype(jnp.float16)


def _divide(x: Float[Array, ...] | float, by: Float[Array, ...]) -> Float[Array, ...]:
    """Return ``x / by``, or 0 where ``by`` is 0 or subnormal, of which a quotient could overflow."""
    usable = jnp.abs(by) >= SMALLEST_NORMAL
    return jnp.where(usable, x / jnp.where(usable, by, 1), 0)


def _normalized(x: Float[Array, "... n"]) -> tuple[Float[Array, "... n"], Float[Array, ...]]:
    """Return ``x / 2**e`` with a largest magnitude of about 1, and ``2**e``; what is not finite becomes 0."""
    x = jnp.where(jnp.isfinite(x), x, 0)
    power = jnp.clip(exponent(jnp.max(jnp.abs(x), axis=-1)), -126, 126)
    return x * power_of_two(-power)[..., None], power_of_two(power)


def _signed_amax(x: Float[Array, "... n"]) -> Float[Array, ...]:
    """Return the element of largest magnitude with its sign; the first of several, by reductions alone."""
    magnitude, place = jnp.abs(x), jnp.arange(x.shape[-1], dtype=jnp.int32)
    is_largest = magnitude == jnp.max(magnitude, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(is_largest, place, x.shape[-1]), axis=-1, keepdims=True)
    return jnp.sum(jnp.where(place == first, x, 0), axis=-1)


def encode_f16(x: Float[Array, "... 1"]) -> UInt8[Array, "... 2"]:
    return _bytes(x.astype(jnp.float16))


def encode_bf16(x: Float[Array, "... 1"]) -> UInt8[Array, "... 2"]:
    """Round to nearest even by bits, a NaN made quiet, so that subnormal numbers are kept."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    quiet = (bits >> 16 | 0x40).astype(jnp.uint16)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(jnp.uint16)
    return _bytes(jnp.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded))


def encode_q4_0(x: Float[Array, "... 32"]) -> UInt8[Array, "... 18"]:
    """Encode ``d = m / −8`` with m the signed largest, ``q = min(15, trunc(x / d + 8.5))``."""
    finite = jnp.all(jnp.isfinite(x), axis=-1)
    x = jnp.where(finite[..., None], x, 0)
    step = jnp.clip(_signed_amax(x) / -8, -_F16_MAX, _F16_MAX)
    codes = jnp.clip(jnp.trunc(x * _divide(1, step)[..., None] + 8.5), 0, 15).astype(jnp.uint8)
    nibbles = codes[..., :16] | codes[..., 16:] << 4
    return jnp.concatenate([_bytes(_f16(step, finite)[..., None]), nibbles], axis=-1)


def encode_q8_0(x: Float[Array, "... 32"]) -> UInt8[Array, "... 34"]:
    """Encode ``d = max|x| / 127``, ``q = x / d`` rounded half away from zero."""
    finite = jnp.all(jnp.isfinite(x), axis=-1)
    x = jnp.where(finite[..., None], x, 0)
    step = jnp.clip(jnp.max(jnp.abs(x), axis=-1) / 127, -_F16_MAX, _F16_MAX)
    scaled = x * _divide(1, step)[..., None]
    rounded = jnp.clip(jax.lax.round(scaled, jax.lax.RoundingMethod.AWAY_FROM_ZERO), -127, 127)
    codes = jax.lax.bitcast_convert_type(rounded.astype(jnp.int8), jnp.uint8)
    return jnp.concatenate([_bytes(_f16(step, finite)[..., None]), codes], axis=-1)


def _fit_affine(
    x: Float[Array, "... 32"], qmax: int, start: float, steps: int
) -> tuple[Float[Array, ...], Float[Array, ...]]:
    """Fit ``x ≈ scale · q − minimum`` with q in 0 … qmax and minimum ≥ 0; ``make_qkx2_quants``.

    Weights are ``rms(x) + |x|``. From each of ``steps + 1`` trial scales q follows by rounding and (scale, minimum) by
    weighted least squares; the pair with the smallest weighted squared error wins. As in ggml, a trial starts from the
    minimum of the best pair so far.
    """
    weights = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True)) + jnp.abs(x)
    high = jnp.max(x, axis=-1)
    low = jnp.minimum(jnp.min(x, axis=-1), 0)
    sum_w, sum_x = jnp.sum(weights, axis=-1), jnp.sum(weights * x, axis=-1)

    def quantize(inverse: jax.Array, low: jax.Array) -> jax.Array:
        return jnp.clip(jnp.round(inverse[..., None] * (x - low[..., None])), 0, qmax)

    def error_of(scale: jax.Array, low: jax.Array, q: jax.Array) -> jax.Array:
        return jnp.sum(weights * (scale[..., None] * q + low[..., None] - x) ** 2, axis=-1)

    inverse = _divide(qmax, high - low)
    scale = _divide(1, inverse)
    state = scale, low, error_of(scale, low, quantize(inverse, low))

    def trial(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        _, low, error = state
        q = quantize(_divide(start + 0.1 * index + qmax, high - low), low)
        sum_q, sum_qq = jnp.sum(weights * q, axis=-1), jnp.sum(weights * q * q, axis=-1)
        sum_qx = jnp.sum(weights * q * x, axis=-1)
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
    return jnp.where(high == jnp.minimum(jnp.min(x, axis=-1), 0), 0, scale), -low


def _six_bits(values: Float[Array, "... 8"]) -> tuple[Float[Array, ...], Int[Array, "... 8"]]:
    """Return the largest value and each as a share of it in 63rds."""
    largest = jnp.abs(jnp.maximum(jnp.max(values, axis=-1), 0))  # never a negative zero
    codes = jnp.round(_divide(63, largest)[..., None] * values)
    return largest, jnp.clip(codes, 0, 63).astype(jnp.int32)


def _pack_scales(scales: Int[Array, "... 8"], minimums: Int[Array, "... 8"]) -> UInt8[Array, "... 12"]:
    first = scales[..., :4] | scales[..., 4:] >> 4 << 6
    second = minimums[..., :4] | minimums[..., 4:] >> 4 << 6
    third = scales[..., 4:] & 0xF | (minimums[..., 4:] & 0xF) << 4
    return jnp.concatenate([first, second, third], axis=-1).astype(jnp.uint8)


def _encode_affine_k(x: Float[Array, "... 256"], qmax: int, start: float, steps: int) -> UInt8[Array, "... bytes"]:
    finite = jnp.all(jnp.isfinite(x), axis=-1)
    x = blocks_of(jnp.where(finite[..., None], x, 0), 32)
    normalized, unit = _normalized(x)
    scales, minimums = (value * unit for value in _fit_affine(normalized, qmax, start, steps))
    largest_scale, scale_codes = _six_bits(scales)
    largest_minimum, minimum_codes = _six_bits(minimums)
    step, offset = _f16(largest_scale / 63, finite), _f16(largest_minimum / 63, finite)
    # Quantized once more with the scales as they are stored.
    sub_step = step.astype(jnp.float32)[..., None] * scale_codes
    sub_offset = offset.astype(jnp.float32)[..., None] * minimum_codes
    codes = jnp.round(_divide(x + sub_offset[..., None], sub_step[..., None]))
    codes = jnp.clip(jnp.where(finite[..., None, None], codes, 0), 0, qmax).astype(jnp.uint8)
    nibbles = codes[..., 0::2, :] & 0xF | codes[..., 1::2, :] << 4
    header = [_bytes(step[..., None]), _bytes(offset[..., None]), _pack_scales(scale_codes, minimum_codes)]
    if qmax == 31:
        shifts = jnp.arange(8, dtype=jnp.uint8)[:, None]
        header.append(jnp.sum(codes >> 4 << shifts, axis=-2, dtype=jnp.uint8))
    return jnp.concatenate([*header, joined(nibbles)], axis=-1)


encode_q4_k = functools.partial(_encode_affine_k, qmax=15, start=-1.0, steps=20)
encode_q5_k = functools.partial(_encode_affine_k, qmax=31, start=-0.5, steps=15)


def _fit_symmetric(x: Float[Array, "... 16"]) -> Float[Array, ...]:
    """Fit ``x ≈ scale · q`` with q in −32 … 31, weighted by x²; ``make_qx_quants`` with rmse_type 1.

    Of 19 trial scales around −32 / m, m the signed largest, the one wins whose q explains most:
    the largest ``(Σ w x q)² / Σ w q²``.
    """
    largest = _signed_amax(x)
    weights = x * x

    def sums(trial: jax.Array | float) -> tuple[jax.Array, jax.Array]:
        q = jnp.clip(jnp.round(_divide(-(32 + 0.1 * trial), largest)[..., None] * x), -32, 31)
        return jnp.sum(weights * x * q, axis=-1), jnp.sum(weights * q * q, axis=-1)

    sum_xq, sum_qq = sums(0.0)
    scale = _divide(sum_xq, sum_qq)

    def trial(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scale, best = state
        sum_xq, sum_qq = sums((index - 9).astype(jnp.float32))
        better = (sum_qq > 0) & (sum_xq * sum_xq > best * sum_qq)
        new_scale = _divide(sum_xq, sum_qq)
        return jnp.where(better, new_scale, scale), jnp.where(better, new_scale * sum_xq, best)

    return jax.lax.fori_loop(0, 19, trial, (scale, scale * sum_xq))[0]


def encode_q6_k(x: Float[Array, "... 256"]) -> UInt8[Array, "... 210"]:
    """Encode sixteen sub-blocks of 16 with int8 shares of a float16 scale; below 1e-15 all is 0."""
    finite = jnp.all(jnp.isfinite(x), axis=-1)
    x = blocks_of(jnp.where(finite[..., None], x, 0), 16)
    normalized, unit = _normalized(x)
    is_zero = jnp.max(jnp.abs(x), axis=-1) < _Q6_EPSILON
    scales = jnp.where(is_zero, 0, _fit_symmetric(normalized) * unit)
    largest = _signed_amax(scales)
    used = jnp.abs(largest) >= _Q6_EPSILON
    inverse = jnp.where(used, _divide(-128, largest), 0)
    step = jnp.where(finite & ~used, 0, _f16(_divide(1, inverse), finite)).astype(jnp.float16)
    scale_codes = jnp.minimum(jnp.round(inverse[..., None] * scales), 127).astype(jnp.int8)
    sub_step = step.astype(jnp.float32)[..., None] * scale_codes.astype(jnp.float32)
    codes = jnp.round(_divide(x, sub_step[..., None]))
    codes = jnp.clip(jnp.where(finite[..., None, None], codes, 0), -32, 31).astype(jnp.int32) + 32
    # As in ggml, which leaves the codes of sub-blocks of zeros at 0, and all bytes of a block that has no others.
    codes = jnp.where(used[..., None, None] & ~is_zero[..., None], codes, 0).astype(jnp.uint8)
    groups = codes.reshape(*codes.shape[:-2], 2, 4, 32)  # [..., half, group, 32]
    low = joined(groups[..., 0:2, :] & 0xF | groups[..., 2:4, :] << 4)
    high = groups >> 4
    pairs = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    return jnp.concatenate([joined(low), joined(pairs), _bytes(scale_codes), _bytes(step[..., None])], axis=-1)
