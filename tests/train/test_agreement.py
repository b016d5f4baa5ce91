"""The decoder with exact numerics: the loss of a token has the same bits in every batch, chunk, cache and mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.state import merge
from jaxquant.training.config import TrainConfig
from jaxquant.training.layers import DecoderConfig
from jaxquant.training.model import Decoder, empty_cache
from jaxquant.training.step import Model, make_model

LENGTH, LONGER = 32, 40
EXACT = DecoderConfig(96, 64, 160, 2, 4, 2, 16, numerics="exact")
DECODERS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "unscanned": {"dtype": "bfloat16", "scan_layers": False, "logits_via_embedding": False},
    "remat": {"remat_policy": "quantized", "saved_activations": "fp8"},
    "experts": {"num_experts": 4, "dtype": "bfloat16"},
    "latent": {"kv_lora_rank": 24, "q_lora_rank": 16, "rope_head_dim": 8, "num_kv_heads": 4},
    "gemma": {
        "mlp_activation": "gelu_tanh",
        "use_post_norms": True,
        "scale_embedding": True,
        "use_qk_norm": True,
        "sliding_window_size": 8,
        "global_attention_every": 2,
        "rope_local_theta": 1e4,
        "final_logits_soft_cap": 30.0,
        "attn_logits_soft_cap": 50.0,
        "dtype": "bfloat16",
    },
    "gpt-oss": {
        "attention_bias": "all",
        "mlp_bias": True,
        "attention_sinks": True,
        "mlp_activation": "clipped_swiglu",
        "sliding_window_size": 8,
        "global_attention_every": 2,
        "dtype": "bfloat16",
    },
}


def make(shape: DecoderConfig, **fields) -> tuple[Model, dict, dict]:
    """Return a decoder with random parameters: norms, biases and sinks differ from their initial values."""
    tokens = jnp.zeros((2, LENGTH), jnp.int32)
    model = make_model(TrainConfig(**{"quantization": "int8"} | fields), shape, tokens)
    params, quant_state = model.init(jax.random.key(0))

    def vary(path, x):
        is_matrix = jax.tree_util.keystr(path).split("'")[-2] in ("kernel", "embedding", "wi_0", "wi_1", "wo")
        return x if is_matrix else x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape)

    return model, jax.tree_util.tree_map_with_path(vary, params), quant_state


def draw_texts(vocab_size: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n + 1) for n in (LENGTH, *rng.integers(LENGTH // 3, LENGTH + 1, 7))]


def batch_of(texts: list[np.ndarray], width: int) -> tuple[np.ndarray, ...]:
    """Return inputs, segment ids, positions and targets, padded to a width."""
    inputs, segments, targets = (np.zeros((len(texts), width), np.int32) for _ in range(3))
    for row, text in enumerate(texts):
        size = len(text) - 1
        inputs[row, :size], targets[row, :size], segments[row, :size] = text[:-1], text[1:], 1
    return inputs, segments, np.broadcast_to(np.arange(width, dtype=np.int32), inputs.shape), targets


class Scorer:
    """Scores texts with the training forward pass, or with a cache in chunks."""

    def __init__(self, shape: DecoderConfig, apply):
        self.shape, math = shape, shape.math

        @jax.jit
        def train(params, inputs, segments, positions, targets):
            return apply(params, inputs, segments, positions, targets=targets)

        @jax.jit
        def cached(params, cache, inputs, segments, positions, targets):
            logits, cache = apply(params, inputs, segments, positions, cache=cache)
            return math.token_losses(logits, targets), cache

        self.train, self._cached = train, cached

    def in_chunks(self, params, texts, chunks) -> np.ndarray:
        arrays = batch_of(texts, LONGER)
        cache, found, start = empty_cache(self.shape, len(texts), LONGER), [], 0
        for size in chunks:
            part = [x[:, start : start + size] for x in arrays]
            losses, cache = self._cached(params, cache, *part)
            found.append(np.asarray(losses))
            start += size
        return np.concatenate(found, axis=1)


def count_differences(found: np.ndarray, reference: np.ndarray, texts: list[np.ndarray]) -> int:
    return sum(int((a[: len(t) - 1] != b[: len(t) - 1]).sum()) for a, b, t in zip(found, reference, texts, strict=True))


def compare(shape: DecoderConfig, cases: int = 1, served=False, **fields) -> int:
    """Return the number of tokens whose loss differs from the training forward pass of all texts."""
    model, params, quant_state = make(shape, **fields)
    apply = functools.partial(_apply, model, quant_state)
    scorer, found = Scorer(shape, apply), 0
    if served:
        serving = make_model(
            TrainConfig(quantization="int8", checkpoint_is_quantized=True), shape, jnp.zeros((2, 8), int)
        )
        variables, example = merge(params, quant_state), jnp.zeros((2, 8), int)
        converted = jaxquant.convert(Decoder(shape), variables, {"quantization": "int8"}, example)["params"]
        scorer_of_cache = Scorer(shape, functools.partial(_apply, serving, {}))
    for seed in range(cases):
        texts = draw_texts(shape.vocab_size, seed)
        reference = np.asarray(scorer.train(params, *batch_of(texts, LENGTH)))
        alone, three = texts[seed % 8 : seed % 8 + 1], texts[1:4]
        for some, start in ((alone, seed % 8), (three, 1)):
            rows = reference[start : start + len(some)]
            found += count_differences(np.asarray(scorer.train(params, *batch_of(some, LONGER))), rows, some)
        cached, given = (scorer_of_cache, converted) if served else (scorer, params)
        for chunks in ([8] * 4, [8, *[1] * 24]):
            found += count_differences(cached.in_chunks(given, three, chunks), reference[1:4], three)
    return found


def _apply(model: Model, quant_state, params, *inputs, **given):
    return model.apply(params, quant_state, *inputs, rngs={"quant": jax.random.key(0)}, **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_log_probs_have_the_same_bits(name):
    assert compare(dataclasses.replace(EXACT, **DECODERS[name]), served=name == "bfloat16") == 0


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clipped_swiglu"])
def test_gates_have_the_values_and_the_gradients_of_the_standard_ones(activation):
    inputs = jnp.array([-200.0, -20.0, -10.1, -1.0, 0.0, 1.0, 10.0])
    gate = lambda name: lambda a, b: dataclasses.replace(EXACT, numerics=name).math.gate(activation, a, b)  # noqa: E731
    exact, standard = (
        jax.vmap(jax.value_and_grad(gate(name), (0, 1)))(inputs, inputs) for name in ("exact", "standard")
    )
    for found, want in zip(jax.tree.leaves(exact), jax.tree.leaves(standard), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


def test_a_position_beyond_the_table_gives_nan():
    model, params, quant_state = make(EXACT)
    tokens = jnp.zeros((1, 8), jnp.int32)
    found = _apply(model, quant_state, params, tokens, jnp.ones_like(tokens), jnp.arange(8)[None] + 1)
    assert np.isnan(found[0, -1]).all()


@pytest.mark.slow
def test_standard_numerics_differ():
    assert compare(dataclasses.replace(EXACT, numerics="standard")) > 0


@pytest.mark.slow
def test_the_differentiated_and_the_sharded_forward_pass_have_the_same_bits():
    shape = dataclasses.replace(EXACT, dtype="bfloat16")
    model, params, quant_state = make(shape)
    texts = draw_texts(shape.vocab_size)
    arrays = batch_of(texts, LENGTH)

    def losses(params, *arrays):
        found = _apply(model, quant_state, params, *arrays[:3], targets=arrays[3])
        return (found * arrays[1]).sum(), found

    alone = np.asarray(jax.jit(losses)(params, *arrays)[1])
    step = jax.jit(jax.value_and_grad(losses, has_aux=True))
    np.testing.assert_array_equal(step(params, *arrays)[0][1], alone)
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shard = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))  # noqa: E731
    by_rows = [shard(x, jax.P("data")) for x in arrays]
    first_axis = lambda x: shard(x, jax.P("data") if x.shape[0] % mesh.size == 0 else jax.P())  # noqa: E731
    for sharded in (jax.tree.map(lambda x: shard(x, jax.P()), params), jax.tree.map(first_axis, params)):
        np.testing.assert_array_equal(step(sharded, *by_rows)[0][1], alone)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "cudnn"}, "attention"),
        ({"quantize_kvcache": True}, "quantize_kvcache"),
        ({"quantization": "fp8"}, "layers/self_attention/query has fp8"),
        ({"quant_backend": "aqt"}, "has int8 on backend aqt"),
        ({"quantization": ""}, "layers/self_attention/query has no recipe"),
    ],
)
def test_settings_that_are_not_exact_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        make(EXACT, **{"numerics": "exact"} | fields)
