"""A scanned decoder block of five projections, each of a shape of its own: the least that equal layers can share."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    """A decoder block of five projections, each of a shape of its own."""

    @nn.compact
    def __call__(self, x: jax.Array, _):
        def dense(width: int, name: str):
            return nn.Dense(width, use_bias=False, dtype=jnp.bfloat16, name=name)

        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        q, (k, v) = dense(96, "query")(h), jnp.split(dense(64, "key_value")(h), 2, axis=-1)
        q, k, v = (each.reshape(*each.shape[:-1], -1, 32) for each in (q, k, v))
        weights = nn.softmax(jnp.einsum("bqhd,bkgd->bhqk", q, k).astype(jnp.float32)).astype(jnp.bfloat16)
        mixed = jnp.einsum("bhqk,bkgd->bqhd", weights, v)
        x = x + dense(x.shape[-1], "out")(mixed.reshape(*mixed.shape[:-2], -1))
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        return x + dense(x.shape[-1], "down")(nn.gelu(dense(160, "up")(h))), None


class Scanned(nn.Module):
    """Four blocks in a scan."""

    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return scan()(x, None)[0]
