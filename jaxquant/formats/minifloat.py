"""Floats of four, six and eight bits as codes (their bit patterns), computed with integer arithmetic on any platform.

XLA has no six-bit dtype, and its cast to ``float8_e8m0fnu`` turns 0 into NaN and rounds to nearest. This
file computes small codes and E8M0 scales from the bits of a float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxquant.core.dtypes import Element, floating
from jaxquant.core.rounding import saturating_cast

SMALLEST_NORMAL = 2.0**-126
E8M0_BIAS = 127
E8M0_NAN = 255
_MANTISSA = 0x7FFFFF


_NAMES = ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3fn", "float8_e5m2")
MINIFLOATS = {name: floating(name) for name in _NAMES}
"""Element types of OCP MX v1.0, section 5.3."""


def encode_minifloat(x: Float[Array, ...], kind: Element) -> UInt8[Array, ...]:
    """Return the codes of ``x``: rounded to nearest, ties to even, saturating at ``kind.max``.

    The eight-bit types keep NaN. The smaller types cannot represent NaN; the scale marks a block that contains a NaN.
    """
    x = x.astype(jnp.float32)
    if kind.bits == 8:
        return jax.lax.bitcast_convert_type(saturating_cast(x, kind), jnp.uint8)
    magnitude = jnp.minimum(jnp.abs(x), kind.max)
    binade = jnp.maximum(exponent(magnitude), kind.min_exponent)
    # Steps of the grid in this binade, 0 to 2^(mantissa_bits + 1); a carry into the next binade gives the right code.
    steps = jnp.round(magnitude * power_of_two(kind.mantissa_bits - binade)).astype(jnp.int32)
    code = ((binade - kind.min_exponent) << kind.mantissa_bits) + steps
    return (code | jnp.signbit(x).astype(jnp.int32) << (kind.bits - 1)).astype(jnp.uint8)


def decode_minifloat(code: UInt8[Array, ...], kind: Element) -> Float[Array, ...]:
    """Return the float32 values of codes, exactly."""
    if kind.bits == 8:
        return jax.lax.bitcast_convert_type(code, jnp.dtype(kind.name)).astype(jnp.float32)
    code = code.astype(jnp.int32)
    mantissa = code & (2**kind.mantissa_bits - 1)
    field = code >> kind.mantissa_bits & (2 ** (kind.bits - 1 - kind.mantissa_bits) - 1)
    steps = jnp.where(field > 0, mantissa + 2**kind.mantissa_bits, mantissa).astype(jnp.float32)
    value = steps * power_of_two(jnp.maximum(field, 1) - 1 + kind.min_exponent - kind.mantissa_bits)
    return jnp.where(code >> (kind.bits - 1) & 1 == 1, -value, value)


def amax(x: Float[Array, "... n"]) -> Float[Array, ...]:
    """Return the largest magnitude along the last axis, or NaN if an element is NaN.

    Compares the bits, which are ordered like the magnitudes, with NaN last: XLA:CPU's maximum of floats loses NaN in
    arrays that are not small.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1, initial=0), jnp.float32)


def exponent(x: Float[Array, ...]) -> Int[Array, ...]:
    """Return ``floor(log2(|x|))`` of float32, exactly; −127 for zero and subnormal numbers, 128 for inf and NaN."""
    return (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23 & 0xFF) - 127


def power_of_two(power: Int[Array, ...]) -> Float[Array, ...]:
    """Return ``2**power`` in float32 for −126 ≤ power ≤ 127, clipped to that range."""
    return jax.lax.bitcast_convert_type((jnp.clip(power, -126, 127) + 127) << 23, jnp.float32)


def times_power_of_two(x: Float[Array, ...], power: Int[Array, ...]) -> Float[Array, ...]:
    """Return ``x · 2**power`` by arithmetic on the bits, so that subnormal results are not flushed to zero.

    Exact if float32 can represent the result, otherwise truncated. Zeros, infinities and NaN do not change.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    field = bits >> 23 & 0xFF
    target = field + power
    normal = (jnp.clip(target, 0, 255) << 23) | (bits & _MANTISSA)
    subnormal = (bits & _MANTISSA | 0x800000) >> jnp.clip(1 - target, 0, 31)
    magnitude = jnp.where(target >= 255, 0xFF << 23, jnp.where(target >= 1, normal, subnormal))
    magnitude = jnp.where((field == 0) | (field == 255), bits & 0x7FFFFFFF, magnitude)
    return jax.lax.bitcast_convert_type(magnitude | (bits & jnp.int32(-(2**31))), jnp.float32)


def encode_e8m0(amax: Float[Array, ...], kind: Element, rounding: str = "up") -> UInt8[Array, ...]:
    """Return the E8M0 byte of the scale that maps ``amax`` into the range of an element type.

    ``up``: ``2**ceil(log2(amax / max))``, so that a value saturates only if it would decode to infinity. ``floor``:
    ``2**(floor(log2(amax)) − floor(log2(max)))``, with which up to half of the last binade saturates. Both use exponent
    arithmetic. The scale of a zero amax is the smallest, 2^-127; the scale of an amax that is not finite is NaN, 255.

    Source: OCP MX v1.0, sections 5.4.1 and 6.3 (``floor``); NVIDIA's ``cvt.rp.satfinite.ue8m0x2`` (``up``).
    """
    largest = jnp.float32(kind.max)
    power = exponent(amax) - exponent(largest)
    if rounding == "up":
        mantissa = jax.lax.bitcast_convert_type(amax, jnp.int32) & _MANTISSA
        power += mantissa > (jax.lax.bitcast_convert_type(largest, jnp.int32) & _MANTISSA)
    # The upper bound is the largest scale whose product with the element's largest value is a finite float32.
    byte = jnp.clip(power, -E8M0_BIAS, 127 - exponent(largest)) + E8M0_BIAS
    return jnp.where(jnp.isfinite(amax), byte, E8M0_NAN).astype(jnp.uint8)
