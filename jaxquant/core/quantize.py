"""quantize: compute the statistic, the scales and the qvalues of one operand of a contraction."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jaxquant.core.blocks import Shape, apply_blocks, block_shape, is_even, reduce_blocks, scale_shape
from jaxquant.core.dtypes import ELEMENTS, element
from jaxquant.core.micro import quantize_micro
from jaxquant.core.qtensor import QTensor
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.rounding import RandomKey, asymmetric_cast, cast
from jaxquant.core.scales import SMALLEST_SCALE, floor_scale, largest, power_of_two_below, scale_of_amax


class Scales(NamedTuple):
    """Scales in their dtype, zero points or None, and outer scale or None."""

    scale: Float[Array, "*counts"]
    zero_point: Shaped[Array, "*counts"] | None = None
    outer_scale: Float[Array, "*ones"] | None = None


def compute_scale(
    x: Float[Array, "*shape"],
    spec: TensorSpec,
    block: Shape,
    floor: float = SMALLEST_SCALE,
    except_axes: Collection[str] = (),
    outer: Float[Array, "*ones"] | None = None,
) -> Scales:
    """Compute the scales, and the zero points of an asymmetric range, from this tensor's statistic.

    ``scale = statistic · factor / bound`` in float32, or 1 if that is below ``floor``; then rounded as the spec
    specifies. Inside ``jax.shard_map`` all devices share a per-tensor scale; finer scales are local to a device.

    Args:
      x: tensor of any float dtype.
      spec: calibration, element type, and dtype and rounding of scales.
      block: shape of the blocks that share a scale, from ``block_shape``.
      floor: smallest scale; scales below it become 1.
      except_axes: mesh axes along which each device has a separate tensor.
      outer: outer scale for a spec with ``outer_scale``, of the tensor's rank; None computes it.

    Source: bounds as in AQT's and Qwix's symmetric integers (qmax + 0.5) and floats (largest finite value). A spec that
    keeps its grid uses qmax, so that no decoded amax shrinks.
    """
    calibration, kind = spec.calibration, element(spec.dtype)
    counts = scale_shape(x.shape, block)
    is_per_tensor = spec.granularity == "per_tensor" and math.prod(counts) == 1

    def reduced(values: jax.Array, reduction: Callable[..., jax.Array], collective: Any) -> jax.Array:
        statistics = reduce_blocks(values, block, reduction, collective if is_per_tensor else None, except_axes)
        return statistics.astype(jnp.float32)

    low = None
    if calibration.method == "fixed" and calibration.is_symmetric and spec.scale_rounding == "exact":
        scale = calibration.maximum / kind.bound
        return Scales(jnp.full(counts, 1.0 if scale < floor else scale, jnp.float32))
    if calibration.method == "fixed":
        low, high = (jnp.full(counts, end, jnp.float32) for end in (calibration.minimum, calibration.maximum))
    elif calibration.method == "minmax":
        known = jnp.where(jnp.isnan(x), jnp.inf, x)
        low = jnp.minimum(reduced(known, jnp.min, jax.lax.pmin), 0) * calibration.factor
        high = jnp.maximum(reduced(known, jnp.max, jax.lax.pmax), 0) * calibration.factor
    else:
        statistic = functools.partial(largest, negative_factor=spec.negative_factor)
        high = reduced(x, statistic, jax.lax.pmax)
        if calibration.average is not None:  # in units of a power of two near the amax, so that squares do not overflow
            transform, undo = calibration.average
            unit = power_of_two_below(high)  # exact
            scaled = apply_blocks(jnp.divide, x.astype(jnp.float32), unit, block)
            high = undo(reduced(transform(scaled), jnp.mean, jax.lax.pmean) * _padding_factor(x.shape, block)) * unit
        high = high if calibration.factor == 1.0 else high * calibration.factor
    if calibration.is_symmetric:
        if spec.amax_bound is not None:
            high = jnp.minimum(high, spec.amax_bound)
        scale, outer = scale_of_amax(high, kind.bound, spec, floor, outer, x.dtype == jnp.float32)
        return Scales(scale, None, outer)
    assert low is not None
    # Asymmetric ranges use every code of the integer, including -max - 1.
    scale = floor_scale((high - low) * (1 / (2 * kind.max + 1)), floor)
    return Scales(scale, asymmetric_cast(-kind.max - 1 - low / scale, kind))


def _padding_factor(shape: Shape, block: Shape) -> jax.Array | float:
    """Return the factor that turns the mean over a padded block into the mean over its elements."""
    if is_even(shape, block):
        return 1.0
    factors = jnp.ones((1,) * len(shape), jnp.float32)
    for axis, (size, step) in enumerate(zip(shape, block, strict=True)):
        n = scale_shape((size,), (step,))[0]
        own = jnp.ones(n, jnp.float32).at[-1].set(1.0 if n == 1 else step / (size - (n - 1) * step))
        factors = factors * own.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return factors


def quantize_with_scale(
    x: Float[Array, "*shape"],
    spec: TensorSpec,
    scale: Float[Array, "*counts"],
    zero_point: Shaped[Array, "*counts"] | None = None,
    key: RandomKey | None = None,
    compute_dtype: str = "float32",
    *,
    outer_scale: Float[Array, "*ones"] | None = None,
    block: Shape | None = None,
) -> QTensor:
    """Quantize with a given scale: ``qvalue = cast(x / scale + zero_point)``, saturating.

    Args:
      x: tensor.
      spec: element type, rounding, and whether to multiply by the reciprocal.
      scale, zero_point, outer_scale: scales from ``compute_scale`` or from quant state.
      key: random key, for stochastic rounding.
      compute_dtype: dtype of the division: float32, or the operand's dtype as in flax.
      block: shape of the blocks that share a scale, or None if it can be inferred from the shapes.

    Raises:
      ValueError: stochastic rounding has no key, or there are zero points and blocks of different sizes.
    """
    if block is not None and is_even(x.shape, block):
        block = None
    tensor = QTensor(x, scale, zero_point, outer_scale, block)  # only used for its scales
    divisor = tensor.full_scale() if spec.scale_rounding != "exact" or outer_scale is not None else scale
    if spec.scale_dtype in ELEMENTS:
        divisor = jnp.where(divisor > 0, divisor, 1.0)  # all elements of a block with scale 0 round to zero
    divisor = divisor.astype(compute_dtype)
    if spec.reciprocal:
        scaled = apply_blocks(lambda x, s: x.astype(compute_dtype) * s, x, 1 / divisor, block)
    else:
        scaled = apply_blocks(lambda x, s: x.astype(compute_dtype) / s, x, divisor, block)
    if zero_point is not None:
        if block is not None:
            raise ValueError(
                f"calibration {spec.calibration} has zero points, but tile_size {spec.tile_size} splits shape "
                f"{x.shape} unevenly; use calibration absmax, or a tile_size that divides the axis"
            )
        scaled = apply_blocks(jnp.add, scaled, zero_point.astype(compute_dtype))
        return QTensor(asymmetric_cast(scaled, element(spec.dtype)), scale, zero_point)
    return QTensor(cast(scaled, spec, key), scale, None, outer_scale, block)


def quantize(
    x: Float[Array, "*shape"],
    spec: TensorSpec,
    axes: Sequence[int],
    *,
    key: RandomKey | None = None,
    shards: int = 1,
    batch: Sequence[int] = (),
    floor: float = SMALLEST_SCALE,
    compute_dtype: str = "float32",
    outer_amax: Callable[[jax.Array], jax.Array] | None = None,
    except_axes: Collection[str] = (),
    outer: Float[Array, "*ones"] | None = None,
) -> QTensor:
    """Quantize an operand with this tensor's own statistic.

    Args:
      x: operand of any float dtype.
      spec: element type, granularity, calibration and rounding.
      axes: contraction axes, along which a scale is shared.
      key: random key, for stochastic rounding.
      shards: number of blocks of the first contraction axis with separate scales.
      batch: batch axes; no block covers several elements along them.
      floor: smallest scale; scales below it become 1.
      compute_dtype: dtype of the division.
      outer_amax: argument of ``quantize_micro``, for a spec with ``micro``.
      except_axes: mesh axes along which each device has a separate tensor.
      outer: outer scale, as for ``compute_scale``.

    Raises:
      ValueError: tiles or shards do not divide an axis, or stochastic rounding has no key.
    """
    block = block_shape(x.shape, spec, axes, shards, batch)
    if spec.micro is not None:
        return quantize_micro(x, spec, block, key, outer_amax, except_axes)
    scale, zero_point, outer_scale = compute_scale(x, spec, block, floor, except_axes, outer)
    if scale.size == 1 and spec.dtype.startswith("float8") and spec.calibration.method != "fixed":
        # XLA:GPU would fuse the cast and the amax into the matmul that produces x, and fail; the scale needs the amax.
        x = jax.lax.optimization_barrier(x)
    return quantize_with_scale(x, spec, scale, zero_point, key, compute_dtype, outer_scale=outer_scale, block=block)


def outside_range(x: Float[Array, "*shape"], spec: TensorSpec, tensor: QTensor) -> Bool[Array, "*shape"]:
    """Return a mask of the elements that a clipping calibration clipped; their gradient is zero.

    Args:
      x: tensor before quantization.
      spec: spec of the tensor.
      tensor: tensor after quantization.
    """
    kind, block, scale = element(spec.dtype), tensor.blocks, tensor.full_scale()
    if tensor.zero_point is None:
        return apply_blocks(lambda a, s: jnp.abs(a) > s * kind.bound, x.astype(jnp.float32), scale, block)
    offset = tensor.zero_point.astype(jnp.float32)
    low, high = (-kind.max - 1 - offset) * scale, (kind.max - offset) * scale
    above = apply_blocks(lambda a, s: a > s, x.astype(jnp.float32), high, block)
    return above | apply_blocks(lambda a, s: a < s, x.astype(jnp.float32), low, block)
