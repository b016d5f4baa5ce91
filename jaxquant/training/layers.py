"""Layers of the decoder with their configuration: norms, attention, MLP and experts; contains no quantization code."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from jaxquant.config.decoder import rope_magnitude, rope_stretch
from jaxquant.ops.remat import compress_residuals
from jaxquant.serving import kv_cache
from jaxquant.serving.kv_cache import KVCache
from jaxquant.training.attention import Kind, Rope, make_mask
from jaxquant.training.config import DecoderOptions
from jaxquant.training.numerics import NUMERICS, RopeOf, Standard


@dataclasses.dataclass(frozen=True)
class DecoderConfig(DecoderOptions):
    """Shape of a decoder, with its dtype, attention kind and activation sharding."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    attention: Kind = "xla"
    activation_sharding: jax.sharding.Sharding | None = None

    def dense(
        self, features: int | tuple[int, ...], axis: int | tuple[int, ...] = -1, use_bias: bool = False
    ) -> nn.DenseGeneral:
        """Return a linear layer that a recipe quantizes."""
        kind = ExactDense if self.numerics == "exact" else nn.DenseGeneral
        return kind(features, axis=axis, use_bias=use_bias, dtype=jnp.dtype(self.dtype), param_dtype=jnp.float32)

    def float_dense(self, features: int, dtype: str, use_bias: bool = False) -> nn.DenseGeneral:
        """Return a linear layer that recipes leave in float: the head or a router."""
        options: Any = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.float32, "dot_general": self.math.dot_general}
        return nn.DenseGeneral(features, use_bias=use_bias, **options)

    def norm(self) -> nn.RMSNorm:
        kind = nn.RMSNorm
        if self.saved_activations == "fp8" or self.numerics == "exact":
            kind = functools.partial(DecoderNorm, config=self)
        return kind(epsilon=self.norm_epsilon, dtype=jnp.dtype(self.dtype), param_dtype=jnp.float32)

    @property
    def math(self) -> Standard:
        """Float functions of ``numerics``."""
        return NUMERICS[self.numerics]

    def gate(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return the gated activation of an MLP, ``silu(a) * b`` for ``mlp_activation`` "silu"."""
        gate = functools.partial(self.math.gate, self.mlp_activation)
        return (compress_residuals(gate, (0, 1)) if self.saved_activations == "fp8" else gate)(a, b)

    def is_global(self, layer: int | jax.Array) -> bool | jax.Array:
        """Return whether a layer attends to all earlier positions, not only to a sliding window."""
        every = self.global_attention_every if self.sliding_window_size else 1
        return every > 0 and (every == 1 or (layer + 1) % every == 0)

    def rope(self, is_global: bool | jax.Array) -> Rope:
        """Return the rotary embedding of a layer."""
        everywhere, theta = Rope(self.rope_theta, rope_stretch(self), rope_magnitude(self)), self.rope_local_theta
        if is_global is True or not theta:
            return everywhere
        if is_global is False:
            return Rope(theta)
        stretch = 1.0 if everywhere.stretch is None else everywhere.stretch
        return Rope(jnp.where(is_global, self.rope_theta, theta), jnp.where(is_global, stretch, 1.0))


class DecoderNorm(nn.RMSNorm):
    """``nn.RMSNorm`` with the numerics of the decoder, which can save its input in FP8 for the backward pass."""

    config: DecoderConfig = dataclasses.field(kw_only=True)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        scale = self.param("scale", self.scale_init, x.shape[-1:], self.param_dtype)
        c = self.config
        compute = lambda x, scale: c.math.rms_norm(x, scale, self.epsilon, self.dtype)  # noqa: E731
        return (compress_residuals(compute) if c.saved_activations == "fp8" else compute)(x, scale)


class ExactDense(nn.DenseGeneral):
    """``nn.DenseGeneral`` whose product, bias and result are rounded to the layer's dtype in every program."""

    dot_general: Any = dataclasses.field(default=lambda *operands, **options: _round_product(*operands, **options))
    promote_dtype: Any = dataclasses.field(default=lambda *arrays, **options: _promote_and_round(*arrays, **options))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return NUMERICS["exact"].round(super().__call__(inputs), self.dtype)


def _round_product(lhs: jax.Array, rhs: jax.Array, *arguments: Any, **options: Any) -> jax.Array:
    return NUMERICS["exact"].round(jax.lax.dot_general(lhs, rhs, *arguments, **options), lhs.dtype)


def _promote_and_round(inputs: jax.Array, kernel: jax.Array, bias: jax.Array | None, dtype: Any) -> Any:
    inputs, kernel = promote_dtype(inputs, kernel, dtype=dtype)
    return inputs, kernel, None if bias is None else NUMERICS["exact"].round(bias, dtype)


class AttentionContext(NamedTuple):
    """Inputs of attention in addition to the activations.

    Attributes:
      positions: array [batch, tokens].
      mask: mask of layers that attend to all earlier positions (``make_mask``).
      window_mask: mask of layers with a sliding window.
      valid: mask [batch, tokens] of the tokens that a cache stores, False for padding, or None for all tokens.
      layer: index of the layer.
    """

    positions: jax.Array
    mask: jax.Array | None
    window_mask: jax.Array | None = None
    valid: jax.Array | None = None
    layer: int | jax.Array = 0

    def select_mask(self, is_global: bool | jax.Array) -> jax.Array | None:
        """Return the mask of a layer that attends to all earlier positions, or of a layer with a window."""
        if isinstance(is_global, bool):
            return self.mask if is_global else self.window_mask
        if self.mask is None or self.window_mask is None:  # the kernel's own causal mask has no array
            return self.mask if self.window_mask is None else jnp.where(is_global, 0, self.window_mask)
        return jnp.where(is_global, self.mask, self.window_mask)

    @property
    def _num_keys(self) -> int:
        assert self.mask is not None
        return self.mask.shape[-1]

    def rotate(self, c: DecoderConfig, x: jax.Array, rope_of: RopeOf, is_global: bool | jax.Array = True) -> jax.Array:
        """Apply the rotary embedding of a layer at the positions of the tokens."""
        return c.math.rotate(x, self.positions, rope_of, is_global, lambda: self._num_keys)

    def update(self, cache: KVCache, key: jax.Array, value: jax.Array) -> tuple[KVCache, jax.Array, jax.Array]:
        """Write keys and values; return the updated cache, and all cached keys and values in the dtype of ``key``."""
        cache = kv_cache.append(cache, key, value, self.positions, valid=self.valid, layer=self.layer)
        return (cache, *kv_cache.read(cache, key.dtype.name, layer=self.layer))


def make_context(
    c: DecoderConfig,
    tokens: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
    cache: KVCache | None,
) -> AttentionContext:
    """Return the positions and masks of the tokens, without the layer.

    Slot t of a cache holds the token at position t, and a query attends to its own slot and all earlier slots. Later
    slots may hold stale tokens or padding.

    Raises:
      ValueError: a cache is given without positions.
    """
    window = c.sliding_window_size
    if cache is not None:
        if positions is None:
            raise ValueError("a KV cache requires positions; pass an array [batch, tokens] that counts from 0")
        distance = positions[:, None, :, None] - jnp.arange(cache.length)[None, None, None, :]
        mask = distance >= 0
        windowed = mask & (distance < window) if window else None
        return AttentionContext(positions, mask, windowed, None if segment_ids is None else segment_ids != 0)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    windowed = make_mask(c.attention, tokens, segment_ids, window) if window else None
    return AttentionContext(positions, make_mask(c.attention, tokens, segment_ids), windowed)


class SelfAttention(nn.Module):
    """Grouped-query attention over the keys that the context's mask selects for the layer."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        has_bias = c.attention_bias != "none"
        self.query = c.dense((c.num_query_heads, c.head_dim), use_bias=has_bias)
        self.key = c.dense((c.num_kv_heads, c.head_dim), use_bias=has_bias)
        self.value = c.dense((c.num_kv_heads, c.head_dim), use_bias=has_bias)
        self.out = c.dense(c.emb_dim, axis=(-2, -1), use_bias=c.attention_bias == "all")
        self.query_norm, self.key_norm = (c.norm(), c.norm()) if c.use_qk_norm else (None, None)
        zeros = nn.initializers.zeros
        self.sinks = self.param("sinks", zeros, (c.num_query_heads,)) if c.attention_sinks else None

    def __call__(self, x: jax.Array, context: AttentionContext, cache: KVCache | None = None) -> tuple[jax.Array, Any]:
        c = self.config
        is_global = c.is_global(context.layer)
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = (context.rotate(c, each, c.rope, is_global) for each in (query, key))
        if cache is not None:
            cache, key, value = context.update(cache, key, value)
        # Only XLA's attention supports the mask of a cache.
        kind = c.attention if cache is None else "xla"
        scale = c.query_pre_attn_scalar**-0.5 if c.query_pre_attn_scalar else None
        options: Any = {"scale": scale, "soft_cap": c.attn_logits_soft_cap, "sinks": self.sinks}
        mask = context.select_mask(is_global)
        mixed = c.math.attend(query, key, value, mask, kind, c.activation_sharding, **options)
        return self.out(mixed), cache


class LatentAttention(nn.Module):
    """Attention whose keys and values are computed from a latent of ``kv_lora_rank`` numbers per token, as in DeepSeek.

    The last ``rope_head_dim`` numbers of each head's ``head_dim`` are rotated. All heads share the rotated part of a
    key, which is computed from the token directly. A cache stores complete keys and values.
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

    def __call__(self, x: jax.Array, context: AttentionContext, cache: KVCache | None = None) -> tuple[jax.Array, Any]:
        c = self.config
        num_unrotated = c.head_dim - c.rope_head_dim
        query = self.wq_b(self.q_norm(self.wq_a(x))) if c.q_lora_rank else self.query(x)
        latent, rope_key = jnp.split(self.wkv_a(x), [c.kv_lora_rank], axis=-1)
        key, value = jnp.split(self.wkv_b(self.kv_norm(latent)), [num_unrotated], axis=-1)
        rope_of = lambda is_global: Rope(c.rope_theta)  # noqa: E731
        rotated = context.rotate(c, rope_key[:, :, None], rope_of)
        rotated = jnp.broadcast_to(rotated, (*key.shape[:-1], c.rope_head_dim))
        key = jnp.concatenate([key, rotated], axis=-1)
        rotated = context.rotate(c, query[..., num_unrotated:], rope_of)
        query = jnp.concatenate([query[..., :num_unrotated], rotated], axis=-1)
        if cache is not None:
            cache, key, value = context.update(cache, key, value)
        kind = c.attention if cache is None else "xla"
        return self.out(c.math.attend(query, key, value, context.mask, kind, c.activation_sharding)), cache


class Mlp(nn.Module):
    """Gated MLP, ``wo(silu(wi_0(x)) * wi_1(x))`` for SwiGLU, with a width of ``copies * mlp_dim``."""

    config: DecoderConfig
    copies: int = 1

    def setup(self) -> None:
        c, size = self.config, self.copies * self.config.mlp_dim
        self.wi_0, self.wi_1, self.wo = (c.dense(each, use_bias=c.mlp_bias) for each in (size, size, c.emb_dim))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wo(self.config.gate(self.wi_0(x), self.wi_1(x)))


class Experts(nn.Module):
    """MLP of the ``num_experts_per_tok`` experts that a router selects for each token; no token is dropped.

    ``y = Σ_e p_e · wo_e(silu(wi_0_e(x)) * wi_1_e(x))`` over the largest probabilities of ``softmax(gate(x))``; p are
    these probabilities, divided by their sum if ``norm_topk_prob``. The router and the sum run in float32. Rows are
    sorted by expert, and each matrix is one ``jax.lax.ragged_dot``. There is no load-balancing loss.
    """

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.gate = c.float_dense(c.num_experts, "float32", c.mlp_bias)
        make = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)
        inner, outer = (c.num_experts, c.emb_dim, c.mlp_dim), (c.num_experts, c.mlp_dim, c.emb_dim)
        self.wi_0, self.wi_1 = self.param("wi_0", make, inner), self.param("wi_1", make, inner)
        self.wo = self.param("wo", make, outer)
        sizes = {"wi_0_bias": c.mlp_dim, "wi_1_bias": c.mlp_dim, "wo_bias": c.emb_dim} if c.mlp_bias else {}
        zeros = nn.initializers.zeros
        self.biases = [self.param(name, zeros, (c.num_experts, size)) for name, size in sizes.items()] or [None] * 3

    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        tokens = x.reshape(-1, c.emb_dim)
        share, chosen = jax.lax.top_k(c.math.softmax(self.gate(tokens)), c.num_experts_per_tok)
        if c.norm_topk_prob:
            share = c.math.normalize(share)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=c.num_experts).astype(jnp.int32)

        def experts(rows: jax.Array, weights: jax.Array, bias: jax.Array | None) -> jax.Array:
            result = c.math.round(jax.lax.ragged_dot(rows, weights.astype(x.dtype), sizes), x.dtype)
            if bias is None:
                return result
            return c.math.add(result, c.math.round(bias.astype(x.dtype), x.dtype)[chosen.reshape(-1)[order]])

        rows, (inner, other, outer) = tokens[order // c.num_experts_per_tok], self.biases
        gated = c.gate(experts(rows, self.wi_0, inner), experts(rows, self.wi_1, other))
        rows = experts(gated, self.wo, outer)
        rows = rows[jnp.argsort(order)].reshape(*chosen.shape, c.emb_dim).astype(jnp.float32)
        return c.math.round(c.math.sum(rows * share[..., None], 1).astype(x.dtype), x.dtype).reshape(x.shape)


class DecoderLayer(nn.Module):
    """One pre-norm layer; returns its output and the updated cache."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.pre_self_attention_layer_norm = c.norm()
        self.self_attention = LatentAttention(c) if c.kv_lora_rank else SelfAttention(c)
        self.post_self_attention_layer_norm = c.norm()
        self.mlp = Experts(c) if c.num_experts else Mlp(c)
        self.shared_experts = Mlp(c, c.shared_experts) if c.shared_experts else None
        if c.use_post_norms:
            self.self_attention_output_norm, self.mlp_output_norm = c.norm(), c.norm()

    def __call__(self, x: jax.Array, context: AttentionContext, cache: KVCache | None = None) -> tuple[jax.Array, Any]:
        c = self.config
        mixed, cache = self.self_attention(self.pre_self_attention_layer_norm(x), context, cache)
        x = c.math.add(x, self.self_attention_output_norm(mixed) if c.use_post_norms else mixed)
        normal = self.post_self_attention_layer_norm(x)
        result = self.mlp(normal)
        x = c.math.add(x, self.mlp_output_norm(result) if c.use_post_norms else result)
        if self.shared_experts is not None:
            x = c.math.add(x, self.shared_experts(normal))
        return constrain(x, self.config), cache


def constrain(x: jax.Array, config: DecoderConfig) -> jax.Array:
    """Apply the activation sharding of the config."""
    if config.activation_sharding is None:
        return x
    return jax.lax.with_sharding_constraint(x, config.activation_sharding)
