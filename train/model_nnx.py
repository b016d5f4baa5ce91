"""The decoder of ``train.model`` in plain NNX: the same names, shapes and numbers. It knows nothing of quantization."""

from __future__ import annotations

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jaxquant.ops.residuals import compress_residuals
from train import model
from train.model import REMAT_POLICIES, DecoderConfig


def _forward(module: type[nn.Module]) -> Any:
    """Return the forward pass of a Linen module without what Linen wraps around it: it runs on NNX's layers too."""
    return inspect.unwrap(module.__call__)


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


class CompressedNorm(nnx.RMSNorm):
    """``train.model.CompressedNorm``."""

    def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        graph, state = nnx.split(self)
        plain = nnx.RMSNorm.__call__
        return compress_residuals(lambda x, state: plain(nnx.merge(graph, state), x))(x, state)


def _norm(c: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return (CompressedNorm if c.saved_activations == "fp8" else nnx.RMSNorm)(
        c.emb_dim,
        epsilon=c.norm_epsilon,
        dtype=jnp.dtype(c.dtype),
        param_dtype=jnp.float32,
        promote_dtype=_as_they_are,
        rngs=rngs,
    )


class SelfAttention(nnx.Module):
    """``train.model.SelfAttention``."""

    __call__ = _forward(model.SelfAttention)

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c = self.config = config
        self.query = _dense(c, c.emb_dim, (c.num_query_heads, c.head_dim), rngs)
        self.key = _dense(c, c.emb_dim, (c.num_kv_heads, c.head_dim), rngs)
        self.value = _dense(c, c.emb_dim, (c.num_kv_heads, c.head_dim), rngs)
        self.out = _dense(c, (c.num_query_heads, c.head_dim), c.emb_dim, rngs)


class Mlp(nnx.Module):
    """``train.model.Mlp``."""

    __call__ = _forward(model.Mlp)

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.wi_0 = _dense(config, config.emb_dim, config.mlp_dim, rngs)
        self.wi_1 = _dense(config, config.emb_dim, config.mlp_dim, rngs)
        self.wo = _dense(config, config.mlp_dim, config.emb_dim, rngs)


class DecoderLayer(nnx.Module):
    """``train.model.DecoderLayer``."""

    __call__ = _forward(model.DecoderLayer)

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.pre_self_attention_layer_norm = _norm(config, rngs)
        self.self_attention = SelfAttention(config, rngs)
        self.post_self_attention_layer_norm = _norm(config, rngs)
        self.mlp, self.shared_experts = Mlp(config, rngs), None


class Decoder(nnx.Module):
    """``train.model.Decoder``."""

    __call__ = _forward(model.Decoder)

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

    def run_layers(self, layer: Any, carry: Any) -> Any:
        c = self.config

        def run(module: nnx.Module, carry: Any, index: Any, scan: bool) -> Any:
            graph, state = nnx.split(module)
            step = lambda carry, state, index: layer(nnx.merge(graph, state), carry, index)  # noqa: E731
            if c.remat_policy != "none" and carry[1] is None:
                step = jax.checkpoint(step, policy=REMAT_POLICIES[c.remat_policy], prevent_cse=not scan)
            if not scan:
                return step(carry, state, index)
            return jax.lax.scan(lambda carry, item: (step(carry, *item), None), carry, (state, index))[0]

        if c.scan_layers:
            return run(self.layers, carry, jnp.arange(c.num_layers), scan=True)
        for index in range(c.num_layers):
            carry = run(getattr(self, f"layers_{index}"), carry, index, scan=False)
        return carry

    def run_pieces(self, piece: Any, head: nnx.Module, items: Any) -> jax.Array:
        graph, state = nnx.split(head)
        step = jax.checkpoint(lambda state, item: piece(nnx.merge(graph, state), item), prevent_cse=False)
        return jax.lax.scan(lambda _, item: (None, step(state, item)), None, items)[1]
