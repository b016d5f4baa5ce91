"""Rounding of real numbers to a quantized element type: saturating casts and stochastic rounding."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Key, UInt32

from jaxquant.core.dtypes import Element, element
from jaxquant.core.tensor_spec import TensorSpec


def saturating_cast(x: jax.Array, element: Element) -> jax.Array:
    """Round to nearest, ties to even, and clip to ``±element.max``; NaN stays NaN in float types.

    Clips before the cast, because XLA's cast maps values out of range to NaN in float8_e4m3fn and to inf in e5m2.
    """
    return prevent_excess_precision(saturating_cast_in_kernel(x, element))


def saturating_cast_in_kernel(x: jax.Array, element: Element) -> jax.Array:
    """Compute ``saturating_cast`` in a Pallas kernel, whose compiler keeps every cast."""
    clipped = _clip(x, element.max)
    if element.kind == "int":
        clipped = jax.lax.round(clipped, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return clipped.astype(element.name)


def prevent_excess_precision(x: jax.Array) -> jax.Array:
    """Return numbers of a narrow dtype unchanged, but make every compiler round them.

    XLA:GPU drops a cast to a narrower float if the value is cast back in the same program ("excess precision"). A
    bfloat16 matmul would then read float8 values that were never rounded. A reduction to the precision of float32
    between the two casts changes no number, costs nothing on GPUs, and keeps both casts. TPU compilers do not drop
    casts, and the reduction would prevent fusion.
    """
    return _hold.bind(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _hold_on_gpus(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)


HOLD = "hold_rounding"
"""Name of the primitive, which is the identity except on GPUs."""
_hold = Primitive(HOLD)
_hold.def_impl(lambda x: x)
_hold.def_abstract_eval(lambda x: x)
ad.deflinear2(_hold, lambda gradient, _: [gradient])
batching.defvectorized(_hold)
mlir.register_lowering(_hold, lambda context, x: [x])
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(_hold, mlir.lower_fun(_hold_on_gpus, multiple_results=False), platform=_platform)


def _clip(x: jax.Array, bound: float, below: int = 0) -> jax.Array:
    """Clip to ``[-bound - below, bound]``; ``jnp.clip`` would add a function to the program for each shape."""
    return jax.lax.clamp(np.asarray(-bound - below, x.dtype), x, np.asarray(bound, x.dtype))


def asymmetric_cast(x: jax.Array, element: Element) -> jax.Array:
    """Round to nearest, ties to even, and clip to the full integer range, including ``-max - 1``."""
    rounded = jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return _clip(rounded, element.max, 1).astype(element.name)


def hash_bits(x: UInt32[Array, "*shape"], add: UInt32[Array, ""] | int = 0) -> UInt32[Array, "*shape"]:
    """Mix 32 bits so that each output bit depends on all input bits: a bijection of two multiplications and shifts.

    Args:
      x: integers.
      add: integer that is added between the two multiplications; each value gives a different hash function.

    Source: Wellons' lowbias32, whose constants were searched for the least bias.
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x if isinstance(add, int) and add == 0 else x + jnp.asarray(add, jnp.uint32)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


_ROUNDS = 2


class Seed(NamedTuple):
    """Seed of noise: two scalars. ``fold`` derives other seeds at a far lower cost than ``jax.random.fold_in``.

    (XLA:CPU writes out each use of jax's own generator: a step of 84 layers took 17 s longer to compile.)
    """

    first: UInt32[Array, ""]
    second: UInt32[Array, ""]


RandomKey = Key[Array, ""] | Seed
"""A key of ``jax.random``, or a seed derived from one."""


@jax.jit
def seed_of(key: RandomKey) -> Seed:
    """Return the seed of a random key of any implementation, or a seed unchanged.

    Args:
      key: key or array of keys; an array returns a seed of arrays.
    """
    if isinstance(key, Seed):
        return key
    words = jax.random.key_data(key)
    return fold(Seed(*jnp.zeros((2, *words.shape[:-1]), jnp.uint32)), *jnp.moveaxis(words, -1, 0))


