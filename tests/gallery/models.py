"""One model in three frameworks, with every kind of layer that a recipe can quantize, in few lowered programs.

Each has two scanned, rematerialized blocks (a projection to heads, an einsum with batch axes, a plain layer) in
bfloat16, a convolution, experts (a mapped stack; in the plain function a ragged matmul), a layer that is used twice in
float32, and a head.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

D, HEADS, EXPERTS, BLOCKS = 16, 2, 2, 2
ROWS, LENGTH = 2, 5
LOW = jnp.bfloat16


class LinenBlock(nn.Module):
    dtype: Any = LOW

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.DenseGeneral((HEADS, D // HEADS), dtype=self.dtype, name="query")(x)
        y = nn.Einsum((HEADS, D // HEADS, D), "bshd,hde->bse", use_bias=True, dtype=self.dtype, name="mix")(nn.silu(y))
        return x + nn.Dense(D, dtype=self.dtype, name="wo")(y), None


class LinenExpert(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(D, use_bias=False, name="up")(x)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes = {"params": 0, "_overwrite_with_gradient": 0, "aqt": 0}
        rngs = {"params": True, "quant": True}
        block = nn.scan(nn.remat(LinenBlock), variable_axes=axes, split_rngs=rngs, length=BLOCKS)
        x, _ = block(name="layers")(x, None)
        x = nn.Conv(D, (3,), name="conv")(x.astype(jnp.float32))
        experts = nn.vmap(LinenExpert, variable_axes=axes, split_rngs=rngs, in_axes=None, out_axes=0, axis_size=EXPERTS)
        x = x + experts(name="experts")(x).mean(0)
        twice = nn.Dense(D, use_bias=False, name="twice")
        return nn.Dense(4, name="logits")(twice(nn.silu(twice(x))))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any = LOW) -> None:
        self.query = nnx.LinearGeneral(D, (HEADS, D // HEADS), dtype=dtype, rngs=rngs)
        self.mix = nnx.Einsum("bshd,hde->bse", (HEADS, D // HEADS, D), (D,), dtype=dtype, rngs=rngs)
        self.wo = nnx.Linear(D, D, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.wo(self.mix(nnx.silu(self.query(x))))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.vmap(NnxBlock, in_axes=0, out_axes=0)(rngs.split(BLOCKS))
        self.conv = nnx.Conv(D, D, (3,), rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, D, D)))
        self.twice = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.logits = nnx.Linear(D, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.layers)
        body = jax.checkpoint(lambda x, state: (nnx.merge(graph, state)(x), None))
        x, _ = jax.lax.scan(body, x, state)
        x = self.conv(x.astype(jnp.float32))
        x = x + jax.vmap(lambda up: x @ up)(self.up[...]).mean(0)
        return self.logits(self.twice(nnx.silu(self.twice(x))))


def function_params() -> dict[str, Any]:
    """Return the shapes of the plain function's parameters."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return {
        "layers": {"query": shape((BLOCKS, D, D)), "mix": shape((BLOCKS, HEADS, D // HEADS, D))},
        "conv": shape((3, D, D)),
        "experts": shape((EXPERTS, D, D)),
        "ragged": shape((EXPERTS, D, D)),
        "twice": shape((D, D)),
        "logits": shape((D, 4)),
    }


def function(params: Any, x: jax.Array) -> jax.Array:
    """Compute the same kinds of layers without a framework, and a ragged matmul."""

    @jax.checkpoint
    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        y = jax.nn.silu(x @ p["query"].astype(x.dtype)).reshape(*x.shape[:-1], HEADS, D // HEADS)
        return x + jnp.einsum("bshd,hde->bse", y, p["mix"].astype(x.dtype)), None

    x, _ = jax.lax.scan(block, x, params["layers"])
    x = jax.lax.conv_general_dilated(
        x.astype(jnp.float32), params["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    x = x + jax.vmap(lambda up: x @ up)(params["experts"]).mean(0)
    rows, sizes = x.reshape(-1, D), jnp.array([ROWS * LENGTH - 3, 3], jnp.int32)
    x = x + jax.lax.ragged_dot(rows, params["ragged"], sizes).reshape(x.shape)
    return jax.nn.silu(x @ params["twice"]) @ params["twice"] @ params["logits"]
