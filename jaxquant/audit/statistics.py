"""Statistics of one tensor's quantization, as a vector of numbers that can be summed over the uses of a layer.

A record leaves the backward pass as a cotangent (``audit.health``). If a layer is used more than once, automatic
differentiation sums the records. Sums of counts and squares are the counts and squares of all uses. Sums of amaxes and
scales are meaningless. Each amax and each scale is therefore stored with a one-hot vector over bins, as in
``core.delayed``; the highest nonempty bin of the sum contains the maximum. The maximum is exact for one use of a layer,
and rounded up by at most 12.5 % for several uses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxquant.core.blocks import apply_blocks
from jaxquant.core.delayed import BINS, bin_of, bin_value
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.scales import absolute

Array = jax.Array
STATISTICS = ("amax", "scale", "saturated", "flushed", "sqnr", "nonfinite")
"""Statistics that ``read`` returns, in order."""

_SUMS = ("uses", "quantized", "elements", "nonzero", "saturated", "flushed", "nonfinite", "signal", "noise")
_PEAK = 1 + BINS
WIDTH = 2 * _PEAK + len(_SUMS)
"""Length of a record."""

# scale = amax · (1 / bound) has three rounding errors of up to 2⁻²⁴ each. With this tolerance, the largest element does
# not count as saturated because of these errors.
_ROUNDING = 1 + 2.0**-22


def record(
    x: Float[Array, "*shape"],
    spec: TensorSpec | None,
    tensor: QTensor | None,
    original: Float[Array, "*shape"] | None = None,
) -> Float[Array, " WIDTH"]:
    """Return the record of a quantized tensor.

    Args:
      x: tensor before quantization, any float dtype.
      spec: spec of the tensor, or None for a float tensor, for which only amax and non-finite elements are counted.
      tensor: quantized tensor, or None for a float tensor.
      original: tensor whose amax to record, if it is not ``x``.

    Returns:
      A float32 vector for ``read``.
    """
    amax = jnp.max(absolute(x if original is None else original)).astype(jnp.float32)
    values = x.astype(jnp.float32)
    sums = {"uses": 1, "elements": x.size, "nonfinite": jnp.sum(~jnp.isfinite(values), dtype=jnp.int32)}
    scale = jnp.zeros(())
    if spec is not None:
        assert tensor is not None
        back, nonzero = dequantize(tensor), values != 0
        saturated = jnp.zeros((), bool)
        if tensor.codec is None:  # scales of a tensor format are not available
            # A channel of zeros has scale 1, which does not describe the other channels.
            scales = apply_blocks(lambda a, s: jnp.where(a != 0, s, 0), values, tensor.full_scale(), tensor.blocks)
            filled = jnp.max(scales)
            scale = jnp.where(filled > 0, filled, 1.0)
            saturated = _is_saturated(values, spec, tensor)
        sums |= {
            "quantized": 1,
            "nonzero": jnp.sum(nonzero, dtype=jnp.int32),
            "saturated": jnp.sum(saturated, dtype=jnp.int32),
            "flushed": jnp.sum(nonzero & (back == 0), dtype=jnp.int32),
            "signal": jnp.sum(jnp.square(values)),
            "noise": jnp.sum(jnp.square(values - back)),
        }
    counts = jnp.stack([jnp.asarray(sums.get(name, 0), jnp.float32) for name in _SUMS])
    return jnp.concatenate([_encode_peak(amax), _encode_peak(scale), counts])


def read(records: Float[Array, "*rows WIDTH"]) -> dict[str, Float[Array, "*rows"]]:
    """Convert records, or sums of them, to the statistics of their tensors.

    x are the elements of a tensor, and x̂ their dequantized values; several uses of a layer count together.

    - ``amax`` = max |x|, infinite if an element is not finite.
    - ``scale``: largest scale of the tensor, without the scales of all-zero channels and tiles; 0 for a tensor format.
    - ``saturated``: share of elements that were clipped, because |x| / scale is above the largest value of the element
      type (for integers, above the bound qmax + 0.5).
    - ``flushed``: share of the elements x ≠ 0 with x̂ = 0.
    - ``sqnr`` = 10 · log10(Σ x² / Σ (x − x̂)²), in dB.
    - ``nonfinite``: share of elements that are infinite or NaN.

    For a float tensor, all statistics except amax and nonfinite are NaN. For a tensor that no backward pass reached,
    all six statistics are NaN.

    Args:
      records: float32, from ``record``.
    """
    amax, scale = records[..., :_PEAK], records[..., _PEAK : 2 * _PEAK]
    sums = dict(zip(_SUMS, jnp.moveaxis(records[..., 2 * _PEAK :], -1, 0), strict=True))
    used, uses = sums["uses"] > 0, sums["uses"]
    is_quantized = sums["quantized"] > 0
    ratio = jnp.where(is_quantized, sums["signal"] / sums["noise"], jnp.nan)
    return {
        "amax": jnp.where(used, _decode_peak(amax, uses), jnp.nan),
        "scale": jnp.where(is_quantized, _decode_peak(scale, uses), jnp.nan),
        "saturated": jnp.where(is_quantized, sums["saturated"] / sums["elements"], jnp.nan),
        "flushed": jnp.where(is_quantized, sums["flushed"] / jnp.maximum(sums["nonzero"], 1), jnp.nan),
        "sqnr": 10 * jnp.log10(ratio),
        "nonfinite": jnp.where(used, sums["nonfinite"] / sums["elements"], jnp.nan),
    }


def _is_saturated(values: Array, spec: TensorSpec, tensor: QTensor) -> Array:
    bound = element(spec.dtype).bound * _ROUNDING
    scaled = apply_blocks(jnp.divide, values, tensor.full_scale(), tensor.blocks)
    if tensor.zero_point is not None:  # the zero point is rounded by up to half a code
        scaled = apply_blocks(jnp.add, scaled, tensor.zero_point.astype(jnp.float32))
    has_every_code = tensor.zero_point is not None or spec.has_grid_scale  # the codes include -qmax - 1
    return (scaled > bound) | (scaled < -bound - has_every_code)


def _encode_peak(value: Array) -> Array:
    return jnp.concatenate([value[None], (jnp.arange(BINS, dtype=jnp.uint32) == bin_of(value)).astype(jnp.float32)])


def _decode_peak(peaks: Array, uses: Array) -> Array:
    highest = jnp.max(jnp.where(peaks[..., 1:] > 0, jnp.arange(BINS), 0), axis=-1)
    return jnp.where(uses == 1, peaks[..., 0], bin_value(highest))