def fold(key: RandomKey, *numbers: Array | int) -> Seed:
    """Derive a seed from a key and numbers, with two rounds of ``hash_bits`` for each number in turn.

    The second half of a seed is mixed without the first half; ``_drawn`` combines the halves when noise is drawn. If
    each half were mixed with the other, as in a Feistel network, the program would double in every round for compilers
    that copy a value to each of its readers (XLA:CPU took 40 s for two weights).

    Args:
      key: key of the noise.
      numbers: integers modulo 2^32, applied one after the other.
    """
    places = (each if isinstance(each, jax.Array) else np.asarray(each).astype(np.uint32) for each in numbers)
    return _fold(seed_of(key), *places)


@jax.jit
def _fold(seed: Seed, *numbers: Array | np.ndarray) -> Seed:
    for number in numbers:
        place = _hash_number(number)
        seed = functools.reduce(lambda seed, n: _round(n, seed, place), range(_ROUNDS), seed)
    return seed


@jax.jit
def fold_many(key: RandomKey, numbers: UInt32[Array, " n"]) -> Seed:
    """Return the seeds that ``fold`` returns for each of several numbers, as arrays.

    A loop computes the seeds. Without the loop, XLA would repeat the computation in every matmul that reads a seed.

    Args:
      key: key of the noise.
      numbers: integers modulo 2^32.
    """
    place = _hash_number(numbers)
    seed = Seed(*(jnp.broadcast_to(each, place.shape) for each in seed_of(key)))
    return jax.lax.fori_loop(0, _ROUNDS, lambda n, seed: _round(n, seed, place), seed)


def _hash_number(number: Array | np.ndarray) -> UInt32[Array, "*shape"]:
    return hash_bits(jnp.asarray(number).astype(jnp.uint32) + jnp.uint32(0x9E3779B9))


def _round(n: Array | int, seed: Seed, place: UInt32[Array, "*shape"]) -> Seed:
    return Seed(hash_bits(seed.first ^ place, seed.second + jnp.uint32(n)), hash_bits(seed.second + place, n))


def jax_key(key: RandomKey) -> Key[Array, ""]:
    """Return a key of ``jax.random``, for libraries that need one."""
    return jax.random.wrap_key_data(jnp.stack(key, -1), impl="threefry2x32") if isinstance(key, Seed) else key


def noise(key: RandomKey, shape: Sequence[int], start: UInt32[Array, ""] | None = None) -> Float[Array, "*shape"]:
    """Draw a uniform number in [0, 1) for every element: a hash of its index and the key, with 24 bits.

    An element's number depends only on the key and its index, not on the sharding of the tensor. Different keys give
    independent numbers. The cost is similar to the cost of the cast that uses the noise; ``jax.random.uniform`` costs
    as much as four casts on TPUs. (Numbers repeat after 2^32 elements.)

    Args:
      key: random key.
      shape: shape of the result.
      start: index of the first element along every axis; None is 0.
    """
    return _noise(_drawn(key), tuple(shape), start)


# Jitted, so that a program contains it once for each shape.
@functools.partial(jax.jit, static_argnames="shape")
def _noise(seed: Seed, shape: tuple[int, ...], start: UInt32[Array, ""] | None) -> Float[Array, "*shape"]:
    places = []
    for axis in range(len(shape)):
        step = math.prod(shape[axis + 1 :]) % 2**32
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        if start is not None:
            place = place + start
        places.append(place if step == 1 else place * jnp.uint32(step))
    index = functools.reduce(jnp.add, places) if places else jnp.zeros(shape, jnp.uint32)
    return uniform(index, *seed)


@jax.jit
def _drawn(key: RandomKey) -> Seed:
    seed = seed_of(key)
    return Seed(seed.first, hash_bits(seed.first + 3 * seed.second))  # not symmetric, as gradient_keys swaps them


def gradient_keys(key: RandomKey) -> tuple[Seed, Seed]:
    """Return the keys of the two roundings of an output gradient in a backward pass."""
    first, second = seed_of(key)
    return Seed(second, first), Seed(first ^ jnp.uint32(0x9E3779B9), second)


