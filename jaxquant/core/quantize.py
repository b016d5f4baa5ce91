"""quantize: statistic, scale, qvalue, for one operand of a contraction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import QTensor, apply_scaled, dequantize
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.rounding import asymmetric_cast, saturating_cast, stochastic_cast
from jaxquant.core.sharding import over_devices, split_axes

# A scale below this flushes the reciprocal to a value whose square is not normal; such tensors are all but zero.
SMALLEST_SCALE = math.sqrt(float(jnp.finfo(jnp.float32).tiny))


def scale_counts(shape: tuple[int, ...], spec: TensorSpec, axes: Sequence[int], shards: int = 1) -> tuple[int, ...]:
    """Count the scales along each axis of a tensor whose contraction axes are ``axes``.

    Args:
      shape: shape of the tensor.
      spec: its granularity and tile size.
      axes: contraction axes; along these a scale is shared, by all (per channel) or by a tile.
      shards: blocks of the first contraction axis that are quantized by themselves.

    Raises:
      ValueError: a tile or a number of shards that does not divide its axis.
    """
    if spec.granularity == "per_tensor" or spec.calibration.method == "fixed":
        counts = [1] * len(shape)
    else:
        counts = [1 if axis in axes else size for axis, size in enumerate(shape)]
    if spec.granularity == "per_tile" and spec.tile_size is not None:
        for axis in axes:
            if shape[axis] % spec.tile_size:
                raise ValueError(
                    f"tile_size {spec.tile_size} does not divide contraction axis {axis} of size {shape[axis]} "
                    f"(shape {shape}); choose a divisor of {shape[axis]} or -1 for no tiles"
                )
            counts[axis] = shape[axis] // spec.tile_size
    if shards > 1 and axes and spec.calibration.method != "fixed":
        if shape[axes[0]] % shards:
            raise ValueError(
                f"quantization_local_shard_count {shards} does not divide contraction axis {axes[0]} of size "
                f"{shape[axes[0]]} (shape {shape}); choose a divisor of {shape[axes[0]]}, or 0 for a float gradient"
            )
        counts[axes[0]] = math.lcm(counts[axes[0]], shards)
    return tuple(counts)


def absolute(x: jax.Array) -> jax.Array:
    """Return |x| whose maximum shows a NaN: NaN itself or, on CPUs, infinity.

    XLA:CPU's maximum can lose a NaN. Elsewhere the plain function is what compilers fuse: the test for NaN makes the
    H200's write two copies of every weight.
    """
    return jax.lax.platform_dependent(
        x, cpu=lambda x: jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)), default=lambda x: jnp.abs(x)
    )


def _reduce(x: jax.Array, counts: tuple[int, ...], reduction, collective=None) -> jax.Array:
    """Reduce x to the shape ``counts``, with a collective also over the devices that hold other parts of x."""
    tiled = {axis: n for axis, n in enumerate(counts) if n not in (1, x.shape[axis])}
    axes: list[int] = []
    position = 0
    for axis, n in enumerate(counts):
        position += axis in tiled
        if n == 1 or axis in tiled:
            axes.append(position)
        position += 1
    statistic = reduction(split_axes(x, tiled), axis=tuple(axes)).reshape(counts)
    return statistic if collective is None else over_devices(collective, statistic, x)


def compute_scale(x: jax.Array, spec: TensorSpec, counts: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None]:
    """Compute the scale, and the zero point of an asymmetric range, from this tensor's statistic.

    ``scale = statistic · factor / bound`` in float32, 1 where it falls below sqrt(tiny). Inside ``jax.shard_map`` a
    scale of the whole tensor is one for all devices; a finer one is that of the device's own part.

    Args:
      x: the tensor, any float dtype.
      spec: calibration and element type.
      counts: shape of the result, from ``scale_counts``.

    Source: bounds as in AQT's and Qwix's symmetric integers (qmax + 0.5) and floats (largest finite value).
    """
    calibration, kind = spec.calibration, element(spec.dtype)
    whole = spec.granularity == "per_tensor" and math.prod(counts) == 1
    lowest, highest, mean = (jax.lax.pmin, jax.lax.pmax, jax.lax.pmean) if whole else (None, None, None)
    if calibration.method == "fixed" and calibration.is_symmetric:
        return jnp.full(counts, _floor(calibration.maximum / kind.bound), jnp.float32), None
    if calibration.method == "fixed":
        low, high = (
            jnp.full(counts, calibration.minimum, jnp.float32),
            jnp.full(counts, calibration.maximum, jnp.float32),
        )
    elif calibration.method == "minmax":
        known = jnp.where(jnp.isnan(x), jnp.inf, x)
        low = jnp.minimum(_reduce(known, counts, jnp.min, lowest).astype(jnp.float32), 0) * calibration.factor
        high = jnp.maximum(_reduce(known, counts, jnp.max, highest).astype(jnp.float32), 0) * calibration.factor
    elif calibration.method == "rms":
        squares = _reduce(jnp.square(x.astype(jnp.float32)), counts, jnp.mean, mean)
        low, high = None, jnp.sqrt(squares) * calibration.factor
    else:
        high = _reduce(absolute(x), counts, jnp.max, highest).astype(jnp.float32)
        low, high = None, high if calibration.factor == 1.0 else high * calibration.factor
    if calibration.is_symmetric:
        # XLA turns a division by a constant into this multiplication under jit, but not outside it.
        return _floor_scale(high * (1 / kind.bound)), None
    assert low is not None
    # Asymmetric ranges use every code of the integer, -max - 1 included.
    scale = _floor_scale((high - low) * (1 / (2 * kind.max + 1)))
    return scale, asymmetric_cast(-kind.max - 1 - low / scale, kind)


def _floor(scale: float) -> float:
    return 1.0 if scale < SMALLEST_SCALE else scale


def _floor_scale(scale: jax.Array) -> jax.Array:
    return jnp.where(scale < SMALLEST_SCALE, 1.0, scale)


def quantize_with_scale(
    x: jax.Array,
    spec: TensorSpec,
    scale: jax.Array,
    zero_point: jax.Array | None = None,
    key: jax.Array | None = None,
    compute_dtype: str = "float32",
) -> QTensor:
    """Quantize with a given scale: ``qvalue = cast(x / scale + zero_point)``, saturating.

    Args:
      x: the tensor.
      spec: element type, rounding, and whether to multiply by the reciprocal.
      scale, zero_point: from ``compute_scale`` or from quant state.
      key: random key, for stochastic rounding.
      compute_dtype: dtype of the division (float32, or flax's: the operand's own).

    Raises:
      ValueError: stochastic rounding without a key.
    """
    kind = element(spec.dtype)
    divisor = scale.astype(compute_dtype)
    if spec.reciprocal:
        scaled = apply_scaled(jnp.multiply, x.astype(compute_dtype), 1 / divisor)
    else:
        scaled = apply_scaled(jnp.divide, x.astype(compute_dtype), divisor)
    if zero_point is not None:
        scaled = apply_scaled(jnp.add, scaled, zero_point.astype(compute_dtype))
        return QTensor(asymmetric_cast(scaled, kind), scale, zero_point)
    if spec.rounding == "stochastic":
        if key is None:
            raise ValueError(f"stochastic rounding to {spec.dtype} needs a random key")
        return QTensor(stochastic_cast(scaled, kind, key), scale)
    return QTensor(saturating_cast(scaled, kind), scale)


def quantize(
    x: jax.Array, spec: TensorSpec, axes: Sequence[int], *, key: jax.Array | None = None, shards: int = 1
) -> QTensor:
    """Quantize an operand by this tensor's own statistic.

    Args:
      x: the operand, any float dtype.
      spec: element type, granularity, calibration and rounding.
      axes: its contraction axes, along which a scale is shared.
      key: random key, for stochastic rounding.
      shards: blocks of the first contraction axis with a scale of their own.

    Raises:
      ValueError: tiles or shards that do not divide, or stochastic rounding without a key.
    """
    scale, zero_point = compute_scale(x, spec, scale_counts(x.shape, spec, axes, shards))
    return quantize_with_scale(x, spec, scale, zero_point, key)


def fake_quantize(x: jax.Array, spec: TensorSpec, axes: Sequence[int], *, key: jax.Array | None = None) -> jax.Array:
    """Quantize and dequantize, returning x's dtype."""
    return dequantize(quantize(x, spec, axes, key=key), x.dtype.name)


def outside_range(x: jax.Array, spec: TensorSpec, scale: jax.Array, zero_point: jax.Array | None) -> jax.Array:
    """Mark elements that a clipping calibration cut off; they get no gradient."""
    kind = element(spec.dtype)
    if zero_point is None:
        return apply_scaled(lambda a, s: jnp.abs(a) > s * kind.bound, x.astype(jnp.float32), scale)
    offset = zero_point.astype(jnp.float32)
    low, high = (-kind.max - 1 - offset) * scale, (kind.max - offset) * scale
    above = apply_scaled(lambda a, s: a > s, x.astype(jnp.float32), high)
    return above | apply_scaled(lambda a, s: a < s, x.astype(jnp.float32), low)
