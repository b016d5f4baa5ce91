"""Models with every kind of linear layer, and quant state that has seen something, for tests of conversion."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxquant.config.recipes import RECIPES

D = 16


class Block(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x, _):
        y = nn.DenseGeneral((2, 8), dtype=self.dtype, name="query")(x)
        y = nn.Einsum((2, 8, D), "bshd,hde->bse", use_bias=True, dtype=self.dtype, name="mix")(nn.silu(y))
        return x + nn.Dense(D, dtype=self.dtype, name="wo")(y), None


class Linen(nn.Module):
    """Layers under nn.scan along an axis of the parameters, a layer that is used twice, and a head in float."""

    dtype: Any = jnp.float32
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        axes = {"params": self.axis, "_overwrite_with_gradient": 0, "aqt": 0}
        scan = nn.scan(Block, variable_axes=axes, split_rngs={"params": True, "quant": True}, length=3)
        x, _ = scan(self.dtype, name="layers")(x, None)
        twice = nn.Dense(D, dtype=self.dtype, use_bias=False, name="twice")
        return nn.Dense(4, dtype=self.dtype, name="logits")(twice(twice(x)))


class NnxBlock(nnx.Module):
    def __init__(self, dtype, rngs):
        self.query = nnx.LinearGeneral(D, (2, 8), dtype=dtype, rngs=rngs)
        self.mix = nnx.Einsum("bshd,hde->bse", (2, 8, D), (D,), dtype=dtype, rngs=rngs)
        self.wo = nnx.Linear(D, D, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.wo(self.mix(nnx.silu(self.query(x))))


class Nnx(nnx.Module):
    """The same in NNX, the layers stacked by nnx.vmap."""

    def __init__(self, dtype=jnp.float32, rngs=None):
        rngs = rngs or nnx.Rngs(1)
        self.layers = nnx.vmap(lambda rngs: NnxBlock(dtype, rngs), in_axes=0, out_axes=0)(rngs.split(3))
        self.twice = nnx.Linear(D, D, dtype=dtype, use_bias=False, rngs=rngs)
        self.logits = nnx.Linear(D, 4, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        graph, state = nnx.split(self.layers)
        x, _ = jax.lax.scan(lambda x, state: (nnx.merge(graph, state)(x), None), x, state)
        return self.logits(self.twice(self.twice(x)))


def schemes():
    """List (string, backend) of the table of recipes, strings of one row once, without the file of intmp."""
    seen, found = set(), []
    for string, row in RECIPES.items():
        if string and string != "intmp" and row.backends and id(row) not in seen:
            seen.add(id(row))
            found += [(string, backend) for backend in row.backends]
    return found


def filled(shapes: Any) -> Any:
    """Make variables of these shapes without running a model: normal parameters, and quant state that has seen some.

    Every leaf has its own numbers. Amaxes are around those of normal numbers; two of four weights are masked.
    """

    def fill(path: Any, leaf: Any) -> Any:
        name = path[-1].key
        rng = np.random.default_rng(sum(map(ord, jax.tree_util.keystr(path))))
        if name.endswith("amax_history"):
            values = rng.uniform(1.0, 2.5, leaf.shape)
        elif name.endswith("_mask"):
            values = (np.arange(leaf.size).reshape(leaf.shape) // leaf.shape[-1]) % 2
        elif name.endswith(("_scale", "_bins", "_step", "_uses")):
            values = np.full(leaf.shape, name.endswith("_scale"))
        else:
            values = rng.normal(size=leaf.shape) * 0.25
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)
