"""Functions for contractions with converted kernels: checks, separate batch elements, gradient of the activation.

lhs ── quantize_operand ──► qvalues ────────────┐
QTensor (perhaps with the input's static scale) ┴─ product ──► y, bit for bit what the training op computes
grad ── contract with the dequantized kernel, in float ──► gradient of lhs; the kernel has no gradient
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


def has_batch_scales(recipe: Recipe, weight: QTensor, dims: Dimensions) -> bool:
    """Whether each batch element of a kernel has its own scale, because training quantized each separately."""
    spec = recipe.fwd.rhs
    is_plain = isinstance(spec, TensorSpec) and spec.granularity == "per_tensor" and weight.block is None
    return is_plain and any(weight.scale.shape[axis] > 1 for axis in dims.rhs_batch)


def map_batch(
    run: Callable[..., Array],
    lhs: Array,
    weight: Array | QTensor,
    dims: Dimensions,
    key: RandomKey | None = None,
    *rest: Any,
) -> Array:
    """Contract each batch element separately, with its own activation scale.

    Args:
      run: function of (activation, weight, key, *rest) that contracts one element by ``dims.without_batch()``.
      lhs: activation.
      weight: float weight or converted kernel.
      dims: dimension numbers of the whole contraction.
      key: random key for stochastic rounding, or None.
      rest: other arguments of ``run``, with the batch axes first.
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
    return run(*_align_shardings((elements_first(lhs, dims.lhs_batch), weight, key, *rest), len(sizes)))


def _align_shardings(operands: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Shard the first axes of all arrays alike, as ``jax.vmap`` along explicit mesh axes requires."""
    leaves, tree = jax.tree.flatten(operands)
    places = [place for place in map(explicit_sharding, leaves) if place is not None]
    entries = tuple(next((p.spec[axis] for p in places if p.spec[axis] is not None), None) for axis in range(count))
    if not any(entries):
        return operands

    def shard(x: Array) -> Array:
        at = lambda *spec: NamedSharding(places[0].mesh, PartitionSpec(*spec))  # noqa: E731
        x = jax.sharding.reshard(x, at()) if explicit_sharding(x) is None else x  # so that x's gradient is replicated
        return jax.sharding.reshard(x, at(*entries, *jax.typeof(x).sharding.spec[count:]))

    return tree.unflatten(map(shard, leaves))


def check_input_scale(recipe: Recipe, weight: QTensor) -> None:
    """Raise if the recipe needs a static scale of the activation and the kernel has none.

    Args:
      recipe: recipe of the layer.
      weight: converted kernel.

    Raises:
      ValueError: the kernel has no input scale.
    """
    spec = recipe.resolve("fwd", "lhs")
    if spec is not None and spec.scaling != "dynamic" and weight.input_scale is None:
        raise ValueError(
            f"recipe {recipe.name!r} needs a static activation scale, but the converted kernel of shape "
            f"{weight.shape} has no input_scale; convert the model again with recipe {recipe.name!r}"
        )


def check_scales(op: str, weight: QTensor, axes: tuple[int, ...]) -> None:
    """Raise if an op that supports no blocks cannot apply the scales of a kernel to its result.

    Args:
      op: name of the op.
      weight: converted kernel.
      axes: axes along which scales may vary.

    Raises:
      NotImplementedError: the scales vary along another axis, or the kernel has a zero point, an outer scale or a
        tensor format.
    """
    is_plain = weight.codec is None and weight.zero_point is None and weight.outer_scale is None
    sizes = () if weight.codec is not None else zip(weight.scale.shape, weight.shape, strict=True)
    if not is_plain or any(n not in ((1, size) if axis in axes else (1,)) for axis, (n, size) in enumerate(sizes)):
        raise NotImplementedError(
            f"{op} needs a converted kernel with one scale, or with a scale for each element of axes {axes}, got "
            f"{weight.description}; convert the kernel again for {op}"
        )


def with_input_gradient(
    run: Callable[..., Array], gradient: Callable[..., Array], activation: Array, weight: QTensor, *rest: Any
) -> Array:
    """Compute ``run(activation, weight, *rest)`` with a gradient of the activation only.

    Args:
      run: contraction of an activation with a converted kernel.
      gradient: function of (output gradient, kernel, *rest) that returns the gradient of the activation.
      activation, weight, rest: operands.
    """

    @jax.custom_vjp
    def call(activation, weight, rest):
        return run(activation, weight, *rest)

    def forward(activation, weight, rest):
        return call(activation, weight, rest), (weight, rest)  # unlike ``run``, ``call`` has this derivative, too

    def backward(saved, grad):
        weight, rest = saved
        return gradient(grad, weight, *rest).astype(activation.dtype), None, None

    call.defvjp(forward, backward)
    return call(activation, weight, rest)
