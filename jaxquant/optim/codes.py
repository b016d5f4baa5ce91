"""The codes of optimizer moments in 8 bits: each group of neighbours is stored relative to its largest magnitude."""

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
"""The smallest normal number of float32."""

_E4M3 = ELEMENTS["float8_e4m3fn"]
_SPREAD = math.log2(_E4M3.max**2 / 2)  # binary orders of magnitude that the codes of fp8_coat span
_DECADES = 7  # of the map of int8_dynamic


class Coded(NamedTuple):
    """A moment in 8 bits, in groups of ``g`` neighbours along one axis, here the one written last.

    Attributes:
      codes: one for each element.
      largest: largest magnitude of each group; None of a moment that stays float32.
      exponent: of the range expansion of each group, in sixteenths, 1 to 255; None where a codec has none.
    """

    codes: Shaped[Array, "*T g"]
    largest: Any
    exponent: Shaped[Array, "*T"] | None = None


Groups = Float[Array, "*T g"]


@dataclasses.dataclass(frozen=True)
class Codec:
    """A code.

    Attributes:
      group: the most neighbours that share a largest magnitude.
      dtype: of the codes.
      encode: (float32 groups, whether they have signs, axis of a group's elements) -> Coded, exponents in float32.
        Numbers are finite; those that are not 0 are stored as codes that are not 0 where there are no signs.
      decode: (Coded, whether it has signs, axis of a group's elements) -> float32 groups.
    """

    group: int
    dtype: str
    encode: Callable[[Groups, bool, int], Coded]
    decode: Callable[[Coded, bool, int], Groups]


def _relative(x: Groups, largest: Float[Array, "*T"], axis: int) -> Groups:
    """Return x / largest; compilers multiply by a reciprocal, which must not be subnormal."""
    shrink = jnp.where(largest > 1, 0.125, 1.0)
    return x * _over(shrink, axis) / _over(jnp.maximum(largest, SMALLEST) * shrink, axis)


def _over(x: Float[Array, "*T"], axis: int) -> Groups:
    """Return a number of each group beside its elements."""
    return jnp.expand_dims(x, axis)


def _second(magnitude: Groups, code: Groups) -> Groups:
    """Return second moments: the product of a code that is not 0 and a small magnitude does not underflow to 0."""
    return jnp.where(code == 0, 0, jnp.maximum(magnitude, SMALLEST))


def _encode_coat(x: Groups, signed: bool, axis: int) -> Coded:
    """Encode as ``code = 448 · (|x| / largest)^k`` in e4m3.

    k is the exponent, in sixteenths, that spreads the group's magnitudes over the range of e4m3: the floor of
    ``log2(448² / 2) / log2(largest / smallest)``, smallest of those that are not 0. COAT writes (|x| / c)^k / s with
    c = √(largest · smallest) and s = (largest / c)^k / 448, from which c cancels. k is at most 255 / 16 here: groups
    whose numbers lie within a factor of 2.06 are not spread further. Ratios of more than 2^126 count as that.

    Source: COAT (arXiv 2410.19313), section 4.1, and its kernel ``fp8_adamw_expand``.
    """
    magnitude = jnp.abs(x)
    largest = magnitude.max(axis)
    top = jnp.maximum(largest, SMALLEST)
    low = jnp.clip(jnp.where(magnitude > 0, magnitude, jnp.inf).min(axis), SMALLEST, top)
    ratio = jnp.clip(jnp.log2(top) - jnp.log2(low), _SPREAD / 16, 126)
    exponent = jnp.clip(jnp.floor(_SPREAD * 16 / ratio), 1, 255)
    power = _over(exponent, axis) / 16 * jnp.log2(jnp.maximum(_relative(magnitude, largest, axis), SMALLEST))
    code = jnp.clip(_E4M3.max * jnp.exp2(power), 2.0 ** (_E4M3.min_exponent - _E4M3.mantissa_bits), _E4M3.max)
    code = jnp.where(magnitude > 0, jnp.copysign(code, x) if signed else code, 0)
    return Coded(code.astype(_E4M3.name), largest, exponent)


