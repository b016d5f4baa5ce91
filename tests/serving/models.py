"""Models with every kind of linear layer, and quant state with observations, for tests of conversion."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxquant
from jaxquant.core.qtensor import is_tensor
from tests.gallery.models import D, LinenBlock, NnxBlock


class Linen(nn.Module):
    """Layers under nn.scan along an axis of the parameters, a layer that is used twice, and a head in float."""

    dtype: Any = jnp.float32
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        axes = {"params": self.axis, "_overwrite_with_gradient": 0, "aqt": 0}
        scan = nn.scan(LinenBlock, variable_axes=axes, split_rngs={"params": True, "quant": True}, length=3)
        x, _ = scan(self.dtype, name="layers")(x, None)
        twice = nn.Dense(D, dtype=self.dtype, use_bias=False, name="twice")
        return nn.Dense(4, dtype=self.dtype, name="logits")(twice(twice(x)))


class Nnx(nnx.Module):
    """``Linen`` in NNX, with layers stacked by nnx.vmap."""

    def __init__(self, dtype=jnp.float32, rngs=None):
        rngs = rngs or nnx.Rngs(1)
        self.layers = nnx.vmap(lambda rngs: NnxBlock(rngs, dtype), in_axes=0, out_axes=0)(rngs.split(3))
        self.twice = nnx.Linear(D, D, dtype=dtype, use_bias=False, rngs=rngs)
        self.logits = nnx.Linear(D, 4, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        graph, state = nnx.split(self.layers)
        x, _ = jax.lax.scan(lambda x, state: (nnx.merge(graph, state)(x), None), x, state)
        return self.logits(self.twice(self.twice(x)))


def filled(shapes: Any) -> Any:
    """Return variables of these shapes without running a model: normal parameters, quant state with observations.

    Every leaf has different numbers. Amaxes are close to those of normal numbers; two of four weights are masked.
    """

    def fill(path: Any, leaf: Any) -> Any:
        name, is_state = path[-1].key, any(getattr(key, "name", None) == "fields" for key in path)
        rng = np.random.default_rng(sum(map(ord, jax.tree_util.keystr(path))))
        if is_state and name == "amax_history":
            values = rng.uniform(1.0, 2.5, leaf.shape)
        elif is_state and name == "mask":
            values = (np.arange(leaf.size).reshape(leaf.shape) // leaf.shape[-1]) % 2
        elif is_state:
            values = np.full(leaf.shape, name == "scale")
        else:
            values = rng.normal(size=leaf.shape) * 0.25
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def kernels_of(params: Any) -> set[str]:
    """Return the paths of the converted kernels of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_tensor)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in leaves if is_tensor(leaf)}


def convert_linen(model: nn.Module, config: dict[str, Any], x: Any, variables: Any = None, **options: Any) -> Any:
    """Convert a model's variables, check that the converted model computes the same bits, and return the result.

    Args:
      variables: variables of the quantized model; random by default.
      options: of ``jax.jit``, for both forward passes.
    """
    trained = jaxquant.maybe_quantize_model(model, config, x)
    if variables is None:
        variables = filled(jax.eval_shape(trained.init, {"params": jax.random.key(1), "quant": jax.random.key(2)}, x))
    expected = jax.jit(lambda v: trained.apply(v, x, rngs={"quant": jax.random.key(3)}), **options)(variables)
    converted = jaxquant.convert(model, variables, config, x)
    serving = jaxquant.maybe_quantize_model(model, {**config, "checkpoint_is_quantized": True}, x)
    np.testing.assert_array_equal(jax.jit(serving.apply, **options)(converted, x), expected)
    return converted


def convert_nnx(trained: Any, config: dict[str, Any], *x: Any, call: Any) -> Any:
    """Convert a quantized model, check that ``call`` computes the same bits, and return the converted model."""
    converted, run = jaxquant.convert(trained, config, *x), nnx.jit(call)
    np.testing.assert_array_equal(run(converted), run(trained))
    return converted
