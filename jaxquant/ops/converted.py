"""Shared by contractions with converted kernels: checks, batch elements one by one, the activation's gradient.

lhs ── quantize_operand ──► qvalues ────────────┐
ConvertedKernel (QTensor, input's static scale) ┴─ product ──► y, bit for bit what the training op computes
grad ── contract with the dequantized kernel, in float ──► gradient of lhs; the kernel has none
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.core.qtensor import ConvertedKernel
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.ops.dimensions import Dimensions

Array = jax.Array


def has_scales_of_elements(recipe: Recipe, weight: ConvertedKernel, dims: Dimensions) -> bool:
    """Whether the batch elements of a kernel have one scale each, as where training quantized each by itself."""
    spec = recipe.fwd.rhs
    is_plain = isinstance(spec, TensorSpec) and spec.granularity == "per_tensor" and weight.tensor.block is None
    return is_plain and any(weight.tensor.scale.shape[axis] > 1 for axis in dims.rhs_batch)


def each_element(
    run: Callable[[Array, ConvertedKernel, Dimensions, Array | None], Array],
    lhs: Array,
    weight: ConvertedKernel,
    dims: Dimensions,
    key: Array | None = None,
) -> Array:
    """Contract each batch element by itself: its activation has a scale of its own, too.

    Args:
      run: contracts one, of (activation, kernel, dimensions, key).
      lhs: the activation.
      weight: the converted kernel.
      dims: of the contraction of all.
      key: for stochastic rounding, or None.
    """
    sizes = tuple(weight.shape[axis] for axis in dims.rhs_batch)
    count = len(sizes)
    others = (axis for axis in range(weight.ndim) if axis not in dims.rhs_batch)
    weight = weight.transpose((*dims.rhs_batch, *others)).stacked(sizes)
    numbers = [
        tuple(axis - sum(other < axis for other in batch) for axis in contract)
        for contract, batch in ((dims.lhs_contract, dims.lhs_batch), (dims.rhs_contract, dims.rhs_batch))
    ]
    inner = Dimensions.of(((numbers[0], numbers[1]), ((), ())), lhs.ndim - count, weight.ndim - count)

    def one(lhs: Array, weight: ConvertedKernel, key: Array | None) -> Array:
        return run(lhs, weight, inner, key)

    for _ in sizes:
        one = jax.vmap(one)
    keys = None if key is None else jax.random.split(key, math.prod(sizes)).reshape(sizes)
    return one(jnp.moveaxis(lhs, dims.lhs_batch, range(count)), weight, keys)


def check_input_scale(recipe: Recipe, weight: ConvertedKernel) -> None:
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
            f"{weight.shape} has no input_scale beside it; convert the model with this recipe"
        )


def check_scales(op: str, weight: ConvertedKernel, axes: tuple[int, ...]) -> None:
    """Refuse a kernel whose scales an op without blocks cannot multiply into its result.

    Args:
      op: its name.
      weight: the converted kernel.
      axes: along which scales may vary.

    Raises:
      NotImplementedError: says which scales it has and which are taken.
    """
    tensor = weight.tensor
    is_plain = tensor.codec is None and tensor.zero_point is None and tensor.outer_scale is None
    sizes = () if tensor.codec is not None else zip(tensor.scale.shape, tensor.shape, strict=True)
    if not is_plain or any(n not in ((1, size) if axis in axes else (1,)) for axis, (n, size) in enumerate(sizes)):
        raise NotImplementedError(
            f"{op} takes a converted kernel with one scale, or one for each element of axes {axes}, got "
            f"{tensor.description}; convert the kernel by this op"
        )


def straight_through(
    run: Callable[..., Array], gradient: Callable[..., Array], activation: Array, weight: ConvertedKernel, *rest: Any
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