def _decode_coat(coded: Coded, signed: bool, axis: int) -> Groups:
    assert coded.exponent is not None
    code, exponent = coded.codes.astype(jnp.float32), coded.exponent.astype(jnp.float32)
    magnitude = jnp.exp2(jnp.log2(jnp.abs(code) / _E4M3.max) / (_over(exponent, axis) / 16)) * _over(
        coded.largest, axis
    )
    return jnp.copysign(magnitude, code) if signed else _second(magnitude, code)


def _encode_dynamic(x: Groups, signed: bool, axis: int) -> Coded:
    """Encode as the nearest number of a map of decades, relative to the largest magnitude.

    Decade d of 7 has n = 2^d numbers (2^(d+1) without signs), the middles of n equal cells of [0.1, 1] · 10^(d-6);
    0 and 1 complete the map. In order of magnitude, code 0 is 0, and the numbers follow each other as those of a
    float do, an exponent and a fraction; so no table is read. Negative numbers are stored in two's complement; 128
    is +1, as there is no -1. Without signs a number that is not 0 is at least code 1.

    Source: Dettmers, 8-bit Optimizers (arXiv 2110.02861), ``create_dynamic_map`` of bitsandbytes.
    """
    first = 1 if signed else 2
    largest = jnp.abs(x).max(axis)
    y = _relative(jnp.abs(x), largest, axis)
    decade = jnp.zeros(y.shape, jnp.int32)
    for d in range(1, _DECADES):  # begins in the middle between its first number and the last of the one below
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
    decade = (jax.lax.bitcast_convert_type(place / first, jnp.int32) >> 23) - 127  # its logarithm, rounded down
    cell = (place + 0.5) / (first * _power_of_two(decade)) - 1
    magnitude = jnp.where(place == most, 1, (0.1 + 0.9 * cell) / _power_of_ten(_DECADES - 1 - decade))
    magnitude = jnp.where(code == 0, 0, magnitude) * _over(coded.largest, axis)
    return jnp.where(negative, -magnitude, magnitude) if signed else _second(magnitude, code)


def _power_of_two(n: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type((n + 127) << 23, jnp.float32)


def _power_of_ten(n: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return 10^n for 0 <= n < 8, exactly: a product for the bits of n, which takes fewer operations than a choice."""
    bits = [jnp.where(n & 2**i, 10.0 ** (2**i), 1.0) for i in range(3)]
    return bits[0] * bits[1] * bits[2]


def _encode_linear(x: Groups, signed: bool, axis: int) -> Coded:
    """Encode as ``code = round(127 · x / largest)``, ties to even."""
    largest = jnp.abs(x).max(axis)
    code = jnp.round(_relative(x, largest, axis) * ELEMENTS["int8"].max)
    return Coded(code.astype(jnp.int8), largest)


def _decode_linear(coded: Coded, signed: bool, axis: int) -> Groups:
    return coded.codes.astype(jnp.float32) / ELEMENTS["int8"].max * _over(coded.largest, axis)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How an optimizer's moments are stored.

    Attributes:
      first: codec of moments with signs.
      second: codec of moments without, as the mean square of gradients.
    """

    first: Codec
    second: Codec

    def codec(self, signed: bool) -> Codec:
        """Return the codec of moments with signs, or of those without."""
        return self.first if signed else self.second


_COAT = Codec(128, _E4M3.name, _encode_coat, _decode_coat)
_DYNAMIC = Codec(256, "uint8", _encode_dynamic, _decode_dynamic)
# The momentum of Muon needs no more (arXiv 2509.23106); second moments in equal steps would fall to 0, so are not.
_LINEAR = Codec(2048, "int8", _encode_linear, _decode_linear)

SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "fp8_coat": Scheme(_COAT, _COAT),
        "int8_dynamic": Scheme(_DYNAMIC, _DYNAMIC),
        "int8_linear": Scheme(_LINEAR, _DYNAMIC),
    }
)
"""Scheme by name."""
