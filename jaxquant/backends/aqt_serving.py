"""AQT on converted kernels: AQT's own convert and serve modes, with a QTensor in place of the collection "aqt"."""

# See aqt_config.py.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.backends import _weights
from jaxquant.backends._aqt import aqt_tensor, config, tiled_dot_general
from jaxquant.backends._aqt import utils as aqt_utils
from jaxquant.backends.aqt import linen_op
from jaxquant.backends.aqt_config import tiling_fn, to_aqt
from jaxquant.backends.base import RANDOM_STREAM, OpOptions
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe

Array = jax.Array


def convert_kernel(
    recipe: Recipe, kernel: Array, axes: Sequence[int], state: Mapping[str, Any]
) -> tuple[QTensor, Array | None]:
    """Quantize a layer's kernel as AQT's convert mode does; see ``native.convert_kernel``."""
    op = linen_op("dot_general", recipe, OpOptions("convert"))()
    activation = jnp.zeros([kernel.shape[axis] for axis in axes], kernel.dtype)
    dims = ((tuple(range(len(axes))), tuple(axes)), ((), ()))
    rngs = {RANDOM_STREAM: jax.random.key(0)} if recipe.is_stochastic else {}
    _, written = op.apply({}, activation, kernel, dims, None, mutable=["aqt"], rngs=rngs)
    frozen = written["aqt"]["qrhs"]["frozen"]
    (scale,) = frozen.scale
    counts = list(scale.shape)
    if scale.ndim != kernel.ndim:  # tiled: each contraction axis is (tiles, tile)
        kept = iter(counts)
        counts = [next(kept) * next(kept) if axis in axes else next(kept) for axis in range(kernel.ndim)]
    return QTensor(frozen.qvalue.reshape(kernel.shape), scale.reshape(counts).astype(jnp.float32)), None


def _frozen(weight: ConvertedKernel, tiled_axes: Sequence[int]) -> aqt_tensor.QTensor:
    """Return AQT's form of a converted kernel; a tiled axis becomes (tiles, tile)."""
    qvalue, scale = weight.tensor.qvalue, weight.tensor.scale.astype(weight.dtype)
    shape: list[int] = []
    scale_shape: list[int] = []
    for axis, size in enumerate(qvalue.shape):
        tiles = scale.shape[axis] if axis in tiled_axes else None
        shape += [size] if tiles is None else [tiles, size // tiles]
        scale_shape += [scale.shape[axis]] if tiles is None else [tiles, 1]
    return aqt_tensor.QTensor(
        qvalue=qvalue.reshape(shape),
        scale=[scale.reshape(scale_shape)],
        scale_t=None,
        bias=[],
        dequant_dtype=jnp.dtype(weight.dtype),
    )


@functools.partial(jax.jit, static_argnums=(0, 3))
def _dot(recipe: Recipe, lhs: Array, weight: ConvertedKernel, dimension_numbers: Any) -> Array:
    mode = aqt_utils.QuantMode
    modes = {"lhs_quant_mode": mode.TRAIN, "rhs_quant_mode": mode.SERVE}
    # The forward rounds to nearest; a key is what AQT asks of a config with a stochastic operand.
    key = jax.random.key(0) if recipe.is_stochastic else None
    translated = config.set_context(to_aqt(recipe), key, train_step=None, **modes)
    translated.apply_custom_vjp_on_jax = False
    make_tiles = tiling_fn(recipe)
    frozen = _frozen(weight, dimension_numbers[0][1] if make_tiles is not None else ())
    standin = jnp.zeros(weight.shape, weight.dtype)  # AQT looks at its shape and dtype alone

    def dot(a: Array, b: Array, numbers: Any, *args: Any, **kwargs: Any) -> Array:
        return translated.dg_core(a, b, None, frozen, numbers)[0]

    if make_tiles is None:
        return dot(lhs, standin, dimension_numbers)
    tiles = make_tiles(lhs, standin, dimension_numbers)
    return tiled_dot_general.tiled_dot_general(tiles, lhs, standin, dimension_numbers, dot_general=dot)


def dot_general(lhs: Array, rhs: ConvertedKernel, dimension_numbers: Any, *, recipe: Recipe) -> Array:
    """Compute ``jax.lax.dot_general`` of an activation and a converted kernel.

    Args:
      lhs, rhs, dimension_numbers: as for ``jax.lax.dot_general``.
      recipe: all numbers.
    """
    return _weights.with_input_gradient(_dot, recipe, lhs, rhs, dimension_numbers)
