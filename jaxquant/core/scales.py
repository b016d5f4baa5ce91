"""Scales: from the amax of a block to the stored scale (float32, powers of two or float8), and back."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxquant.core.dtypes import ELEMENTS, element
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.rounding import prevent_excess_precision

Array = jax.Array

# The reciprocal of a smaller scale has a square that is not a normal float32; such tensors are almost zero.
SMALLEST_SCALE = math.sqrt(float(jnp.finfo(jnp.float32).tiny))
# Output gradients have a lower floor: in late layers 1e-20 is a gradient, not noise.
SMALLEST_GRADIENT_SCALE = float(jnp.finfo(jnp.float32).tiny)
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1


def absolute(x: Array) -> Array:
    """Return |x| so that its maximum shows a NaN: as NaN or, on CPUs, as infinity.

    XLA:CPU's maximum can lose a NaN. On other platforms, there is no test for NaN, because it prevents fusion: with the
    test, the H200's compiler writes two copies of every weight.
    """
    return _absolute.bind(x)


def largest(x: Array, negative_factor: float = 1.0, **axes: Any) -> Array:
    """Return the largest magnitude along axes, as ``jnp.max`` does, with NaN as in ``absolute``.

    Args:
      x: values.
      negative_factor: factor for the magnitudes of negative values; a value other than 1 returns float32.
      axes: arguments of ``jnp.max``.
    """
    if negative_factor != 1.0:
        wide = x.astype(jnp.float32)
        x = jax.lax.max(wide, wide * np.float32(-negative_factor))
    return jnp.max(absolute(x), **axes)


def _absolute_on_cpu(x: Array) -> Array:
    return jax.lax.select(x == x, jax.lax.abs(x), jax.lax.full_like(x, jnp.inf))


def compile_impl(primitive: Primitive, *static: str) -> None:
    """Compile a primitive when it is called outside of ``jax.jit``, also under ``jax.disable_jit``."""
    run = jax.jit(primitive.bind, static_argnames=static)

    @primitive.def_impl
    def compiled(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # otherwise the jitted function would call this one
            return run(*args, **params)


# A primitive, because ``lax.platform_dependent`` adds thirty lines to a program for each shape.
_absolute = Primitive("absolute")
compile_impl(_absolute)
_absolute.def_abstract_eval(lambda x: x)
ad.defjvp(_absolute, lambda slope, x: slope * jax.lax.sign(x))
batching.defvectorized(_absolute)
mlir.register_lowering(_absolute, mlir.lower_fun(jax.lax.abs, multiple_results=False))
mlir.register_lowering(_absolute, mlir.lower_fun(_absolute_on_cpu, multiple_results=False), platform="cpu")


def floor_scale(scale: Array, floor: float = SMALLEST_SCALE) -> Array:
    """Replace a scale below ``floor`` by 1."""
    is_small = scale < floor
    return jax.lax.select(is_small, is_small.astype(scale.dtype), scale)  # no constant: a scan would hoist it


def scale_of_amax(
    amax: Array, bound: float, spec: TensorSpec, floor: float, outer: Array | None = None, is_wide: bool = True
) -> tuple[Array, Array | None]:
    """Compute the scales that map amaxes to ``bound``.

    - float32, exact: ``amax / bound``.
    - Up: the smallest power of two that is not below ``amax / bound``.
    - Float8, such as e4m3: ``round(amax / bound / outer)``. ``outer`` is 1 without an outer scale; otherwise it is
      ``max(amax) / bound / 448``, one for the tensor.
    - Integers that keep their grid: ``amax / max``, rounded to so few significant bits that decoded values have the
      same scale again.

    Args:
      amax: amax of each block, float32.
      bound: largest magnitude of the element; not read for integers that keep their grid.
      spec: dtype and rounding of scales.
      floor: smallest scale; scales below it become 1.
      outer: outer scale, of the amaxes' rank; None computes it.
      is_wide: whether the tensor is float32, in which decoded values are exact.

    Returns:
      The scales in ``spec.scale_dtype``, and the outer scale (float32, size 1 along every axis) or None.

    Source: OCP Microscaling Formats (MX) v1.0, section 6.3, with the exponent rounded up as TransformerEngine and
    torchao do; NVFP4 as in TransformerEngine.
    """
    if spec.has_grid_scale:
        return _grid_scale(amax, spec, floor, is_wide), None
    scale = _exact_scale(amax, bound, floor)
    if spec.scale_rounding == "exact":
        return scale, None
    if (kind := ELEMENTS.get(spec.scale_dtype)) is not None:
        if not spec.outer_scale:
            outer = jnp.ones((1,) * amax.ndim, jnp.float32)
        elif outer is None:
            outer = floor_scale(jnp.max(amax, keepdims=True) * (1 / (bound * kind.max)), floor)
        rounded = jnp.clip(jnp.where(amax > 0, scale, 0) / outer, -kind.max, kind.max)
        return prevent_excess_precision(rounded.astype(spec.scale_dtype)), outer if spec.outer_scale else None
    exponent = _exponent_up(amax, bound) if spec.scale_rounding == "up" else _exponent_nearest(scale)
    exponent = jnp.where(amax * (1 / bound) < floor, 127, exponent)
    if spec.scale_dtype == "float32":
        return jax.lax.bitcast_convert_type(exponent << _MANTISSA_BITS, jnp.float32), None
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.dtype(spec.scale_dtype)), None


@functools.partial(jax.jit, static_argnums=(1, 2))  # so that a program contains it once for each shape of scales
def _exact_scale(amax: Array, bound: float, floor: float) -> Array:
    # Under jit, XLA turns a division by a constant into this multiplication, but not outside of jit.
    return floor_scale(amax * (1 / bound), floor)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))  # so that a program contains it once for each shape
def _grid_scale(statistic: Array, spec: TensorSpec, floor: float, is_wide: bool) -> Array:
    # The product of a code and a scale with so few bits is exact in float32, so the decoded statistic is max · scale.
    kind = element(spec.dtype)
    scale = statistic * (1 / kind.max)
    coarse = _round_bits(scale, kind.scale_bits)
    read = _round_bits(coarse * kind.max, kind.scale_bits)  # the decoded amax in a bfloat16 model
    coarse = _round_bits(read * (1 / kind.max), kind.scale_bits)
    if is_wide:
        fine = _round_bits(scale, 11)  # significant bits of float16
        coarse = jax.lax.select(fine * kind.max == statistic, fine, coarse)
    return floor_scale(coarse, floor)


def _round_bits(x: Array, count: int) -> Array:
    """Round a float32 to ``count`` significant bits, ties to even."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=count - 1)