def uniform(
    index: UInt32[Array, "*shape"], first: UInt32[Array, ""], second: UInt32[Array, ""]
) -> Float[Array, "*shape"]:
    """Return the number in [0, 1) of each index, a multiple of 2^-24.

    Args:
      index: indices of the elements, in the row-major order of the complete tensor.
      first, second: seed from ``_drawn``.
    """
    # Through int32, which holds 24 bits: TPUs cannot convert unsigned integers to floats.
    return (hash_bits(index ^ first, second) >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24


def stochastic_cast(x: jax.Array, element: Element, key: RandomKey) -> jax.Array:
    """Round up or down at random so that the expected value is x, and clip to ``±element.max``.

    Let ulp be the distance of two neighbours of ``element`` around x, and u uniform in [0, 1):
    ``q = floor(x / ulp + u) · ulp``, computed in float32. ``noise`` draws an independent u for each element.

    Args:
      x: real numbers, in units of the scale.
      element: element type to round to.
      key: random key.
    """
    u = noise(key, x.shape)
    x = x.astype(jnp.float32)
    if element.kind == "int":
        return _clip(jnp.floor(x + u), element.max).astype(element.name)
    # The exponent field of a float32. Below the smallest normal number of the element, its grid is uniform.
    exponent = ((jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF) - 127
    exponent = jnp.maximum(exponent, element.min_exponent) - element.mantissa_bits
    ulp = jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    rounded = jnp.floor(x / ulp + u) * ulp
    # floor() keeps NaN and infinities; the clip that follows saturates.
    return _clip(rounded, element.max).astype(element.name)


def cast(x: jax.Array, spec: TensorSpec, key: RandomKey | None = None) -> jax.Array:
    """Round to the element type of a spec, to nearest or stochastically, and clip.

    Args:
      x: real numbers, in units of the scale.
      spec: element type and rounding.
      key: random key, for stochastic rounding.

    Raises:
      ValueError: stochastic rounding without a key.
    """
    if spec.rounding == "nearest":
        return (asymmetric_cast if spec.has_grid_scale else saturating_cast)(x, element(spec.dtype))
    return stochastic_cast(x, element(spec.dtype), require_key(spec, key))


def require_key(spec: TensorSpec, key: RandomKey | None) -> RandomKey:
    """Return the random key, or raise if it is missing for a spec with stochastic rounding.

    Raises:
      ValueError: the key is None.
    """
    if key is None:
        raise ValueError(f"stochastic rounding to {spec.dtype} needs a jax.random key; pass the argument key")
    return key


def content_key(x: jax.Array) -> Seed:
    """Derive a random key from the values of a tensor, so that stochastic rounding needs no random stream.

    Hashes of the bit patterns are summed as integers, so the order of summation and sharding do not matter. (Sums of
    the patterns would have few different values if their low bits are equal, as for bfloat16.) Two steps with the same
    tensor get the same noise.
    """
    return key_of(jnp.sum(hash_bits(_words(x)), dtype=jnp.uint32))


def operands_key(lhs: jax.Array, rhs: jax.Array) -> Seed:
    """Derive a random key from the values of both operands of a matmul, for the noise of its backward pass."""
    first, second = (content_key(jax.lax.stop_gradient(x)) for x in (lhs, rhs))
    return fold(second, *first)


@jax.jit
def digest(arrays: Sequence[Float[Array, "*shape"]]) -> UInt32[Array, ""]:
    """Return a 32-bit hash of the values and the order of arrays, from which noise is drawn."""
    return _mix([_ordered_sum(x) for x in arrays])


def _words(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


# Both functions are jitted, so that a program contains each of them once.
@jax.jit
def _mix(sums: Sequence[UInt32[Array, ""]]) -> UInt32[Array, ""]:
    total = hash_bits(sums[0], 1)
    for n, each in enumerate(sums[1:], 2):
        total = hash_bits(total + each, n)
    return total


@jax.jit
def _ordered_sum(x: Float[Array, "*shape"]) -> UInt32[Array, ""]:
    strides = [math.prod(x.shape[axis + 1 :]) * 0x9E3779B9 % 2**32 for axis in range(x.ndim)]
    axes = [(n, each) for n, each in enumerate(strides) if x.shape[n] != 1]
    places = (jax.lax.broadcasted_iota(jnp.uint32, x.shape, n) * jnp.uint32(each) for n, each in axes)
    return jnp.sum(hash_bits(functools.reduce(jnp.add, places, _words(x))), dtype=jnp.uint32)


def key_of(bits: UInt32[Array, ""]) -> Seed:
    """Return the random key of a 32-bit ``digest``."""
    return fold(Seed(jnp.uint32(0), jnp.uint32(0)), bits)
