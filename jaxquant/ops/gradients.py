"""Shared by all quantized backward passes: names of residuals, aligned scales, refused second derivatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
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
RESULT_NAME = "quantized_result"
"""Name of the results of quantized matmuls, for remat policies."""
REVERSE_ONLY = "reverse_only"
"""Name of ``reverse_only`` in a traced program."""


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def once(name: str, run: Callable[..., Array], lhs: Array, rhs: Array, rest: tuple[Any, ...] = ()) -> Array:
    """Compute ``run(lhs, rhs, *rest)``, a quantized contraction of a library, whose gradients have no derivative.

    Autodiff would find none or a wrong one: some slopes go through the rounding, and some are the library's own.

    Args:
      name: of the recipe.
      run: the contraction.
      lhs, rhs: float operands, with gradients as the library defines them.
      rest: operands without gradients.
    """
    return run(lhs, rhs, *rest)


def _once_fwd(name, run, lhs, rhs, rest):
    out, pull = jax.vjp(lambda a, b: run(a, b, *rest), lhs, rhs)
    out, mark = first_order(name, (out, jnp.zeros(())), (lhs, rhs))
    return out, (pull, mark)


def _once_bwd(name, run, saved, grad):
    pull, mark = saved
    return *first_order(name, tuple(pull(grad)), (grad, mark)), None


once.defvjp(_once_fwd, _once_bwd)


def _refuse(*_: Any, recipe: str) -> NoReturn:
    raise NotImplementedError(
        f"second derivatives through recipe {recipe!r} are not defined: the gradients are rounded; take a gradient "
        "penalty or a Hessian product in the unquantized model, or leave the layers that it reaches in float with rules"
    )


def reverse_only(layer: str, x: Array) -> Array:
    """Return an operand of a quantized layer, whose derivative is an error in forward mode that names the layer."""
    return _operand.bind(x, layer=layer)


def _refuse_forward(*_: Any, layer: str) -> NoReturn:
    raise NotImplementedError(
        f"{layer} is quantized, and a quantized layer has no derivative in forward mode (jax.jvp, jax.linearize, "
        "jax.jacfwd, jax.hessian); take it in reverse mode (jax.grad, jax.vjp, jax.jacrev), or leave the layer in "
        "float with a rule"
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward_only(function: str, x: Array) -> Array:
    """Return a result of a while loop, whose derivative in reverse mode is an error that names the function around."""
    return x


@forward_only.defjvp
def _mark_loop(function, primals, tangents):
    return primals[0], _forward_slope.bind(tangents[0], function=function)


def _refuse_reverse(*_: Any, function: str) -> NoReturn:
    raise NotImplementedError(
        f"{function!r} is registered and quantized, and its program computes its result in a while loop, which has no "
        "derivative in reverse mode; call it so that it scans (in diffrax: adjoint=diffrax.DirectAdjoint()), or give "
        "jaxquant.register_function a function that computes the same with a scan"
    )


def _map_batch(batched: Any, axes: Any, *, recipe: str) -> Any:
    return _no_derivative.bind(*batched, recipe=recipe), axes[0]


def _linear(name: str, refuse: Callable[..., NoReturn], transpose: Callable[..., Any]) -> Primitive:
    """Make the identity of a tangent that nothing computes: it is transposed, or refused."""
    primitive = Primitive(name)
    primitive.def_impl(refuse)
    primitive.def_abstract_eval(lambda slope, *_, **__: slope)
    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = refuse
    mlir.register_lowering(primitive, refuse)
    return primitive


_no_derivative = _linear("no_second_derivative", _refuse, _refuse)
batching.primitive_batchers[_no_derivative] = _map_batch
_forward_slope = _linear("no_reverse_derivative", _refuse_reverse, _refuse_reverse)
_backward_slope = _linear("no_forward_derivative", _refuse_forward, lambda slope, *_, layer: [slope])

# A primitive: of a custom_jvp in a scan or remat under vmap, jax would batch the slope, as it does in forward mode.
_operand = Primitive(REVERSE_ONLY)
_operand.def_impl(lambda x, *, layer: x)
_operand.def_abstract_eval(lambda x, *, layer: x)
ad.defjvp(_operand, lambda slope, x, *, layer: _backward_slope.bind(slope, layer=layer))
batching.defvectorized(_operand)
mlir.register_lowering(_operand, lambda context, x, *, layer: [x])


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
        factor = scale / unit
        if kept != sorted(kept):
            factor = factor.transpose(kept + others)
        factor = factor.reshape(target)
        folded = grad.astype(jnp.float32) * broadcastable(factor, grad)
        return folded, QTensor(residual.qvalue, unit.reshape((1,) * residual.ndim))
    again = dataclasses.replace(forward_spec, rounding="nearest")
    return grad, quantize(dequantize(residual), again, dims.rhs_contract, batch=dims.rhs_batch)


def without_outer(x: QTensor | Array, dtype: str) -> tuple[Array, Array | None]:
    """Return the values that are quantized again, and an outer scale, which waits for ``with_outer``.

    Elements times block scales have six bits, which bfloat16 holds.
    """
    if not isinstance(x, QTensor):
        return x, None
    if x.outer_scale is None:
        return dequantize(x), None
    return dequantize(dataclasses.replace(x, outer_scale=None), dtype), x.outer_scale


def with_outer(tensor: QTensor, unit: Array | None) -> QTensor:
    """Multiply an outer scale that ``without_outer`` took off into what was quantized again."""
    if unit is None:
        return tensor
    return dataclasses.replace(tensor, outer_scale=unit if tensor.outer_scale is None else tensor.outer_scale * unit)