@jax.jit  # so that a program contains it once for each shape
def power_of_two_below(x: Array) -> Array:
    """Return the largest power of two not above a positive float32, or 1 if x is not finite or not normal."""
    power = jax.lax.bitcast_convert_type(bits_of(x) & (0xFF << _MANTISSA_BITS), jnp.float32)
    return jnp.where((power > 0) & jnp.isfinite(power), power, 1.0)


def bits_of(x: Array) -> Array:
    """Return the bits of x in float32, as int32."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _exponent_up(amax: Array, bound: float) -> Array:
    """Return the biased exponent of the smallest power of two not below ``amax / bound``, without rounding."""
    bits, of_bound = bits_of(amax), int(np.float32(bound).view(np.int32))
    above = ((bits & _MANTISSA) > (of_bound & _MANTISSA)).astype(jnp.int32)
    exponent = (bits >> _MANTISSA_BITS) - (of_bound >> _MANTISSA_BITS) + 127 + above
    # 255 means NaN, as in e8m0; 0 would be a subnormal number.
    return jnp.where(jnp.isfinite(amax), jnp.clip(exponent, 1, 254), 255).astype(jnp.int32)


def _exponent_nearest(scale: Array) -> Array:
    """Return the biased exponent of the nearest power of two; ties round up."""
    bits = bits_of(scale)
    exponent = (bits >> _MANTISSA_BITS) + ((bits & _MANTISSA) >= 1 << (_MANTISSA_BITS - 1)).astype(jnp.int32)
    return jnp.where(jnp.isfinite(scale), jnp.clip(exponent, 1, 254), 255).astype(jnp.int32)


def decode_scale(scale: Array) -> Array:
    """Convert scales of any scale dtype to float32; in e8m0, 255 is NaN, and 0, which is 2⁻¹²⁷, becomes 0."""
    if scale.dtype != jnp.float8_e8m0fnu:
        return scale.astype(jnp.float32)
    exponent = jax.lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    power = jax.lax.bitcast_convert_type(exponent << _MANTISSA_BITS, jnp.float32)
    return jnp.where(exponent == 255, jnp.nan, power)
