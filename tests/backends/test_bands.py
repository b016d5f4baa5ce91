"""Distance of a quantized decoder from its float twin, compared with the bands that MaxText measured.

int8 runs on Qwix, as in the measurement; the other strings run on native. ``tests/twins`` compares native with AQT,
Qwix and flax.

The decoder's shapes are the shapes of the published measurements: no activation has the shape of a kernel. Its initial
values are MaxText's: truncated normal kernels with variance 1 / fan-in, the query divided by the square root of the
head's width, embeddings with variance 1. The compute dtype is MaxText's, too: bfloat16, whose rounding is part of the
published int8 logits (0.0143 in float32, 0.0172 in bfloat16). Averages over parameters pool the layers, because MaxText
scans its layers and each parameter is one tensor for all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxquant
from jaxquant.state import frozen, merge, split
from tests.gallery.rows import unseen
from tests.numerics import BAND_RTOL

LAYERS, EMBED, MLP, HEADS, HEAD_DIM, VOCAB = 2, 48, 96, 3, 16, 128
BATCH, SEQUENCE, DTYPE = 3, 40, jnp.bfloat16
FAN_IN = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
layer_of = functools.partial(nn.DenseGeneral, use_bias=False, kernel_init=FAN_IN, dtype=DTYPE)


def query_init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    return FAN_IN(key, shape, dtype) / HEAD_DIM**0.5


def rope(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        project = functools.partial(layer_of, (HEADS, HEAD_DIM))
        query, key = rope(project(kernel_init=query_init, name="query")(x)), rope(project(name="key")(x))
        value = project(name="value")(x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(DTYPE)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return layer_of(EMBED, axis=(-2, -1), name="out")(mixed)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + Attention(name="attention")(nn.RMSNorm(dtype=DTYPE, name="attention_norm")(x))
        y = nn.RMSNorm(dtype=DTYPE, name="mlp_norm")(x)
        gated = nn.silu(layer_of(MLP, name="wi_0")(y)) * layer_of(MLP, name="wi_1")(y)
        return x + layer_of(EMBED, name="wo")(gated)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed_init = nn.initializers.normal(1.0)
        x = nn.Embed(VOCAB, EMBED, embedding_init=embed_init, dtype=DTYPE, name="token_embedder")(tokens)
        for layer in range(LAYERS):
            x = Layer(name=f"layers_{layer}")(x)
        x = nn.RMSNorm(dtype=DTYPE, name="decoder_norm")(x)
        return layer_of(VOCAB, name="logits_dense")(x)


SEEDS = (0, 1)
"""Seeds of parameters, tokens and rounding; the distances are averages over these seeds."""
TOKENS = [jax.random.randint(jax.random.key(seed), (BATCH, SEQUENCE), 0, VOCAB) for seed in SEEDS]


KEYS = [jax.random.key(seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def params() -> list[Any]:
    init = jax.jit(Decoder().init)
    return [init(key, batch)["params"] for key, batch in zip(KEYS, TOKENS, strict=True)]


def outputs(model: Any, params: list[Any]) -> list[Any]:
    """Return the logits of each seed, and the gradient of mean(logits²) by parameter, with the layers stacked."""
    quant_state = unseen(split(jax.eval_shape(model.init, KEYS[0], TOKENS[0]))[1])

    @jax.jit
    def run(params: Any, batch: jax.Array, key: jax.Array) -> Any:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = model.apply(merge(params, quant_state), batch, rngs={"quant": key})
            return jnp.mean(jnp.square(logits.astype(jnp.float32))), logits

        with frozen():  # only one gradient, so the state need not advance
            (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
        layers = [grads.pop(f"layers_{layer}") for layer in range(LAYERS)]
        return logits, grads | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}

    return [run(*each) for each in zip(params, TOKENS, KEYS, strict=True)]


@pytest.fixture(scope="module")
def floats(params: list[Any]) -> list[Any]:
    return outputs(Decoder(), params)


def distance(value: jax.Array, reference: jax.Array) -> jax.Array:
    return jnp.mean(jnp.abs(value - reference)) / jnp.mean(jnp.abs(reference))


CLIPPED = {"weight_quantization_calibration_method": "absmax,0.5"}


@pytest.mark.parametrize(
    ("string", "backend", "options", "logits", "gradients"),
    [
        ("int8", "qwix", {}, 0.0176, 0.0285),
        ("fp8", "native", {}, 0.0603, 0.1181),
        ("fp8_full", "native", CLIPPED, 0.479, 0.706),
        ("int4", "native", {}, 0.2346, 0.3699),
    ],
)
def test_band(string, backend, options, logits, gradients, params, floats):
    config = {"quantization": string, "quant_backend": backend} | options
    found = outputs(jaxquant.maybe_quantize_model(Decoder(), config, TOKENS[0]), params)
    both = [jax.tree.map(distance, *pair) for pair in zip(found, floats, strict=True)]
    means = [(each[0], jnp.mean(jnp.stack(jax.tree.leaves(each[1])))) for each in both]
    assert jnp.mean(jnp.asarray(means), 0).tolist() == pytest.approx([logits, gradients], rel=BAND_RTOL)
