"""What the backward passes of all quantized ops share: the name of what is kept, scales that fit, one derivative."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import Operand, TensorSpec
from jaxquant.core.scales import power_of_two_below
from jaxquant.core.sharding import broadcastable
from jaxquant.ops.dimensions import Dimensions

Array = jax.Array
RESIDUAL_NAME = "quantized"
"""Name of what quantized layers keep for backward, for remat policies."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def first_order(name: str, values: tuple[Array, ...], inputs: tuple[Array, ...] = ()) -> tuple[Array, ...]:
    """Return values that cannot be differentiated: autodiff would go through the rounding, which has no slope.

    The error comes where the derivative is used, so that one that is dropped (``stop_gradient``) does no harm.

    Args:
      name: of the recipe.
      values: float arrays.
      inputs: float arrays that the values are made of, where autodiff sees no slope on the way from them: integers by
        scales that do not depend on what is quantized have none.
    """
    return values


@first_order.defjvp
def _mark_tangents(name, primals, tangents):
    (values, *_), (slopes, *others) = primals, tangents
    hidden = tuple(slope for each in others for slope in each)
    return values, tuple(_no_derivative.bind(slope, *hidden, recipe=name) for slope in slopes)


def _refuse(*_: Any, recipe: str) -> NoReturn:
    raise NotImplementedError(
        f"second derivatives through recipe {recipe!r} are not defined: the gradients are rounded; take a gradient "
        "penalty or a Hessian product in the unquantized model, or leave the layers that it reaches in float with rules"
    )


def _map_batch(batched: Any, axes: Any, *, recipe: str) -> Any:
    return _no_derivative.bind(*batched, recipe=recipe), axes[0]


_no_derivative = Primitive("no_second_derivative")
_no_derivative.def_impl(_refuse)
_no_derivative.def_abstract_eval(lambda slope, *hidden, recipe: slope)
ad.deflinear2(_no_derivative, _refuse)
batching.primitive_batchers[_no_derivative] = _map_batch
mlir.register_lowering(_no_derivative, _refuse)


def align(
    grad: Array, residual: QTensor, dims: Dimensions, forward_spec: Operand, is_delayed: bool
) -> tuple[Array, QTensor]:
    """Make a residual's scale fit the backward contraction.

    A scale that is shared along the backward's contraction axes stays, and so do those of blocks, which tile either
    contraction. One that varies along them but not along the others (per channel in the forward) is multiplied into the
    gradient: ``Σ_n g[m,n] q[k,n] s[n] = Σ_n (g·s/u)[m,n] q[k,n] · u``, where u, the power of two below the largest s,
    keeps a small gradient from becoming smaller. Any other (forward tiles) is dequantized and quantized again, in the
    forward's dtype and tiles, along the backward's contraction.

    Args:
      grad: the output gradient, lhs of ``dims``.
      residual: the operand that the forward kept, rhs of ``dims``.
      dims: the backward contraction.
      forward_spec: how the forward quantized the residual.
      is_delayed: whether the gradient is quantized once, before it meets a residual.

    Returns:
      The gradient and the residual to contract.
    """
    shape = residual.scale.shape
    if all(shape[axis] == 1 for axis in dims.rhs_contract):
        return grad, residual
    assert isinstance(forward_spec, TensorSpec)
    if forward_spec.granularity == "per_block":
        return grad, residual
    if all(shape[axis] == 1 for axis in dims.rhs_free) and not is_delayed and residual.zero_point is None:
        places = dict(zip(dims.rhs_contract + dims.rhs_batch, dims.lhs_contract + dims.lhs_batch, strict=True))
        target = [1] * grad.ndim
        for theirs, ours in places.items():
            target[ours] = shape[theirs]
        kept = sorted(places, key=lambda axis: places[axis])
        others = [axis for axis in range(residual.ndim) if axis not in places]
        scale = residual.full_scale()
        unit = power_of_two_below(jnp.max(scale))
        factor = (scale / unit).transpose(kept + others).reshape(target)
        folded = grad.astype(jnp.float32) * broadcastable(factor, grad)
        return folded, QTensor(residual.qvalue, unit.reshape((1,) * residual.ndim))
    again = dataclasses.replace(forward_spec, rounding="nearest")
    return grad, quantize(dequantize(residual), again, dims.rhs_contract, batch=dims.rhs_batch)
