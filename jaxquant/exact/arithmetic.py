"""Sums in fixed point, and elementary functions in sums and products that no compiler can join."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxquant.core.scales import bits_of, largest

Array = jax.Array

LONGEST_AXIS = 4096 * 2**15
"""Largest axis that ``sum`` adds in int32."""

_ROW = 4096  # elements whose limbs one int32 can add
_LIMB_BITS = 18  # a limb is at most 2**18; a grid that depended on the axis's size would depend on its padding
_LARGEST = float(jnp.finfo(jnp.float32).max)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # Cody and Waite
_LOG2E = math.log2(math.e)


@jax.custom_jvp
def hold(x: Array) -> Array:
    """Return x unchanged, and keep its product apart from a following sum.

    LLVM joins a multiplication and an addition of one fusion to a fused multiply-add, which rounds once instead of
    twice. XLA:CPU removes ``optimization_barrier`` and ``reduce_precision`` before LLVM joins them. This selection is
    the identity for every number, and LLVM keeps it.

    Args:
      x: product, in any float dtype.
    """
    return jnp.where(x > float(jnp.finfo(x.dtype).max), jnp.inf, x)


hold.defjvp(lambda primals, tangents: (hold(primals[0]), tangents[0]))


def round_to(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Round float32 to the nearest bfloat16, or return it unchanged for float32.

    XLA removes a cast to bfloat16 that is cast back in the same fusion. Integer arithmetic rounds in every program. The
    gradient is the identity.

    Args:
      x: array of any float dtype; a bfloat16 array whose rounding XLA removed is rounded again.
      dtype: "float32" or "bfloat16".

    Raises:
      ValueError: the dtype is neither float32 nor bfloat16.
    """
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype {jnp.dtype(dtype).name} has no exact rounding; use float32 or bfloat16")
    x = x.astype(jnp.float32)
    return x if jnp.dtype(dtype) == jnp.float32 else _round_bfloat16(x).astype(jnp.bfloat16)


@jax.custom_jvp
def _round_bfloat16(x: Array) -> Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(rounded, jnp.float32), x)


_round_bfloat16.defjvp(lambda primals, tangents: (_round_bfloat16(primals[0]), tangents[0]))


def unit_above(amax: Array) -> Array:
    """Return the smallest power of two that is not below a positive amax, or 1 for zero.

    The unit is NaN if the amax is not finite or above 2**123, whose unit would have no normal reciprocal.
    """
    exponent = ((bits_of(amax) + 0x7FFFFF) >> 23).clip(30, 250)  # both the unit and its reciprocal are normal numbers
    unit = jnp.where(amax > 0, jax.lax.bitcast_convert_type(exponent << 23, jnp.float32), 1.0)
    return jnp.where(amax <= 2.0**123, unit, jnp.nan)


@jax.custom_jvp
def sum(x: Array) -> Array:
    """Return the float32 sums of the last axis, added in int32.

    Each element is rounded to 36 bits below the power of two above the row's amax, in two limbs of 18 bits. Zeros
    appended to the axis change no bit. If the amax is above 2**-97, the error is at most ``n · amax · 2**-36`` and
    three roundings of the total.

    Args:
      x: array [..., n], n at most ``LONGEST_AXIS``. A row with an element that is not finite, or whose magnitude is
        above 2**123, has the sum NaN.

    Raises:
      ValueError: x is a scalar, or the last axis is longer than ``LONGEST_AXIS``.
    """
    if x.ndim == 0 or x.shape[-1] > LONGEST_AXIS:
        raise ValueError(f"shape {x.shape} has no last axis, or one longer than {LONGEST_AXIS}; split the sum")
    if x.shape[-1] == 0:
        return jnp.zeros(x.shape[:-1], jnp.float32)
    x = x.astype(jnp.float32)
    unit = unit_above(largest(x, axis=-1, keepdims=True))
    rest, total = hold(x * (1 / unit)), jnp.zeros((), jnp.float32)
    parts, scale = [], 2.0**_LIMB_BITS
    for _ in range(2):
        limb = jnp.round(rest * scale)
        parts.append(_sum_limbs(limb.astype(jnp.int32)) * (1 / scale))
        rest, scale = rest - limb * (1 / scale), scale * 2.0**_LIMB_BITS
    for part in reversed(parts):  # all factors above are powers of two, so a joined sum rounds as two operations do
        total = total + part
    return total * unit[..., 0]


