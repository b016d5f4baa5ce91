"""The decoder of ``train.model`` in plain NNX: the same names, shapes and numbers. It knows nothing of quantization."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxquant.serving.kv_cache import KVCache
from train.model import (
    REMAT_POLICIES,
    Cached,
    DecoderConfig,
    constrain,
    cross_entropy,
    from_chunks,
    head_chunks,
    in_chunks,
    masks,
    mix,
    rotate,
)


def _dense(
    c: DecoderConfig, inputs: int | tuple[int, ...], features: int | tuple[int, ...], rngs: nnx.Rngs
) -> nnx.LinearGeneral:
    axis = (-2, -1) if isinstance(inputs, tuple) else -1
    return nnx.LinearGeneral(
        inputs, features, axis=axis, use_bias=False, dtype=jnp.dtype(c.dtype), param_dtype=jnp.float32, rngs=rngs
    )


def _as_they_are(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Leave a norm's scale in float32 beside bfloat16 activations, as Linen does; NNX by itself rounds it first."""
    return arrays


def _norm(c: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        c.emb_dim,
        epsilon=c.norm_epsilon,
        dtype=jnp.dtype(c.dtype),
        param_dtype=jnp.float32,
        promote_dtype=_as_they_are,
        rngs=rngs,
    )


class SelfAttention(nnx.Module):
    """Grouped-query attention; ``mask`` says where a query may look (``train.model.masks``)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c = self.config = config
        self.query = _dense(c, c.emb_dim, (c.num_query_heads, c.head_dim), rngs)
        self.key = _dense(c, c.emb_dim, (c.num_kv_heads, c.head_dim), rngs)
        self.value = _dense(c, c.emb_dim, (c.num_kv_heads, c.head_dim), rngs)
        self.out = _dense(c, (c.num_query_heads, c.head_dim), c.emb_dim, rngs)

    def __call__(
        self, x: jax.Array, mask: jax.Array, positions: jax.Array, cached: Cached | None = None
    ) -> tuple[jax.Array, Cached | None]:
        query, key, value = self.query(x), self.key(x), self.value(x)
        theta = self.config.rope_theta
        query, key = rotate(query, positions, theta), rotate(key, positions, theta)
        if cached is not None:
            cached, key, value = cached.update(key, value, positions)
        return self.out(mix(self.config, query, key, value, mask, cached)), cached


class Mlp(nnx.Module):
    """SwiGLU: ``wo(silu(wi_0(x)) * wi_1(x))``."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.wi_0 = _dense(config, config.emb_dim, config.mlp_dim, rngs)
        self.wi_1 = _dense(config, config.emb_dim, config.mlp_dim, rngs)
        self.wo = _dense(config, config.mlp_dim, config.emb_dim, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wo(nnx.silu(self.wi_0(x)) * self.wi_1(x))


class DecoderLayer(nnx.Module):
    """One pre-norm layer."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.pre_self_attention_layer_norm = _norm(config, rngs)
        self.self_attention = SelfAttention(config, rngs)
        self.post_self_attention_layer_norm = _norm(config, rngs)
        self.mlp = Mlp(config, rngs)

    def __call__(
        self, x: jax.Array, mask: jax.Array, positions: jax.Array, cached: Cached | None = None
    ) -> tuple[jax.Array, Cached | None]:
        mixed, cached = self.self_attention(self.pre_self_attention_layer_norm(x), mask, positions, cached)
        x = x + mixed
        x = x + self.mlp(self.post_self_attention_layer_norm(x))
        return constrain(x, self.config), cached


class Decoder(nnx.Module):
    """Tokens to logits (float32), as ``train.model.Decoder``."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c = self.config = config
        dtype = jnp.dtype(c.dtype)
        self.token_embedder = nnx.Embed(c.vocab_size, c.emb_dim, dtype=dtype, param_dtype=jnp.float32, rngs=rngs)
        if c.scan_layers:
            make = nnx.vmap(lambda rngs: DecoderLayer(c, rngs), in_axes=0, out_axes=0)
            self.layers = make(rngs.split(c.num_layers))
        else:
            for index in range(c.num_layers):
                setattr(self, f"layers_{index}", DecoderLayer(c, rngs))
        self.decoder_norm = _norm(c, rngs)
        if not c.logits_via_embedding:
            self.logits_dense = _dense(c, c.emb_dim, c.vocab_size, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: KVCache | None = None,
        targets: jax.Array | None = None,
    ) -> Any:
        c = self.config
        mask, positions, valid = masks(c, tokens, segment_ids, positions, cache)
        x = constrain(self.token_embedder(tokens), c)
        x, cache = self._layers(x, mask, positions, cache, valid)
        x = self.decoder_norm(x)
        if targets is not None:
            return self._losses(x, targets)
        logits = self._logits(x).astype(jnp.float32)
        return logits if cache is None else (logits, cache)

    def _logits(self, x: jax.Array) -> jax.Array:
        return self.token_embedder.attend(x) if self.config.logits_via_embedding else self.logits_dense(x)

    def _losses(self, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Return each token's loss, from logits that are made piece by piece, again in the backward pass."""
        n = head_chunks(self.config, x.shape[1])
        if n == 1:
            return cross_entropy(self._logits(x), targets)
        graph, state = nnx.split(self)

        def piece(state: Any, item: tuple[jax.Array, jax.Array]) -> jax.Array:
            return cross_entropy(nnx.merge(graph, state)._logits(item[0]), item[1])

        step = jax.checkpoint(piece, prevent_cse=False)
        items = in_chunks(x, n), in_chunks(targets, n)
        return from_chunks(jax.lax.scan(lambda _, item: (None, step(state, item)), None, items)[1])

    def _layers(
        self, x: jax.Array, mask: jax.Array, positions: jax.Array, cache: KVCache | None, valid: jax.Array | None
    ) -> tuple[jax.Array, KVCache | None]:
        c = self.config

        def body(graph: Any, carry: Any, state: Any, index: Any) -> Any:
            x, cache = carry
            cached = None if cache is None else Cached(cache, valid, index)
            x, cached = nnx.merge(graph, state)(x, mask, positions, cached)
            return x, None if cached is None else cached.cache

        def run(layer: Any, carry: Any, index: Any, scan: bool) -> Any:
            graph, state = nnx.split(layer)
            step = functools.partial(body, graph)
            if c.remat_policy != "none" and cache is None:
                step = jax.checkpoint(step, policy=REMAT_POLICIES[c.remat_policy], prevent_cse=not scan)
            if not scan:
                return step(carry, state, index)
            # The cache is carried, and not scanned over: a layer then writes its few tokens in place.
            return jax.lax.scan(lambda carry, item: (step(carry, *item), None), carry, (state, index))[0]

        if c.scan_layers:
            return run(self.layers, (x, cache), jnp.arange(c.num_layers), scan=True)
        carry = x, cache
        for index in range(c.num_layers):
            carry = run(getattr(self, f"layers_{index}"), carry, index, scan=False)
        return carry
