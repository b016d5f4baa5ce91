"""A small decoder language model, and the distance of its quantized twin from it.

Its shapes are those of the published measurements that the bands reproduce: no activation has a kernel's shape. Its
initial values are MaxText's: kernels truncated normal with variance 1 / fan-in, the query divided by the square root of
the head's width, embeddings of unit variance. So is its compute dtype, bfloat16, whose own rounding is part of the
published int8 logits (.0143 in float32, .0172 in bfloat16), and so is the pooling of the layers in an average over
parameters: MaxText scans its layers, so that each parameter is one tensor for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxquant.state import frozen

LAYERS, EMBED, MLP, HEADS, HEAD_DIM, VOCAB = 2, 48, 96, 3, 16, 128
BATCH, SEQUENCE = 3, 40
_fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def _query_init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    return _kernel_init(key, shape, dtype) / HEAD_DIM**0.5


def _kernel_init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """DenseGeneral hands over the kernel flattened to two axes."""
    return _fan_in(key, shape, dtype)


def _rope(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class Attention(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def project(name: str, init: Any = _kernel_init) -> jax.Array:
            return nn.DenseGeneral((HEADS, HEAD_DIM), use_bias=False, kernel_init=init, dtype=self.dtype, name=name)(x)

        query, key, value = _rope(project("query", _query_init)), _rope(project("key")), project("value")
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(self.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(
            EMBED, axis=(-2, -1), use_bias=False, kernel_init=_kernel_init, dtype=self.dtype, name="out"
        )(mixed)


class Layer(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(name: str, features: int, y: jax.Array) -> jax.Array:
            return nn.Dense(features, use_bias=False, kernel_init=_kernel_init, dtype=self.dtype, name=name)(y)

        x = x + Attention(self.dtype, name="attention")(nn.RMSNorm(dtype=self.dtype, name="attention_norm")(x))
        y = nn.RMSNorm(dtype=self.dtype, name="mlp_norm")(x)
        return x + dense("wo", EMBED, nn.silu(dense("wi_0", MLP, y)) * dense("wi_1", MLP, y))


class Decoder(nn.Module):
    """Tokens to logits.

    Attributes:
      dtype: compute dtype; parameters are float32.
    """

    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed_init = nn.initializers.normal(1.0)
        x = nn.Embed(VOCAB, EMBED, embedding_init=embed_init, dtype=self.dtype, name="token_embedder")(tokens)
        for layer in range(LAYERS):
            x = Layer(self.dtype, name=f"layers_{layer}")(x)
        x = nn.RMSNorm(dtype=self.dtype, name="decoder_norm")(x)
        return nn.Dense(VOCAB, use_bias=False, kernel_init=_kernel_init, dtype=self.dtype, name="logits_dense")(x)


def tokens(seed: int = 0) -> jax.Array:
    """One batch of random tokens."""
    return jax.random.randint(jax.random.key(seed), (BATCH, SEQUENCE), 0, VOCAB)


def relative(value: jax.Array, reference: jax.Array) -> jax.Array:
    """Give mean |value − reference| / mean |reference|."""
    return jnp.mean(jnp.abs(value - reference)) / jnp.mean(jnp.abs(reference))


def _outputs(model: nn.Module) -> Any:
    """Give a function of (variables, tokens, key): the logits, and the gradient of mean(logits²) by parameter."""

    @jax.jit
    def run(variables: Any, batch: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = model.apply(variables | {"params": params}, batch, rngs={"quant": key})
            return jnp.mean(jnp.square(logits.astype(jnp.float32))), logits

        with frozen():  # one gradient, after which nothing advances
            (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        return logits, _pooled(grads)

    return run


def _pooled(grads: dict[str, Any]) -> dict[str, Any]:
    """Stack each parameter's layers into one tensor."""
    layers = [grads[f"layers_{layer}"] for layer in range(LAYERS)]
    rest = {name: value for name, value in grads.items() if not name.startswith("layers_")}
    return rest | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


_outputs_of_float = functools.cache(_outputs)


@functools.cache
def _initial_float(model: nn.Module, seed: int) -> Any:
    return jax.jit(model.init)(jax.random.key(seed), tokens(seed))


def measure(model_float: nn.Module, model_quant: nn.Module, seeds: Iterable[int] = (0, 1)) -> tuple[float, float]:
    """Compare a decoder with its quantized twin on the same parameters.

    Args:
      seeds: of parameters, tokens and rounding; the distances are averaged over them.

    Returns:
      (logits, grad_mean): ``relative`` of the logits, and its mean over the parameters' gradients.
    """
    run, run_float = _outputs(model_quant), _outputs_of_float(model_float)
    found = []
    for seed in seeds:
        batch, key = tokens(seed), jax.random.key(seed)
        variables = _initial_float(model_float, seed)
        if len(jax.eval_shape(model_quant.init, key, batch)) > 1:  # quant state beside the parameters
            variables = jax.jit(model_quant.init)(key, batch) | variables
        logits, grads = run(variables, batch, key)
        logits_float, grads_float = run_float({"params": variables["params"]}, batch, key)
        distances = jax.tree.leaves(jax.tree.map(relative, grads, grads_float))
        found.append((relative(logits, logits_float), jnp.mean(jnp.stack(distances))))
    logits_mean, grad_mean = jnp.mean(jnp.asarray(found), axis=0)
    return float(logits_mean), float(grad_mean)
