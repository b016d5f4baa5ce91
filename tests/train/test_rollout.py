"""Rollouts: the engine's tokens, log-probabilities of a pass over the whole text, stops, and one compilation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.training.generate import Engine, Prompt, Sampling
from jaxquant.training.rollout import Rollout, make_rollout, pad_prompts
from tests.numerics import CACHED_LOGITS
from tests.train.decoder import SHAPE, made

NEW, PADDED = 6, 8
PROMPTS = [np.random.default_rng(0).integers(0, 64, size).tolist() for size in (3, 7, 1, 5)]
NUMBERS = np.asarray([0, 1, 2, 7], np.int32)
DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=1)


def roll(run, variables, rows=slice(None), padded=PADDED) -> Rollout:
    return jax.tree.map(np.asarray, run(*variables, *pad_prompts(PROMPTS[rows], padded), NUMBERS[rows]))


def full_pass(model, shape, variables, texts: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities of all tokens but the first, and the logits, without a cache."""

    @jax.jit
    def run(tokens, lengths):
        segments = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
        logits = model.apply(*variables, tokens, segments, None, rngs={"quant": jax.random.key(0)})
        return -shape.math.token_losses(logits[:, :-1], tokens[:, 1:]), logits

    return jax.tree.map(np.asarray, run(texts.tokens, texts.lengths))


@pytest.fixture(scope="module")
def decoder():
    """Return an unquantized decoder, its variables, and its drawn rollout."""
    model = made(SHAPE, quantization="")
    variables = jax.jit(model.init)(jax.random.key(0))
    run = make_rollout(model, SHAPE, new_tokens=NEW, sampling=DRAWN, end_tokens=())
    return model, variables, run


def test_the_layout_holds_each_prompt_and_its_new_tokens(decoder):
    _, variables, run = decoder
    texts = roll(run, variables)
    for row, prompt in enumerate(PROMPTS):
        end = len(prompt) + NEW
        assert texts.lengths[row] == end
        assert texts.tokens[row, : len(prompt)].tolist() == prompt
        assert texts.is_new[row].tolist() == [len(prompt) <= at < end for at in range(PADDED + NEW)]
        assert not texts.tokens[row, end:].any()
    assert (texts.log_probs[~texts.is_new] == 0).all()
    assert (texts.log_probs[texts.is_new] < 0).all()


def test_log_probabilities_are_those_of_a_pass_over_the_whole_text(decoder):
    model, variables, run = decoder
    texts = roll(run, variables)
    expected, logits = full_pass(model, SHAPE, variables, texts)
    # Logits that differ by d change a log-probability by at most 2 d: by d themselves, and by d in the normalizer.
    bound = 2 * CACHED_LOGITS[""] * np.abs(logits).max()
    is_new = texts.is_new[:, 1:]
    np.testing.assert_allclose(texts.log_probs[:, 1:][is_new], expected[is_new], rtol=0, atol=bound)
    alone = roll(run, variables, rows=slice(2, 3), padded=1)
    np.testing.assert_array_equal(alone.tokens[alone.is_new], texts.tokens[2][texts.is_new[2]])
    np.testing.assert_allclose(alone.log_probs[alone.is_new], texts.log_probs[2][texts.is_new[2]], rtol=0, atol=bound)


def test_other_parameters_are_not_compiled_again(decoder):
    model, variables, run = decoder
    before, count = roll(run, variables), run._cache_size()
    others = jax.jit(model.init)(jax.random.key(1))
    assert (roll(run, others).tokens != before.tokens).any()
    assert run._cache_size() == count


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_tokens_are_those_of_the_engine_which_prefills_one_prompt_at_a_time(sampling):
    model = made(SHAPE, quantization="int8", quant_backend="native")
    variables = jax.jit(model.init)(jax.random.key(0))
    engine = Engine(model, *variables, SHAPE, max_length=PADDED + NEW, slots=2, prefill_chunk=4, sampling=sampling)
    prompts = [Prompt(tokens, "", number) for tokens, number in zip(PROMPTS, NUMBERS.tolist(), strict=True)]
    expected = [completion.tokens for completion in engine.generate(prompts, NEW)]
    end = expected[0][2]
    texts = roll(make_rollout(model, SHAPE, new_tokens=NEW, sampling=sampling, end_tokens=(end,)), variables)
    assert texts.lengths[0] < len(PROMPTS[0]) + NEW
    for tokens, is_new, whole in zip(texts.tokens, texts.is_new, expected, strict=True):
        stop = whole.index(end) + 1 if end in whole else NEW  # a rollout keeps the token that ends a text
        assert tuple(tokens[is_new]) == whole[:stop]


@pytest.mark.slow
def test_exact_numerics_give_the_bits_of_the_whole_text():
    shape = dataclasses.replace(SHAPE, numerics="exact")
    model = made(shape, quantization="int8", quant_backend="native")
    variables = jax.jit(model.init)(jax.random.key(0))
    texts = roll(make_rollout(model, shape, new_tokens=NEW, sampling=Sampling(1.0), end_tokens=()), variables)
    expected, _ = full_pass(model, shape, variables, texts)
    is_new = texts.is_new[:, 1:]
    np.testing.assert_array_equal(texts.log_probs[:, 1:][is_new], expected[is_new])


def test_prompts_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="prompt 1 has 0 tokens; provide between 1 and 4"):
        pad_prompts([[1], []], 4)
    with pytest.raises(ValueError, match="prompt 0 has 5 tokens; provide between 1 and 4"):
        pad_prompts([[1] * 5], 4)


def test_no_new_tokens_are_refused(decoder):
    with pytest.raises(ValueError, match="new_tokens 0 must be at least 1"):
        make_rollout(decoder[0], SHAPE, new_tokens=0, sampling=DRAWN, end_tokens=())