sum.defjvp(lambda primals, tangents: (sum(primals[0]), jnp.sum(tangents[0], -1, dtype=jnp.float32)))


def _sum_limbs(limbs: Array) -> Array:
    """Add the last axis of int32 limbs of at most 18 bits, and round the total to float32."""
    size = limbs.shape[-1]
    if size > _ROW:
        limbs = jnp.pad(limbs, [(0, 0)] * (limbs.ndim - 1) + [(0, -size % _ROW)])
        limbs = limbs.reshape(*limbs.shape[:-1], -1, _ROW)
    else:
        limbs = limbs[..., None, :]
    rows = jnp.sum(limbs, -1)
    low = jnp.sum(rows & 0xFFFF, -1)
    high = jnp.sum(rows >> 16, -1) + (low >> 16)
    return high.astype(jnp.float32) * 65536 + (low & 0xFFFF).astype(jnp.float32)


@jax.custom_jvp
def exp(x: Array) -> Array:
    """Return exp(x) in float32, with a relative error below 1e-7; 0 below -87, infinity above 88.7."""
    x = x.astype(jnp.float32)
    clipped = jnp.clip(x, -87.0, 88.8)
    n = jnp.round(hold(clipped * _LOG2E))
    r = (clipped - hold(n * _LN2_HIGH)) - hold(n * _LN2_LOW)
    y = _polynomial(r, (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0))
    half = jnp.floor(n * 0.5)  # two factors, because 2**128 is not a float32
    y = hold(y * _power_of_two(half) * _power_of_two(n - half))
    return jnp.where(x < -87.0, 0.0, jnp.where(x > 88.8, jnp.inf, jnp.where(x == x, y, jnp.nan)))


@exp.defjvp
def _exp_jvp(primals, tangents):
    y = exp(primals[0])
    return y, y * tangents[0].astype(jnp.float32)


@jax.custom_jvp
def log(x: Array) -> Array:
    """Return the logarithm of normal positive numbers in float32, with an absolute error below 1e-6.

    Zero and negative numbers give -infinity and NaN. Computed as ``2 atanh((m - 1) / (m + 1)) + n ln 2`` of
    ``x = m 2**n``, with m between ``sqrt(0.5)`` and ``sqrt(2)``.
    """
    x = x.astype(jnp.float32)
    bits = bits_of(x) - 0x3F3504F3
    n = (bits >> 23).astype(jnp.float32)
    m = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) + 0x3F3504F3, jnp.float32)
    s = (m - 1.0) / (m + 1.0)
    p = _polynomial(hold(s * s), (1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0))
    y = (hold(p * s) * 2.0 + hold(n * _LN2_LOW)) + hold(n * _LN2_HIGH)
    special = jnp.where(x == 0, -jnp.inf, jnp.where(x == jnp.inf, x, jnp.nan))
    return jnp.where((x > 0) & (x < jnp.inf), y, special)


@log.defjvp
def _log_jvp(primals, tangents):
    return log(primals[0]), tangents[0].astype(jnp.float32) / primals[0].astype(jnp.float32)


@jax.custom_jvp
def rsqrt(x: Array) -> Array:
    """Return 1 / sqrt(x) of normal positive numbers in float32, with a relative error below 2e-7.

    Four Newton steps from a guess in integers. XLA's own function may use a hardware estimate for a part of an array.
    """
    x = x.astype(jnp.float32)
    y = jax.lax.bitcast_convert_type(0x5F375A86 - (bits_of(x) >> 1), jnp.float32)
    for _ in range(4):
        y = y * (1.5 - hold(hold(x * y) * y) * 0.5)
    return jnp.where((x > 0) & (x < jnp.inf), y, jnp.where(x == 0, jnp.inf, jnp.where(x == jnp.inf, 0.0, jnp.nan)))


@rsqrt.defjvp
def _rsqrt_jvp(primals, tangents):
    y = rsqrt(primals[0])
    return y, -0.5 * y * y * y * tangents[0].astype(jnp.float32)


def _polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    """Evaluate a polynomial by Horner's rule, highest power first."""
    y = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        y = hold(y * x) + coefficient
    return y


def _power_of_two(n: Array) -> Array:
    return jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
