"""Layers of mixtures of experts: a dropless router with grouped matmuls, and latent attention. Plain Linen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.attention import attend, rotate

if TYPE_CHECKING:
    from train.model import Cached, DecoderConfig


class Experts(nn.Module):
    """SwiGLU of the ``num_experts_per_tok`` experts that a router picks for each token; no token is dropped.

    ``y = Σ_e p_e · wo_e(silu(wi_0_e(x)) * wi_1_e(x))`` over the largest probabilities p of ``softmax(gate(x))``, which
    are divided by their sum. The router and the sum are in float32. Rows are sorted by their expert, and each matrix is
    one ``jax.lax.ragged_dot``; no loss balances how often an expert is picked.
    """

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.gate = nn.Dense(c.num_experts, use_bias=False, dtype=jnp.float32, param_dtype=jnp.float32)
        make = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)
        inner, outer = (c.num_experts, c.emb_dim, c.mlp_dim), (c.num_experts, c.mlp_dim, c.emb_dim)
        self.wi_0, self.wi_1 = self.param("wi_0", make, inner), self.param("wi_1", make, inner)
        self.wo = self.param("wo", make, outer)

    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        tokens = x.reshape(-1, c.emb_dim)
        share, chosen = jax.lax.top_k(jax.nn.softmax(self.gate(tokens)), c.num_experts_per_tok)
        share /= share.sum(axis=-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=c.num_experts).astype(jnp.int32)

        def experts(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return jax.lax.ragged_dot(rows, weights.astype(x.dtype), sizes)

        rows = tokens[order // c.num_experts_per_tok]
        rows = experts(c.gate(experts(rows, self.wi_0), experts(rows, self.wi_1)), self.wo)
        rows = rows[jnp.argsort(order)].reshape(*chosen.shape, c.emb_dim).astype(jnp.float32)
        return (rows * share[..., None]).sum(axis=1).astype(x.dtype).reshape(x.shape)


class LatentAttention(nn.Module):
    """Attention whose keys and values are made of a latent of ``kv_lora_rank`` numbers a token, as DeepSeek's are.

    The last ``rope_head_dim`` of a head's ``head_dim`` numbers are rotated; those of the key are one for all heads, and
    come from the token itself. A cache holds whole keys and values.
    """

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        heads = (c.num_query_heads, c.head_dim)
        if c.q_lora_rank:
            self.wq_a, self.q_norm, self.wq_b = c.dense(c.q_lora_rank), c.norm(), c.dense(heads)
        else:
            self.query = c.dense(heads)
        self.wkv_a, self.kv_norm = c.dense(c.kv_lora_rank + c.rope_head_dim), c.norm()
        self.wkv_b = c.dense((c.num_query_heads, 2 * c.head_dim - c.rope_head_dim))
        self.out = c.dense(c.emb_dim, axis=(-2, -1))

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, positions: jax.Array, cached: Cached | None = None
    ) -> tuple[jax.Array, Any]:
        c = self.config
        still = c.head_dim - c.rope_head_dim
        query = self.wq_b(self.q_norm(self.wq_a(x))) if c.q_lora_rank else self.query(x)
        latent, turning = jnp.split(self.wkv_a(x), [c.kv_lora_rank], axis=-1)
        key, value = jnp.split(self.wkv_b(self.kv_norm(latent)), [still], axis=-1)
        turned = rotate(turning[:, :, None], positions, c.rope_theta)
        turned = jnp.broadcast_to(turned, (*key.shape[:-1], c.rope_head_dim))
        key = jnp.concatenate([key, turned], axis=-1)
        turned = rotate(query[..., still:], positions, c.rope_theta)
        query = jnp.concatenate([query[..., :still], turned], axis=-1)
        if cached is not None:
            cached, key, value = cached.update(key, value, positions)
        kind = c.attention if cached is None else "xla"
        return self.out(attend(query, key, value, mask, kind, c.activation_sharding)), cached
