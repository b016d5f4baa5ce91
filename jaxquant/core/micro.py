"""Quantization in blocks with e4m3 scales and one float32 scale for the tensor, as in NVFP4 training.

    x ── amax of each block ──► outer scale, block scales in e4m3 ──► elements ──► corrected block scales (EDEN)

Source: NVIDIA's TransformerEngine (``NVFP4BlockScaling``); Cook et al., Four Over Six (arXiv 2512.02010); Panferov et
al., Quartet II (arXiv 2601.22813) for EDEN's correction of block scales.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp

from jaxquant.core.blocks import Shape, apply_blocks, is_even, reduce_blocks
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import QTensor
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.rounding import RandomKey, cast, fold, require_key, saturating_cast, stochastic_cast
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE, floor_scale, largest
from jaxquant.core.sharding import all_reduce

Array = jax.Array
_CODE = element("float8_e4m3fn")
_LARGEST = float(jnp.finfo(jnp.float32).max)


def quantize_micro(
    x: Array,
    spec: TensorSpec,
    block: Shape,
    key: RandomKey | None = None,
    outer_amax: Callable[[Array], Array] | None = None,
    except_axes: Collection[str] = (),
) -> QTensor:
    """Quantize an operand with two levels of scales.

    The amax of a block is mapped to ``bound / headroom``; the largest block scale is mapped to ``scale_bound``. If
    ``reciprocal`` is set, elements are multiplied by ``1 / (block scale / encode)``, where
    ``encode = scale_bound · bound / amax``, in TransformerEngine's order. Otherwise they are divided by the product of
    both scales.

    Args:
      x: operand of any float dtype and shape.
      spec: spec with ``micro``.
      block: shape of the blocks that share a scale, from ``block_shape``.
      key: random key, for stochastic rounding and for EDEN.
      outer_amax: function (amax of each block) -> amax for the outer scale of each block, if x stacks several tensors
        along its first axis; None uses one outer scale for x.
      except_axes: mesh axes along which each device has a separate tensor.

    Raises:
      ValueError: the spec uses stochastic rounding or EDEN, but there is no key.
    """
    micro = spec.micro
    assert micro is not None
    if spec.draws:
        key = require_key(spec, key)
    amax = reduce_blocks(x, block, largest).astype(jnp.float32)
    if outer_amax is not None:
        highest = outer_amax(amax)
    else:
        highest = all_reduce(jax.lax.pmax, jnp.max(amax, keepdims=True, initial=0.0), x, except_axes)
    top = element(spec.dtype).bound / micro.headroom
    real, outer = _real_scales(amax, highest, top, micro.scale_bound, spec.reciprocal)
    even = None if is_even(x.shape, block) else block

    def candidate(factor: float) -> tuple[QTensor, Array]:
        code = saturating_cast(real * factor, _CODE)
        step = jnp.where(code == 0, 1.0, code.astype(jnp.float32)) * outer
        if spec.reciprocal:
            scaled = apply_blocks(lambda x, s: x.astype(jnp.float32) * s, x, jnp.minimum(1 / step, _LARGEST), even)
        else:
            scaled = apply_blocks(lambda x, s: x.astype(jnp.float32) / s, x, step, even)
        return QTensor(cast(scaled, spec, key), code, None, outer, even), scaled

    tensor, scaled = candidate(1.0)
    if micro.four_over_six:
        other, _ = candidate(1.5)
        is_better = _errors(x, other, block) < _errors(x, tensor, block)
        chosen = apply_blocks(
            lambda a, b: jnp.broadcast_to(b, a.shape), x.astype(jnp.float32), is_better.astype("float32"), even
        )
        elements = jnp.where(chosen > 0, other.qvalue.astype(jnp.float32), tensor.qvalue.astype(jnp.float32))
        scale = jnp.where(is_better, other.scale.astype(jnp.float32), tensor.scale.astype(jnp.float32))
        tensor = QTensor(elements.astype(spec.dtype), scale.astype(_CODE.name), None, outer, even)
    if micro.eden:
        tensor = _correct_scales(tensor, scaled, block, micro.eden, fold(require_key(spec, key), 1))
    return tensor


def _real_scales(amax: Array, highest: Array, top: float, bound: float, is_reciprocal: bool) -> tuple[Array, Array]:
    """Return the block scales before rounding, in units of the outer scale, and the outer scale."""
    if is_reciprocal:
        encode = jnp.where(highest == 0, 1.0, jnp.minimum(bound * top / highest, _LARGEST))
        return amax * (encode * (1 / top)), 1 / encode
    # Multiply by 1 / constant, as XLA does under jit. Below the floor, the quotients would be NaN.
    outer = floor_scale(highest * (1 / (bound * top)), SMALLEST_GRADIENT_SCALE)
    return amax * (1 / top) / outer, outer


def _errors(x: Array, tensor: QTensor, block: Shape) -> Array:
    """Return the squared error of each block, in units of the outer scale, because squares of 1e-30 would be 0."""
    assert tensor.outer_scale is not None
    codes = tensor.scale.astype(jnp.float32)
    values = apply_blocks(jnp.multiply, tensor.qvalue.astype(jnp.float32), codes, tensor.block)
    return reduce_blocks(jnp.square(x.astype(jnp.float32) / tensor.outer_scale - values), block, jnp.sum)


def _correct_scales(tensor: QTensor, scaled: Array, block: Shape, size: int, key: RandomKey) -> QTensor:
    """Multiply the block scales of each vector by ``Σz² / Σz·q``, rounded stochastically to e4m3.

    After a random rotation, the expected value of the dequantized tensor is then the original.
    """
    vector = tuple(size if step > 1 else 1 for step in block)
    elements = tensor.qvalue.astype(jnp.float32)
    norm, product = (reduce_blocks(scaled * each, vector, jnp.sum) for each in (scaled, elements))
    correction = jnp.where(product == 0, 1.0, norm / product)
    ratio = tuple(max(1, many // step) for many, step in zip(vector, block, strict=True))
    code = apply_blocks(jnp.multiply, tensor.scale.astype(jnp.float32), correction, ratio)
    return QTensor(tensor.qvalue, stochastic_cast(code, _CODE, key), None, tensor.outer_scale, tensor.block)
