"""Shared by contractions with converted kernels: checks, batch elements one by one, the activation's gradient.

lhs ── quantize_operand ──► qvalues ────────────┐
QTensor (perhaps with the input's static scale) ┴─ product ──► y, bit for bit what the training op computes
grad ── contract with the dequantized kernel, in float ──► gradient of lhs; the kernel has none
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant.core.qtensor import QTensor
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.core.rounding import RandomKey, fold
from jaxquant.core.sharding import explicit_sharding
from jaxquant.ops.dimensions import Dimensions

Array = jax.Array


def has_scales_of_elements(recipe: Recipe, weight: QTensor, dims: Dimensions) -> bool:
    """Whether the batch elements of a kernel have one scale each, as where training quantized each by itself."""
    spec = recipe.fwd.rhs
    is_plain = isinstance(spec, TensorSpec) and spec.granularity == "per_tensor" and weight.block is None
    return is_plain and any(weight.scale.shape[axis] > 1 for axis in dims.rhs_batch)


def each_element(
    run: Callable[..., Array],
    lhs: Array,
    weight: Array | QTensor,
    dims: Dimensions,
    key: RandomKey | None = None,
    *rest: Any,
) -> Array:
    """Contract each batch element by itself: its activation has a scale of its own, too.

    Args:
      run: contracts one, by ``dims.of_element()``, of (activation, weight, key, *rest).
      lhs: the activation.
      weight: float, or a converted kernel.
      dims: of the contraction of all.
      key: for stochastic rounding, or None.
      rest: what else each element has one of, along first axes.
    """
    sizes = tuple(lhs.shape[axis] for axis in dims.lhs_batch)

    def elements_first(x: Any, batch: tuple[int, ...]) -> Any:
        order = (*batch, *(axis for axis in range(x.ndim) if axis not in batch))
        return x if order == tuple(range(x.ndim)) else x.transpose(order)

    weight = elements_first(weight, dims.rhs_batch)
    if sizes and isinstance(weight, QTensor):
        weight = weight.stacked(sizes)
    if sizes and key is not None:
        key = fold(key, jnp.arange(math.prod(sizes), dtype=jnp.uint32).reshape(sizes))
    for _ in sizes:
        run = jax.vmap(run)
    return run(*_on_one_mesh((elements_first(lhs, dims.lhs_batch), weight, key, *rest), len(sizes)))


def _on_one_mesh(operands: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Shard the first axes of all arrays as those that ``jax.vmap`` maps along explicit mesh axes must be: alike."""
    leaves, tree = jax.tree.flatten(operands)
    places = [place for place in map(explicit_sharding, leaves) if place is not None]
    entries = tuple(next((p.spec[axis] for p in places if p.spec[axis] is not None), None) for axis in range(count))
    if not any(entries):
        return operands

    def lay(x: Array) -> Array:
        at = lambda *spec: NamedSharding(places[0].mesh, PartitionSpec(*spec))  # noqa: E731
        x = jax.sharding.reshard(x, at()) if explicit_sharding(x) is None else x  # so that its gradient is replicated
        return jax.sharding.reshard(x, at(*entries, *jax.typeof(x).sharding.spec[count:]))

    return tree.unflatten(map(lay, leaves))


def check_input_scale(recipe: Recipe, weight: QTensor) -> None:
    """Refuse a kernel without the static scale of the activation that a recipe asks for.

    Args:
      recipe: all numbers.
      weight: the converted kernel.

    Raises:
      ValueError: it has none.
    """
    spec = recipe.resolve("fwd", "lhs")
    if spec is not None and spec.scaling != "dynamic" and weight.input_scale is None:
        raise ValueError(
            f"recipe {recipe.name!r} scales activations by a static scale and the converted kernel of shape "
            f"{weight.shape} has no input_scale; convert the model with this recipe"
        )


def check_scales(op: str, weight: QTensor, axes: tuple[int, ...]) -> None:
    """Refuse a kernel whose scales an op without blocks cannot multiply into its result.

    Args:
      op: its name.
      weight: the converted kernel.
      axes: along which scales may vary.

    Raises:
      NotImplementedError: says which scales it has and which are taken.
    """
    is_plain = weight.codec is None and weight.zero_point is None and weight.outer_scale is None
    sizes = () if weight.codec is not None else zip(weight.scale.shape, weight.shape, strict=True)
    if not is_plain or any(n not in ((1, size) if axis in axes else (1,)) for axis, (n, size) in enumerate(sizes)):
        raise NotImplementedError(
            f"{op} takes a converted kernel with one scale, or one for each element of axes {axes}, got "
            f"{weight.description}; convert the kernel by this op"
        )


def straight_through(
    run: Callable[..., Array], gradient: Callable[..., Array], activation: Array, weight: QTensor, *rest: Any
) -> Array:
    """Compute ``run(activation, weight, *rest)`` with a gradient of the activation alone.

    Args:
      run: any contraction of an activation with a converted kernel.
      gradient: (output gradient, kernel, *rest) -> that of the activation.
      activation, weight, rest: operands.
    """

    @jax.custom_vjp
    def call(activation, weight, rest):
        return run(activation, weight, *rest)

    def forward(activation, weight, rest):
        return call(activation, weight, rest), (weight, rest)  # so that the value of a vjp has its derivative, too

    def backward(saved, grad):
        weight, rest = saved
        return gradient(grad, weight, *rest).astype(activation.dtype), None, None

    call.defvjp(forward, backward)
    return call(activation, weight, rest)
