"""Functions that the quantized ops share: argument checks, quant state, shards, dtypes, scales, replaced equations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxquant import exact
from jaxquant.core import delayed
from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quant_state import TENSORS
from jaxquant.core.recipe import DelayedSpec, Recipe, TensorSpec
from jaxquant.core.rounding import prevent_excess_precision
from jaxquant.core.sharding import device_parts, explicit_sharding
from jaxquant.ops.operand import scale_dtype

Array = jax.Array
QuantState = dict[str, delayed.TensorState]


def initial_state(recipe: Recipe) -> QuantState:
    """Return the quant state of one use of a recipe: a ``delayed.TensorState`` for each tensor with delayed scaling."""
    return {name: delayed.initial_state(recipe.delayed or DelayedSpec()) for name in _tensors_with_state(recipe)}


def _tensors_with_state(recipe: Recipe) -> list[str]:
    specs = {name: recipe.spec_of(name) for name in TENSORS}
    return [name for name, spec in specs.items() if spec is not None and spec.scaling == "delayed"]


def check_state(recipe: Recipe, state: Mapping[str, Any] | None, make: str = "initial_state(recipe)") -> None:
    """Check that a call has the quant state of its recipe.

    Args:
      recipe: recipe of the call.
      state: state that the caller passed.
      make: call that creates the state, for the error.

    Raises:
      ValueError: the state is missing, or contains other tensors than the recipe needs.
    """
    wanted, given = _tensors_with_state(recipe), list(state or {})
    if sorted(given) != sorted(wanted):
        raise ValueError(
            f"recipe {recipe.name!r} needs state for {wanted or 'no tensor'}, got {given or 'none'}; pass state={make}"
        )


def check_float(op: str, **operands: Array | QTensor) -> None:
    """Check that operands are converted or have a float dtype.

    Args:
      op: name of the op, for the error.
      operands: operands by name.

    Raises:
      TypeError: an operand has another dtype.
    """
    for name, operand in operands.items():
        if not isinstance(operand, QTensor) and not jnp.issubdtype(operand.dtype, jnp.floating):
            raise TypeError(f"{op} argument {name} has dtype {operand.dtype.name}; cast {name} to a float dtype")


def check_operands(op: str, lhs: Array, rhs: Array | QTensor, recipe: Recipe, reason: str) -> None:
    """Check the operands and the recipe of an op that supports neither every recipe nor explicit meshes.

    Args:
      op: name of the op, for errors.
      lhs, rhs: operands of the op.
      recipe: recipe of the op.
      reason: reason why the op does not support the recipe, or "" if it does.

    Raises:
      TypeError: an operand is not float.
      NotImplementedError: an operand is sharded on an explicit mesh, or ``reason`` is not empty.
    """
    check_float(op, lhs=lhs, rhs=rhs)
    for name, operand in (("lhs", lhs), ("rhs", rhs.qvalue if isinstance(rhs, QTensor) else rhs)):
        if explicit_sharding(operand) is not None:
            raise NotImplementedError(
                f"{op} argument {name} is sharded on a mesh with explicit axes, but a quantized {op} supports only "
                "AxisType.Auto axes; create the mesh with AxisType.Auto"
            )
    if reason:
        raise NotImplementedError(f"{op} does not support recipe {recipe.name!r} ({reason}); use another recipe")


def hashable_precision(precision: Any) -> Any:
    """Return the ``precision`` of ``lax.dot_general`` (one value, or one for each operand) in a hashable form."""
    if isinstance(precision, (tuple, list)):
        return tuple(map(jax.lax.Precision, precision))
    return None if precision is None else jax.lax.Precision(precision)


def to_eight_bits(qvalue: Array) -> Array:
    """Cast 4-bit qvalues to an 8-bit dtype in which they are exact. Other dtypes do not change.

    XLA has no ragged matmul and no convolution of 4-bit operands.
    """
    kind = ELEMENTS.get(qvalue.dtype.name)
    return qvalue.astype(kind.held_by) if kind is not None and kind.held_by else qvalue


def with_shards(recipe: Recipe, lhs: Array, axes: Sequence[int]) -> Recipe:
    """Return a recipe with its shard count of -1 replaced by the number of devices that share the batch.

    Args:
      recipe: recipe of the op.
      lhs: activation.
      axes: free axes of the activation; the first one is split.
    """
    if recipe.drhs.shards >= 0:
        return recipe
    count = device_parts(lhs, axes[0]) if axes else 1
    return dataclasses.replace(recipe, drhs=dataclasses.replace(recipe.drhs, shards=count))


def unsupported(recipe: Recipe) -> str:
    """Return the reason why convolutions and ragged matmuls cannot run a recipe, or "" if they can."""
    specs = [spec for spec in recipe.specs.values() if isinstance(spec, TensorSpec)]
    forward = [spec for spec in (recipe.fwd.lhs, recipe.fwd.rhs) if isinstance(spec, TensorSpec)]
    backward = [spec for spec in (recipe.dlhs.rhs, recipe.drhs.lhs) if isinstance(spec, TensorSpec)]
    grad = recipe.spec_of("output_grad")
    is_delayed = grad is not None and grad.scaling == "delayed"
    reasons = {
        "asymmetric quantization": any(not spec.calibration.is_symmetric for spec in specs),
        "static scales": any(spec.scaling == "static" for spec in specs),
        "quantization_local_shard_count above 1 for the input gradient": recipe.dlhs.shards > 1,
        "weight sparsity": recipe.sparsity is not None,
        "delayed scaling for the backward pass only": any(spec.scaling == "delayed" for spec in backward),
        "delayed scaling of gradients with forward scales that are not per tensor": is_delayed
        and any(spec.granularity != "per_tensor" for spec in forward),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def rescale(recipe: Recipe, out_dtype: str, out: Array, left: Array, right: Array) -> Array:
    """Multiply a result by the scales of both operands, which have the layout of the result.

    A float32 result of integer sums is held: a following addition of the caller does not change its rounding.
    """
    dtype, is_exact = scale_dtype(recipe, out_dtype), out.dtype == jnp.int32
    if dtype == "float32" or is_exact:
        out = out.astype(jnp.float32)
    out = out * left.astype(dtype) * right.astype(dtype)
    return exact.hold(out) if is_exact else out


def round_result(recipe: Recipe, out: Array, dtype: str) -> Array:
    """Cast a product to the dtype of the result. If the sums are exact, GPU compilers keep this rounding."""
    out = out.astype(dtype)
    return out if recipe.exact_contraction_size is None else prevent_excess_precision(out)


def evaluate_jaxpr(jaxpr: Jaxpr, operands: Sequence[Any], compute: Callable[[JaxprEqn, list[Any]], Any]) -> Any:
    """Run a program whose equations have one result each, and return its one result.

    Args:
      jaxpr: program without constants.
      operands: values of its arguments, of any type that ``compute`` accepts.
      compute: function of (equation, values of its inputs) that returns the equation's result.
    """
    known: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    for eqn in jaxpr.eqns:
        values = [atom.val if isinstance(atom, Literal) else known[atom] for atom in eqn.invars]
        known[eqn.outvars[0]] = compute(eqn, values)
    return known[jaxpr.outvars[0]]
