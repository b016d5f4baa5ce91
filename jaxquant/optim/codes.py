"""Codecs of 8-bit optimizer moments: each group of neighbours is stored relative to its largest magnitude."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxquant.core.dtypes import ELEMENTS

SMALLEST = 2.0**-126
"""Smallest normal number of float32."""

_E4M3 = ELEMENTS["float8_e4m3fn"]
_BINARY_ORDERS = math.log2(_E4M3.max**2 / 2)  # binary orders of magnitude covered by the codes of fp8_coat
_DECADES = 7  # number of decades in the map of int8_dynamic


class Coded(NamedTuple):
    """A moment in 8 bits, in groups of ``g`` neighbours along one axis (the last axis in the shapes below).

    Attributes:
      codes: codes, one for each element.
      largest: largest magnitude of each group; None for a moment that stays float32.
      exponent: exponent of the range expansion of each group, in sixteenths, 1 to 255; None if the codec has no such
        exponent.
    """

    codes: Shaped[Array, "*T g"]
    largest: Any
    exponent: Shaped[Array, "*T"] | None = None


Groups = Float[Array, "*T g"]


@dataclasses.dataclass(frozen=True)
class Codec:
    """Codec of moments.

    Attributes:
      group: maximum number of neighbours that share a largest magnitude.
      dtype: dtype of the codes.
      encode: function (float32 groups, whether they are signed, axis of a group's elements) -> Coded, with float32
        exponents. Inputs are finite. If they are unsigned, a nonzero input has a nonzero code.
      decode: function (Coded, whether it is signed, axis of a group's elements) -> float32 groups.
    """

    group: int
    dtype: str
    encode: Callable[[Groups, bool, int], Coded]
    decode: Callable[[Coded, bool, int], Groups]


def _divide(x: Groups, largest: Float[Array, "*T"], axis: int) -> Groups:
    """Return x / largest. Large divisors are scaled, because a compiler may multiply by a subnormal reciprocal."""
    shrink = jnp.where(largest > 1, 0.125, 1.0)
    return x * _expand(shrink, axis) / _expand(jnp.maximum(largest, SMALLEST) * shrink, axis)


def _expand(x: Float[Array, "*T"], axis: int) -> Groups:
    """Add the axis of a group's elements to an array with one number per group."""
    return jnp.expand_dims(x, axis)


def _second_moment(magnitude: Groups, code: Groups) -> Groups:
    """Return second moments; if the code is not 0, they are at least ``SMALLEST``, so that they do not underflow."""
    return jnp.where(code == 0, 0, jnp.maximum(magnitude, SMALLEST))


def _encode_coat(x: Groups, signed: bool, axis: int) -> Coded:
    """Encode as ``code = 448 · (|x| / largest)^k`` in e4m3.

    k is the exponent, in sixteenths, that spreads the group's magnitudes over the range of e4m3: the floor of
    ``log2(448² / 2) / log2(largest / smallest)``, where smallest is the smallest nonzero magnitude. COAT writes
    (|x| / c)^k / s with c = √(largest · smallest) and s = (largest / c)^k / 448, and c cancels out. Here k is at
    most 255 / 16: groups whose magnitudes lie within a factor of 2.06 are not spread further. Ratios above 2^126 are
    clipped to 2^126.

    Source: COAT (arXiv 2410.19313), section 4.1, and its kernel ``fp8_adamw_expand``.
    """
    magnitude = jnp.abs(x)
    largest = magnitude.max(axis)
    top = jnp.maximum(largest, SMALLEST)
    low = jnp.clip(jnp.where(magnitude > 0, magnitude, jnp.inf).min(axis), SMALLEST, top)
    ratio = jnp.clip(jnp.log2(top) - jnp.log2(low), _BINARY_ORDERS / 16, 126)
    exponent = jnp.clip(jnp.floor(_BINARY_ORDERS * 16 / ratio), 1, 255)
    power = _expand(exponent, axis) / 16 * jnp.log2(jnp.maximum(_divide(magnitude, largest, axis), SMALLEST))
    code = jnp.clip(_E4M3.max * jnp.exp2(power), 2.0 ** (_E4M3.min_exponent - _E4M3.mantissa_bits), _E4M3.max)
    code = jnp.where(magnitude > 0, jnp.copysign(code, x) if signed else code, 0)
    return Coded(code.astype(_E4M3.name), largest, exponent)


def _decode_coat(coded: Coded, signed: bool, axis: int) -> Groups:
    assert coded.exponent is not None
    code, exponent = coded.codes.astype(jnp.float32), coded.exponent.astype(jnp.float32)
    magnitude = jnp.exp2(jnp.log2(jnp.abs(code) / _E4M3.max) / (_expand(exponent, axis) / 16)) * _expand(
        coded.largest, axis
    )
    return jnp.copysign(magnitude, code) if signed else _second_moment(magnitude, code)


def _encode_dynamic(x: Groups, signed: bool, axis: int) -> Coded:
    """Encode as the nearest value of a map of decades, relative to the largest magnitude.

    Decade d of 7 has n = 2^d values (2^(d+1) without signs), the centers of n equal cells of [0.1, 1] · 10^(d-6); 0 and
    1 complete the map. Code 0 is 0. Codes are ordered by magnitude and consist of an exponent and a fraction, like a
    float, so decoding needs no table. Negative values are stored in two's complement. Code 128 is +1, because the map
    does not contain -1. Without signs, the code of a nonzero value is at least 1.

    Source: Dettmers, 8-bit Optimizers (arXiv 2110.02861), ``create_dynamic_map`` of bitsandbytes.
    """
    first = 1 if signed else 2
    largest = jnp.abs(x).max(axis)
    y = _divide(jnp.abs(x), largest, axis)
    decade = jnp.zeros(y.shape, jnp.int32)
    for d in range(1, _DECADES):  # starts half way between its first value and the last value below it
        decade += (y > 10.0 ** (d - _DECADES) * (1 + 0.9 / (first * 2 ** (d - 1)))).astype(jnp.int32)
    n = first * _power_of_two(decade)
    code = n + jnp.clip(jnp.floor((y * _power_of_ten(_DECADES - 1 - decade) - 0.1) * (n / 0.9)), 0, n - 1)
    most = first * 2.0**_DECADES
    code = jnp.where(y > 1 - 0.225 * 2 / most, most, code) - (first - 1)
    if signed:
        code = jnp.where(y < 0.5 * 10.0 ** (1 - _DECADES) * 0.55, 0, code)
        code = jnp.where(x < 0, -jnp.minimum(code, most - 1), code)
    else:
        code = jnp.where(x > 0, code, 0)
    return Coded((code.astype(jnp.int32) & 255).astype(jnp.uint8), largest)


def _decode_dynamic(coded: Coded, signed: bool, axis: int) -> Groups:
    first = 1 if signed else 2
    most = first * 2.0**_DECADES
    code = coded.codes.astype(jnp.int32).astype(jnp.float32)
    negative = jnp.logical_and(signed, code > most)
    place = jnp.where(negative, 256 - code, code) + (first - 1)
    decade = (jax.lax.bitcast_convert_type(place / first, jnp.int32) >> 23) - 127  # floor of the binary logarithm
    cell = (place + 0.5) / (first * _power_of_two(decade)) - 1
    magnitude = jnp.where(place == most, 1, (0.1 + 0.9 * cell) / _power_of_ten(_DECADES - 1 - decade))
    magnitude = jnp.where(code == 0, 0, magnitude) * _expand(coded.largest, axis)
    return jnp.where(negative, -magnitude, magnitude) if signed else _second_moment(magnitude, code)


def _power_of_two(n: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type((n + 127) << 23, jnp.float32)


def _power_of_ten(n: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the exact value of 10^n for 0 <= n < 8, as a product over the bits of n, which needs few operations."""
    bits = [jnp.where(n & 2**i, 10.0 ** (2**i), 1.0) for i in range(3)]
    return bits[0] * bits[1] * bits[2]


def _encode_linear(x: Groups, signed: bool, axis: int) -> Coded:
    """Encode as ``code = round(127 · x / largest)``, ties to even."""
    largest = jnp.abs(x).max(axis)
    code = jnp.round(_divide(x, largest, axis) * ELEMENTS["int8"].max)
    return Coded(code.astype(jnp.int8), largest)


def _decode_linear(coded: Coded, signed: bool, axis: int) -> Groups:
    return coded.codes.astype(jnp.float32) / ELEMENTS["int8"].max * _expand(coded.largest, axis)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Codecs of an optimizer's moments.

    Attributes:
      first: codec of signed moments.
      second: codec of unsigned moments, such as the mean square of gradients.
    """

    first: Codec
    second: Codec

    def codec(self, signed: bool) -> Codec:
        """Return the codec of signed or unsigned moments."""
        return self.first if signed else self.second


_COAT = Codec(128, _E4M3.name, _encode_coat, _decode_coat)
_DYNAMIC = Codec(256, "uint8", _encode_dynamic, _decode_dynamic)
# Linear codes suffice for Muon's momentum (arXiv 2509.23106). Second moments would underflow, so they use _DYNAMIC.
_LINEAR = Codec(2048, "int8", _encode_linear, _decode_linear)

SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "fp8_coat": Scheme(_COAT, _COAT),
        "int8_dynamic": Scheme(_DYNAMIC, _DYNAMIC),
        "int8_linear": Scheme(_LINEAR, _DYNAMIC),
    }
)
"""Schemes by name."""
