"""AQT as a backend: its matmul with the config of a recipe, in training and with converted kernels.

``aqt_config`` translates the recipe.
"""

# See aqt_config.py.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.backends._aqt import aqt_dot_general, aqt_tensor, config, tiled_dot_general
from jaxquant.backends._aqt import utils as aqt_utils
from jaxquant.backends.aqt_config import HONOURS, tile_size, tiling_fn, to_aqt
from jaxquant.backends.base import LibraryBackend
from jaxquant.core.qtensor import QTensor
from jaxquant.core.recipe import Recipe
from jaxquant.core.rounding import RandomKey, jax_key, operands_key

Array = jax.Array
_TRAIN, _SERVE = aqt_utils.QuantMode.TRAIN, aqt_utils.QuantMode.SERVE


def _translated(recipe: Recipe, key: RandomKey | None, weight: Any = _TRAIN) -> aqt_dot_general.DotGeneral:
    key = None if key is None else jax_key(key)
    return config.set_context(to_aqt(recipe), key, train_step=None, lhs_quant_mode=_TRAIN, rhs_quant_mode=weight)


def _tiled(recipe: Recipe, lhs: Array, rhs: Array, numbers: Any, dot: Any) -> Array:
    """Contract tile by tile if the recipe has tiles."""
    make_tiles = tiling_fn(recipe)
    if make_tiles is None:
        return dot(lhs, rhs, numbers)
    tiles = make_tiles(lhs, rhs, numbers)
    return tiled_dot_general.tiled_dot_general(tiles, lhs, rhs, numbers, dot_general=dot)


def _dot(recipe: Recipe, lhs: Array, rhs: Array, numbers: Any, key: RandomKey | None) -> Array:
    if key is None and recipe.is_stochastic:
        key = operands_key(lhs, rhs)
    return _tiled(recipe, lhs, rhs, numbers, _translated(recipe, key))


def _dot_converted(recipe: Recipe, lhs: Array, weight: QTensor, numbers: Any) -> Array:
    # The forward rounds to nearest, but AQT requires a key for a config with a stochastic operand.
    translated = _translated(recipe, jax.random.key(0) if recipe.is_stochastic else None, _SERVE)
    translated.apply_custom_vjp_on_jax = False
    frozen = freeze(recipe, weight, numbers[0][1])
    placeholder = jnp.zeros(weight.shape, weight.dtype)  # AQT reads only the shape and the dtype of rhs

    def dot(a: Array, b: Array, numbers: Any, *args: Any, **kwargs: Any) -> Array:
        return translated.dg_core(a, b, None, frozen, numbers)[0]

    return _tiled(recipe, lhs, placeholder, numbers, dot)


def _tiled_shape(axes: Sequence[int], sizes: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return a shape in which each of the axes is (tiles, tile)."""
    each = enumerate(zip(sizes, counts, strict=True))
    return [part for axis, (size, n) in each for part in ((n, size // n) if axis in axes else (size,))]


def freeze(recipe: Recipe, weight: QTensor, axes: Sequence[int]) -> aqt_tensor.QTensor:
    """Return a converted kernel as AQT's QTensor; with tiles, a contraction axis becomes (tiles, tile)."""
    qvalue, scale = weight.qvalue, weight.scale.astype(weight.float_dtype())
    axes = () if tile_size(recipe) is None else axes
    return aqt_tensor.QTensor(
        qvalue=qvalue.reshape(_tiled_shape(axes, qvalue.shape, scale.shape)),
        scale=[scale.reshape(_tiled_shape(axes, scale.shape, scale.shape))],
        scale_t=None,
        bias=[],
        dequant_dtype=jnp.dtype(weight.dtype),
    )


def thaw(stored: Any, ndim: int, axes: Sequence[int]) -> QTensor:
    """Return a kernel in AQT's form as our QTensor."""
    (scale,) = stored.scale

    def whole(part: Array) -> Array:
        sizes = iter(part.shape)
        cut = () if part.ndim == ndim else axes
        return part.reshape([next(sizes) * (next(sizes) if axis in cut else 1) for axis in range(ndim)])

    return QTensor(whole(stored.qvalue), whole(scale).astype(jnp.float32))


def _convert(recipe: Recipe, weight: Array, axes: Sequence[int]) -> QTensor:
    cut, counts = (), weight.shape
    if (make_tiles := tiling_fn(recipe)) is not None:
        make_tiles(weight, weight, ((axes, axes), ((), ())))  # raises if tiles do not divide
        cut, counts = axes, [n // (tile_size(recipe) or 1) for n in weight.shape]
    quantizer = _translated(recipe, jax.random.key(0) if recipe.is_stochastic else None).fwd.dg_quantizer.rhs
    quantizer.init_calibration()
    inner = [axis + sum(other <= axis for other in cut) for axis in axes]
    tensor, _ = quantizer.quant(weight.reshape(_tiled_shape(cut, weight.shape, counts)), calibration_axes=inner)
    return thaw(tensor, weight.ndim, axes)


class AqtBackend(LibraryBackend):
    """AQT's matmul."""

    honours = HONOURS
    dtype_faults = {  # noqa: RUF012
        "float16": "overflows with float16 operands, because sums are cast to float16 before scaling",
        "float64": "does not support float64 operands",
    }
    translate, contract_float = staticmethod(to_aqt), staticmethod(_dot)
    contract_converted, convert_weight = staticmethod(_dot_converted), staticmethod(_convert)


BACKEND = AqtBackend("aqt")
