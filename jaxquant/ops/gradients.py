"""Functions for all quantized backward passes: names of residuals, scale alignment, refused second derivatives."""

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
from jaxquant.core.sharding import reshard_like
from jaxquant.ops.dimensions import Dimensions

Array = jax.Array
RESIDUAL_NAME = "quantized"
"""Name of the residuals of quantized layers, for remat policies."""
RESULT_NAME = "quantized_result"
"""Name of the results of quantized matmuls, for remat policies."""
REVERSE_ONLY = "reverse_only"
"""Name of the primitive of ``reverse_only``."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def first_order(name: str, values: tuple[Array, ...], inputs: tuple[Array, ...] = ()) -> tuple[Array, ...]:
    """Return values whose derivative raises an error: autodiff would find the derivative of rounding, which is zero.

    The error is raised where the derivative is used, so that an unused derivative (``stop_gradient``) is allowed.

    Args:
      name: name of the recipe.
      values: float arrays.
      inputs: float arrays that the values depend on although autodiff finds no tangent. For example, qvalues times
        scales that do not depend on the input have no tangent.
    """
    return values


@first_order.defjvp
def _mark_tangents(name, primals, tangents):
    (values, *_), (value_tangents, *others) = primals, tangents
    hidden = tuple(tangent for each in others for tangent in each)
    return values, tuple(_no_derivative.bind(tangent, *hidden, recipe=name) for tangent in value_tangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def first_order_call(name: str, run: Callable[..., Array], lhs: Array, rhs: Array, rest: tuple[Any, ...] = ()) -> Array:
    """Compute ``run(lhs, rhs, *rest)``, a quantized contraction of a library, and refuse second derivatives.

    Autodiff would find zero or wrong second derivatives: some are derivatives of rounding, others are custom
    derivatives of the library.

    Args:
      name: name of the recipe.
      run: contraction.
      lhs, rhs: float operands, with gradients as the library defines them.
      rest: operands without gradients.
    """
    return run(lhs, rhs, *rest)


def _first_order_fwd(name, run, lhs, rhs, rest):
    out, pull = jax.vjp(lambda a, b: run(a, b, *rest), lhs, rhs)
    out, mark = first_order(name, (out, jnp.zeros(())), (lhs, rhs))
    return out, (pull, mark)


def _first_order_bwd(name, run, saved, grad):
    pull, mark = saved
    return *first_order(name, tuple(pull(grad)), (grad, mark)), None


first_order_call.defvjp(_first_order_fwd, _first_order_bwd)


def _refuse(*_: Any, recipe: str) -> NoReturn:
    raise NotImplementedError(
        f"second derivatives through recipe {recipe!r} are not defined, because its gradients are rounded; compute "
        "gradient penalties and Hessians with the unquantized model, or leave the layers in float with rules"
    )


def reverse_only(layer: str, x: Array) -> Array:
    """Return an operand of a quantized layer; its forward-mode derivative raises an error that names the layer."""
    return _operand.bind(x, layer=layer)


def _refuse_forward(*_: Any, layer: str) -> NoReturn:
    raise NotImplementedError(
        f"{layer} is quantized, and a quantized layer has no derivative in forward mode (jax.jvp, jax.linearize, "
        "jax.jacfwd, jax.hessian); use reverse mode (jax.grad, jax.vjp, jax.jacrev), or leave the layer in "
        "float with a rule"
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward_only(function: str, x: Array) -> Array:
    """Return a result of a while loop; its reverse-mode derivative raises an error that names ``function``."""
    return x


@forward_only.defjvp
def _mark_loop(function, primals, tangents):
    return primals[0], _forward_tangent.bind(tangents[0], function=function)


def _refuse_reverse(*_: Any, function: str) -> NoReturn:
    raise NotImplementedError(
        f"the registered function {function!r} is quantized, but runs a while loop, which has no derivative in reverse "
        "mode; use a scan instead of the loop (in diffrax: adjoint=diffrax.DirectAdjoint()), or pass a version with a "
        "scan to jaxquant.register_function as computes"
    )


def _map_batch(batched: Any, axes: Any, *, recipe: str) -> Any:
    return _no_derivative.bind(*batched, recipe=recipe), axes[0]


def _tangent_primitive(name: str, refuse: Callable[..., NoReturn], transpose: Callable[..., Any]) -> Primitive:
    """Return an identity primitive for tangents that is never evaluated: it is transposed, or an error is raised."""
    primitive = Primitive(name)
    primitive.def_impl(refuse)
    primitive.def_abstract_eval(lambda tangent, *_, **__: tangent)
    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = refuse
    mlir.register_lowering(primitive, refuse)
    return primitive


_no_derivative = _tangent_primitive("no_second_derivative", _refuse, _refuse)
batching.primitive_batchers[_no_derivative] = _map_batch
_forward_tangent = _tangent_primitive("no_reverse_derivative", _refuse_reverse, _refuse_reverse)
_backward_tangent = _tangent_primitive("no_forward_derivative", _refuse_forward, lambda tangent, *_, layer: [tangent])

# A primitive, because JAX batches the tangent of a custom_jvp in a scan or remat under vmap, as in forward mode.
_operand = Primitive(REVERSE_ONLY)
_operand.def_impl(lambda x, *, layer: x)
_operand.def_abstract_eval(lambda x, *, layer: x)
ad.defjvp(_operand, lambda tangent, x, *, layer: _backward_tangent.bind(tangent, layer=layer))
batching.defvectorized(_operand)
mlir.register_lowering(_operand, lambda context, x, *, layer: [x])


def align(
    grad: Array, residual: QTensor, dims: Dimensions, forward_spec: Operand, is_delayed: bool
) -> tuple[Array, QTensor]:
    """Return the output gradient and the residual, as operands of a backward contraction.

    A scale that is constant along the contraction axes of the backward pass does not change. Scales of blocks do not
    change either, because blocks tile both contractions. A scale that varies along the contraction axes only (per
    channel in the forward pass) is multiplied into the gradient: ``Σ_n g[m,n] q[k,n] s[n] = Σ_n (g·s/u)[m,n] q[k,n] ·
    u``, where u is the power of two below the largest s. The division by u keeps small gradients in range. A residual
    with other scales (forward tiles) is dequantized, and quantized again along the contraction axes of the backward
    pass, in the dtype and tiles of the forward pass.

    Args:
      grad: output gradient, lhs of ``dims``.
      residual: residual of the operand, rhs of ``dims``.
      dims: backward contraction.
      forward_spec: spec of the residual in the forward pass.
      is_delayed: whether the gradient is already quantized, once for both contractions.

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
        folded = grad.astype(jnp.float32) * reshard_like(factor, grad)
        return folded, QTensor(residual.qvalue, unit.reshape((1,) * residual.ndim))
    again = dataclasses.replace(forward_spec, rounding="nearest")
    return grad, quantize(dequantize(residual), again, dims.rhs_contract, batch=dims.rhs_batch)


def without_outer(x: QTensor | Array, dtype: str) -> tuple[Array, Array | None]:
    """Return the values to quantize again, and the outer scale, which ``with_outer`` applies afterwards.

    The products of elements and block scales have six significant bits, which bfloat16 represents exactly.
    """
    if not isinstance(x, QTensor):
        return x, None
    if x.outer_scale is None:
        return dequantize(x), None
    return dequantize(dataclasses.replace(x, outer_scale=None), dtype), x.outer_scale


def with_outer(tensor: QTensor, unit: Array | None) -> QTensor:
    """Multiply an outer scale from ``without_outer`` into a tensor that was quantized again."""
    if unit is None:
        return tensor
    return dataclasses.replace(tensor, outer_scale=unit if tensor.outer_scale is None else tensor.outer_scale * unit)
