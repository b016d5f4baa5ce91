"""Outputs of an einsum with a weight, and the shapes of a Linen model's variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax

from jaxquant.inject.faces import STREAMS
from jaxquant.ops.einsum import plan_einsum


def einsum_out_features(equation: str, lhs_ndim: int, rhs_shape: Sequence[int]) -> int:
    """Count the outputs of an einsum with a weight: the product of the weight's axes that the activation has not."""
    plan = plan_einsum(equation, lhs_ndim, len(rhs_shape))
    (_, contract), (_, batch) = plan.dimension_numbers
    kept = [size for axis, size in enumerate(rhs_shape) if axis not in plan.rhs_sum]
    return math.prod(size for axis, size in enumerate(kept) if axis not in (*contract, *batch))


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Part a tree into its arrays and a function that puts arrays back among the rest."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def rebuild(arrays: list[Any]) -> Any:
        given: Iterator[Any] = iter(arrays)
        filled = [next(given) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        return jax.tree.unflatten(structure, filled)

    return [leaf for leaf, array in zip(leaves, is_array, strict=True) if array], rebuild


def trace_init(model: nn.Module, *example_inputs: Any, **example_kwargs: Any) -> Any:
    """Trace a model's initialization and return the shapes of its variables."""
    arrays, rebuild = split_arrays((example_inputs, example_kwargs))

    def initialize(key: jax.Array, arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        rngs = dict.fromkeys(STREAMS, key)
        return model.init(rngs, *args, **kwargs)

    return jax.eval_shape(initialize, jax.random.key(0), arrays)
