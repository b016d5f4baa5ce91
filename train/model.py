"""A Llama-style decoder in plain Linen. It knows nothing of quantization.

Module paths carry MaxText's names, so that its mixed-precision files and rules fit:
``layers/self_attention/{query,key,value,out}``, ``layers/mlp/{wi_0,wi_1,wo}``, ``token_embedder``, ``decoder_norm``,
``logits_dense``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

QUANTIZED_RESIDUALS = "quantized"
"""The ``checkpoint_name`` of what a quantized matmul saves for its backward pass."""

REMAT_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "quantized": jax.checkpoint_policies.save_only_these_names(QUANTIZED_RESIDUALS),
}
"""What the backward pass keeps, by the name of a ``remat_policy``; "none" keeps everything."""

EXECUTION_ORDER = (
    "token_embedder",
    "pre_self_attention_layer_norm",
    "self_attention/query",
    "self_attention/key",
    "self_attention/value",
    "self_attention/out",
    "self_attention",
    "post_self_attention_layer_norm",
    "mlp/wi_0",
    "mlp/wi_1",
    "mlp/wo",
    "mlp",
    "layers",
    "decoder_norm",
    "logits_dense",
    "logits",
)
"""Modules in the order in which their outputs are finished, for naming the first one that overflowed."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and numerics of the decoder; the fields mean what they mean in ``TrainConfig``."""

    vocab_size: int
    emb_dim: int
    mlp_dim: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 500000.0
    norm_epsilon: float = 1e-5
    logits_via_embedding: bool = True
    scan_layers: bool = True
    remat_policy: str = "none"
    dtype: str = "float32"
    activation_sharding: jax.sharding.Sharding | None = None

    def dense(self, features: int | tuple[int, ...], name: str, axis: int | tuple[int, ...] = -1) -> nn.DenseGeneral:
        return nn.DenseGeneral(
            features, axis=axis, use_bias=False, dtype=jnp.dtype(self.dtype), param_dtype=jnp.float32, name=name
        )

    def norm(self, name: str) -> nn.RMSNorm:
        dtype = jnp.dtype(self.dtype)
        return nn.RMSNorm(epsilon=self.norm_epsilon, dtype=dtype, param_dtype=jnp.float32, name=name)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Apply rotary position embedding to [batch, sequence, heads, head_dim], halves rotated, angles in float32."""
    half = x.shape[-1] // 2
    wavelength = theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) / wavelength
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def attention_mask(
    tokens: jax.Array, segment_ids: jax.Array | None, positions: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Give the mask [batch, 1, query, key] of a batch, True where a query may look, and its positions."""
    length = tokens.shape[1]
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return mask, positions


class SelfAttention(nn.Module):
    """Grouped-query attention; ``mask`` is [batch, 1, query, key], True where a query may look."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, positions: jax.Array) -> jax.Array:
        c = self.config
        query = c.dense((c.num_query_heads, c.head_dim), "query")(x)
        key = c.dense((c.num_kv_heads, c.head_dim), "key")(x)
        value = c.dense((c.num_kv_heads, c.head_dim), "value")(x)
        query, key = rotate(query, positions, c.rope_theta), rotate(key, positions, c.rope_theta)
        mixed = jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")
        return c.dense(c.emb_dim, "out", axis=(-2, -1))(mixed)


class Mlp(nn.Module):
    """SwiGLU: ``wo(silu(wi_0(x)) * wi_1(x))``."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        hidden = nn.silu(c.dense(c.mlp_dim, "wi_0")(x)) * c.dense(c.mlp_dim, "wi_1")(x)
        return c.dense(c.emb_dim, "wo")(hidden)


class DecoderLayer(nn.Module):
    """One pre-norm layer, shaped as the body of a scan over layers."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, positions: jax.Array) -> tuple[jax.Array, None]:
        c = self.config
        attention = SelfAttention(c, name="self_attention")
        x = x + attention(c.norm("pre_self_attention_layer_norm")(x), mask, positions)
        x = x + Mlp(c, name="mlp")(c.norm("post_self_attention_layer_norm")(x))
        return constrain(x, c), None


class Decoder(nn.Module):
    """Tokens to logits (float32).

    Packed documents do not see each other: a query looks at keys before it with its own segment id.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        c = self.config
        mask, positions = attention_mask(tokens, segment_ids, positions)
        embedder = nn.Embed(
            c.vocab_size,
            c.emb_dim,
            dtype=jnp.dtype(c.dtype),
            param_dtype=jnp.float32,
            promote_dtype=_promote_and_gather(c),
            name="token_embedder",
        )
        x = constrain(embedder(tokens), c)
        layer = _remat(c)
        if c.scan_layers:
            layers = nn.scan(
                layer,
                variable_axes={"params": 0, "_overwrite_with_gradient": 0, "intermediates": 0},
                split_rngs={"params": True, "quant": True},
                in_axes=(nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]
                length=c.num_layers,
            )
            x, _ = layers(c, name="layers")(x, mask, positions)
        else:
            for index in range(c.num_layers):
                x, _ = layer(c, name=f"layers_{index}")(x, mask, positions)
        x = c.norm("decoder_norm")(x)
        logits = embedder.attend(x) if c.logits_via_embedding else c.dense(c.vocab_size, "logits_dense")(x)
        return logits.astype(jnp.float32)


def constrain(x: jax.Array, config: DecoderConfig) -> jax.Array:
    """Place an activation on the mesh."""
    if config.activation_sharding is None:
        return x
    return jax.lax.with_sharding_constraint(x, config.activation_sharding)


def _promote_and_gather(config: DecoderConfig) -> Any:
    """Cast as flax does, and gather a sharded table before tokens are looked up in it.

    Left to itself the partitioner looks up in every part and cannot bring the result into the batch's sharding but by
    replicating it.
    """
    sharding = config.activation_sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return promote_dtype
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())

    def promote(*arrays: Any, **options: Any) -> Any:
        promoted = promote_dtype(*arrays, **options)
        return [jax.lax.with_sharding_constraint(promoted[0], whole)] if len(arrays) == 1 else promoted

    return promote


def _remat(config: DecoderConfig) -> Any:
    if config.remat_policy == "none":
        return DecoderLayer
    # Inside a scan the loop itself keeps XLA from merging the recomputation with the forward pass.
    return nn.remat(DecoderLayer, policy=REMAT_POLICIES[config.remat_policy], prevent_cse=not config.scan_layers)
