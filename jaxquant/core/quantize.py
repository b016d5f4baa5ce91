"""quantize: statistic, scale, qvalue, for one operand of a contraction."""

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
    """What a statistic gives: scales in their dtype, a zero point or None, an outer scale or None."""

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

    ``scale = statistic · factor / bound`` in float32, 1 where it falls below ``floor``, then rounded as the spec says.
    Inside ``jax.shard_map`` a scale of the whole tensor is one for all devices; a finer one is that of the device's own
    part.

    Args:
      x: the tensor, any float dtype.
      spec: calibration, element type, and dtype and rounding of scales.
      block: shape of the blocks that share a scale, from ``block_shape``.
      floor: scales below it become 1.
      except_axes: mesh axes along which each device has a tensor of its own.
      outer: outer scale of a spec with ``outer_scale``, of the tensor's rank; None computes it.

    Source: bounds as in AQT's and Qwix's symmetric integers (qmax + 0.5) and floats (largest finite value); a spec that
    keeps its grid has qmax, under which no decoded amax shrinks.
    """
    calibration, kind = spec.calibration, element(spec.dtype)
    counts = scale_shape(x.shape, block)
    whole = spec.granularity == "per_tensor" and math.prod(counts) == 1

    def reduced(values: jax.Array, reduction: Callable[..., jax.Array], collective: Any) -> jax.Array:
        found = reduce_blocks(values, block, reduction, collective if whole else None, except_axes)
        return found.astype(jnp.float32)

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
        statistic = functools.partial(largest, below=spec.share_below)
        high = reduced(x, statistic, jax.lax.pmax)
        if calibration.average is not None:  # in units of a power of two near the amax: no square overflows
            transform, undo = calibration.average
            unit = power_of_two_below(high)  # it costs no bit
            scaled = apply_blocks(jnp.divide, x.astype(jnp.float32), unit, block)
            high = undo(reduced(transform(scaled), jnp.mean, jax.lax.pmean) * _fill(x.shape, block)) * unit
        high = high if calibration.factor == 1.0 else high * calibration.factor
    if calibration.is_symmetric:
        if spec.amax_bound is not None:
            high = jnp.minimum(high, spec.amax_bound)
        scale, outer = scale_of_amax(high, kind.bound, spec, floor, outer, x.dtype == jnp.float32)
        return Scales(scale, None, outer)
    assert low is not None
    # Asymmetric ranges use every code of the integer, -max - 1 included.
    scale = floor_scale((high - low) * (1 / (2 * kind.max + 1)), floor)
    return Scales(scale, asymmetric_cast(-kind.max - 1 - low / scale, kind))


def _fill(shape: Shape, block: Shape) -> jax.Array | float:
    """Return what turns the mean over a padded block into that over its elements."""
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
      x: the tensor.
      spec: element type, rounding, and whether to multiply by the reciprocal.
      scale, zero_point, outer_scale: from ``compute_scale`` or from quant state.
      key: random key, for stochastic rounding.
      compute_dtype: dtype of the division (float32, or flax's: the operand's own).
      block: shape of the blocks that share a scale; None where the shapes tell.

    Raises:
      ValueError: stochastic rounding without a key, or zero points in blocks of different sizes.
    """
    if block is not None and is_even(x.shape, block):
        block = None
    tensor = QTensor(x, scale, zero_point, outer_scale, block)  # for its scales; the elements follow
    divisor = tensor.full_scale() if spec.scale_rounding != "exact" or outer_scale is not None else scale
    if spec.scale_dtype in ELEMENTS:
        divisor = jnp.where(divisor > 0, divisor, 1.0)  # a block that rounds to the scale 0 is zeros
    divisor = divisor.astype(compute_dtype)
    if spec.reciprocal:
        scaled = apply_blocks(lambda x, s: x.astype(compute_dtype) * s, x, 1 / divisor, block)
    else:
        scaled = apply_blocks(lambda x, s: x.astype(compute_dtype) / s, x, divisor, block)
    if zero_point is not None:
        if block is not None:
            raise ValueError(
                f"calibration {spec.calibration} has zero points, and tile_size {spec.tile_size} cuts shape {x.shape} "
                "unevenly; use a symmetric calibration, or a tile_size that divides"
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
    whole: Callable[[jax.Array], jax.Array] | None = None,
    except_axes: Collection[str] = (),
    outer: Float[Array, "*ones"] | None = None,
) -> QTensor:
    """Quantize an operand by this tensor's own statistic.

    Args:
      x: the operand, any float dtype.
      spec: element type, granularity, calibration and rounding.
      axes: its contraction axes, along which a scale is shared.
      key: random key, for stochastic rounding.
      shards: blocks of the first contraction axis with a scale of their own.
      batch: its batch axes, which no block of several elements covers.
      floor: scales below it become 1.
      compute_dtype: dtype of the division.
      whole: of a spec with ``micro``, as ``quantize_micro`` takes it.
      except_axes: mesh axes along which each device has a tensor of its own.
      outer: outer scale, as ``compute_scale`` takes it.

    Raises:
      ValueError: tiles or shards that do not divide, or stochastic rounding without a key.
    """
    block = block_shape(x.shape, spec, axes, shards, batch)
    if spec.micro is not None:
        return quantize_micro(x, spec, block, key, whole, except_axes)
    scale, zero_point, outer_scale = compute_scale(x, spec, block, floor, except_axes, outer)
    if scale.size == 1 and spec.dtype.startswith("float8") and spec.calibration.method != "fixed":
        # XLA:GPU would take the cast into the matmul that made x, amax and all, and fail: the scale waits for the amax.
        x = jax.lax.optimization_barrier(x)
    return quantize_with_scale(x, spec, scale, zero_point, key, compute_dtype, outer_scale=outer_scale, block=block)


def outside_range(x: Float[Array, "*shape"], spec: TensorSpec, tensor: QTensor) -> Bool[Array, "*shape"]:
    """Mark elements that a clipping calibration cut off; they get no gradient.

    Args:
      x: the tensor before quantization.
      spec: its element type.
      tensor: the tensor after quantization.
    """
    kind, block, scale = element(spec.dtype), tensor.blocks, tensor.full_scale()
    if tensor.zero_point is None:
        return apply_blocks(lambda a, s: jnp.abs(a) > s * kind.bound, x.astype(jnp.float32), scale, block)
    offset = tensor.zero_point.astype(jnp.float32)
    low, high = (-kind.max - 1 - offset) * scale, (kind.max - offset) * scale
    above = apply_blocks(lambda a, s: a > s, x.astype(jnp.float32), high, block)
    return above | apply_blocks(lambda a, s: a < s, x.astype(jnp.float32), low, block)
