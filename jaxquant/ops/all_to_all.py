"""all_to_all: 8-bit exchange of an activation between devices; the gradient is exchanged in its own dtype."""

from __future__ import annotations

import functools
from typing import Literal

import jax
from jaxtyping import Array, Float

from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.sharding import fit_varying, varying_axes
from jaxquant.ops.pieces import check_float

TILE = 128
DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")


def all_to_all(
    x: Float[Array, "*shape"],
    axis_name: str,
    split_axis: int,
    concat_axis: int,
    *,
    dtype: str = "float8_e4m3fn",
    scale_rounding: Literal["exact", "up"] = "exact",
) -> Float[Array, "*exchanged"]:
    """Exchange parts of an activation like a tiled ``jax.lax.all_to_all``, in 8 bits; the gradient is not rounded.

    ``y = q' · s'``, where q' and s' are q and s after the exchange, ``q = cast(x / s)`` and ``s = amax / bound`` of 128
    neighbours along the last axis, in float32. A matmul whose recipe has the same tiles (``fp8_block``, for e4m3)
    reproduces the exchanged qvalues q' exactly; other matmuls quantize y again. The gradient is the gradient of an
    exchange without rounding: the output gradient is exchanged back in its own dtype.

    Args:
      x: activation, inside ``jax.shard_map``.
      axis_name: mesh axis of the devices.
      split_axis, concat_axis: axes as in ``jax.lax.all_to_all``, but not the last axis, which is tiled.
      dtype: dtype of the exchanged data, "float8_e4m3fn", "float8_e5m2" or "int8".
      scale_rounding: rounding of scales; "up" rounds to powers of two, so that y is exact in bfloat16, too.

    Raises:
      TypeError: x is not float.
      ValueError: the dtype is not supported, or an axis is negative or the last axis.

    Source: dispatch of DeepSeek-V3 (its report, section 3.3.2): activations in FP8, gradients of the combined outputs
    in bfloat16.
    """
    check_float("all_to_all", x=x)
    last = x.ndim - 1
    if dtype not in DTYPES:
        raise ValueError(f"all_to_all dtype {dtype!r} is not supported; use {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    if not all(0 <= axis < last for axis in (split_axis, concat_axis)):
        raise ValueError(
            f"all_to_all got split_axis {split_axis} and concat_axis {concat_axis} for an input of {x.ndim} axes; both "
            f"must be at least 0 and below {last}, because the elements of the last axis share scales"
        )
    spec = TensorSpec(dtype, "per_tile", tile_size=TILE, scale_rounding=scale_rounding)
    return _exchanged(spec, axis_name, split_axis, concat_axis, varying_axes(x), x)


def _exchange(x: Array, axis_name: str, split_axis: int, concat_axis: int) -> Array:
    return jax.lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _exchanged(
    spec: TensorSpec, axis_name: str, split_axis: int, concat_axis: int, varying: frozenset[str], x: Array
) -> Array:
    sent = quantize(x, spec, (x.ndim - 1,))
    # Not every collective library supports float8; all support bytes.
    codes = jax.lax.bitcast_convert_type(sent.qvalue, "uint8")
    codes, scale = (_exchange(part, axis_name, split_axis, concat_axis) for part in (codes, sent.scale))
    qvalue = jax.lax.bitcast_convert_type(codes, sent.qvalue.dtype)
    return dequantize(QTensor(qvalue, scale, block=sent.block), x.dtype.name)


def _exchanged_fwd(spec, axis_name, split_axis, concat_axis, varying, x):
    return _exchanged(spec, axis_name, split_axis, concat_axis, varying, x), None


def _exchanged_bwd(spec, axis_name, split_axis, concat_axis, varying, _, grad):
    return (fit_varying(_exchange(grad, axis_name, concat_axis, split_axis), varying),)


_exchanged.defvjp(_exchanged_fwd, _exchanged_bwd)
