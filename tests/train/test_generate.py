"""The serving engine: every prompt has the same answer as without other prompts; refusals, stops, sampling."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.training.generate import Engine, Prompt, Sampling, choose, sample
from jaxquant.training.serving import Served, open_served
from tests.numerics import CACHED_LOGITS

NEW = 9
LIMIT = 31  # the tiny run's sequence_length is 32


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return 24 lines of mixed length; one is empty and one is too long."""
    rng = np.random.default_rng(0)
    lines = ["item " + "".join(rng.choice(list("0123456789 of"), size)) for size in rng.integers(0, 25, 24)]
    lines[0], lines[6] = "", "y" * (LIMIT - 1)
    lines[5] = "x" * LIMIT  # with the beginning-of-document token, one token too many
    return lines


@pytest.fixture(scope="module")
def served(finished):
    """Return (quantization, kv cache) -> the unquantized run, served with this quantization and this cache."""

    def get(quantization: str, kv: str) -> Served:
        fields = {"quantization": quantization}
        if quantization:
            fields["quant_backend"] = "native"
        cache = {"quantize_kvcache": True, "kv_quant_dtype": kv, "kv_quant_axis": "dkv"} if kv else {}
        return open_served(finished(""), fields | cache)

    return get


@pytest.mark.parametrize(("quantization", "kv"), [("int8", "int4"), ("fp8_current", "fp8")])
def test_prompts_are_answered_as_alone(served, texts, quantization, kv):
    model = served(quantization, kv)
    engine = model.engine(slots=5, prefill_chunk=8)
    prompts = model.prompts(texts, [f"line {number}" for number in range(1, len(texts) + 1)])
    streamed: dict[int, list[int]] = {}
    finished_places = []
    completions = engine.generate(
        prompts,
        NEW,
        lambda place, token: streamed.setdefault(place, []).append(token),
        lambda place, completion: finished_places.append(place),
    )
    assert sorted(finished_places) == list(range(len(texts)))
    assert {place: each.message for place, each in enumerate(completions) if each.stopped == "refused"} == {
        0: "line 1 is empty; provide at least one token",
        5: "line 6 has 32 tokens, but the limit is 31; shorten it or raise max_length",
    }
    for place, completion in enumerate(completions):
        if completion.stopped != "refused":
            assert list(completion.tokens) == streamed[place]
            assert engine.generate([prompts[place]], NEW) == [completion], f"prompt {place} is answered otherwise alone"
            assert len(completion.tokens) == min(NEW, 32 - len(prompts[place].tokens))
    assert len({completion.tokens for completion in completions}) > 5, "the answers are all alike and tell nothing"


@pytest.mark.parametrize("quantization", ["", "int8"])
def test_greedy_tokens_are_those_of_the_whole_text_without_a_cache(served, texts, quantization):
    """Because of causality, one pass over the full text computes the logits of all its prefixes."""
    model = served(quantization, "")
    completions = model.engine(slots=4, prefill_chunk=8).generate(model.prompts(texts, texts), NEW)
    answered = [completion for completion in completions if completion.tokens]
    rows = np.zeros((len(answered), 32), np.int32)
    for row, completion in zip(rows, answered, strict=True):
        text = [*completion.prompt.tokens, *completion.tokens]
        row[: len(text)] = text
    rngs = {"quant": jax.random.key(0)}
    logits = np.asarray(jax.jit(lambda x: model.model.apply(model.params, model.quant_state, x, rngs=rngs))(rows))
    chosen_best, total = 0, 0
    for row, completion in zip(logits, answered, strict=True):
        first = len(completion.prompt.tokens) - 1
        for at, token in enumerate(completion.tokens, first):
            bound = 2 * CACHED_LOGITS[quantization] * np.abs(row[at]).max()
            assert row[at].max() - row[at, token] <= bound
            chosen_best += int(row[at].argmax() == token)
            total += 1
    assert total > 150
    assert chosen_best == total if not quantization else chosen_best > 0.98 * total


@pytest.mark.slow
def test_draws_depend_on_the_prompts_number_and_not_on_the_batch(served, texts):
    model = served("", "int8")
    prompts = [p for p in model.prompts(texts, texts) if 0 < len(p.tokens) <= LIMIT][:6]
    drawn = {}
    for seed in (1, 2):
        engine = model.engine(slots=3, prefill_chunk=8, sampling=Sampling(1.0, 0.9, seed))
        drawn[seed] = engine.generate(prompts, NEW)
        for prompt, completion in list(zip(prompts, drawn[seed], strict=True))[::3]:
            assert engine.generate([prompt], NEW) == [completion]
    assert [c.tokens for c in drawn[1]] != [c.tokens for c in drawn[2]]
    again = [dataclasses.replace(prompts[0], number=number) for number in range(4)]
    assert len({c.tokens for c in engine.generate(again, NEW)}) > 1


def test_a_text_ends_at_the_limit_at_the_caches_end_and_at_the_documents_end(served):
    model = served("", "")
    engine = model.engine(slots=2, prefill_chunk=8)
    short, long = model.prompts(["item 3", "z" * (LIMIT - 1)], ["short", "long"])
    [greedy, at_end] = engine.generate([short, long], NEW)
    assert (greedy.stopped, len(greedy.tokens)) == ("max_new_tokens", NEW)
    assert (at_end.stopped, len(at_end.tokens)) == ("cache_end", 1)
    end = greedy.tokens[3]
    parts = model.model, model.params, model.quant_state, model.shape
    ending = Engine(*parts, max_length=32, slots=2, prefill_chunk=8, end_tokens=(end,))
    [ended] = ending.generate([short], NEW)
    assert ended.stopped == "document_end"
    assert ended.tokens == greedy.tokens[: greedy.tokens.index(end)]
    assert engine.generate([], NEW) == []


@pytest.mark.slow
def test_another_chunk_size_and_number_of_slots_answer_alike(served, texts):
    model = served("", "int8")
    prompts = model.prompts(texts[:12], texts[:12])
    expected = model.engine(slots=8, prefill_chunk=8).generate(prompts, NEW)
    assert len({completion.tokens for completion in expected}) > 3
    for slots, chunk in ((1, 32), (3, 5)):
        assert model.engine(slots=slots, prefill_chunk=chunk).generate(prompts, NEW) == expected


def test_sampling_draws_from_the_nucleus_alone():
    probabilities = jnp.asarray([0.1, 0.5, 0.05, 0.3, 0.05])
    keys = jax.random.split(jax.random.key(0), 2000)

    def drawn(**fields) -> np.ndarray:
        draw = jax.jit(jax.vmap(lambda key: sample(jnp.log(probabilities), key, Sampling(**fields))))
        return np.bincount(np.asarray(draw(keys)), minlength=5) / len(keys)

    np.testing.assert_array_equal(drawn(), [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(drawn(temperature=1.0, top_p=0.4), [0, 1, 0, 0, 0])
    assert set(np.flatnonzero(drawn(temperature=1.0, top_p=0.7))) == {1, 3}
    assert set(np.flatnonzero(drawn(temperature=1.0, top_p=0.85))) == {0, 1, 3}
    # Five standard deviations of a share p of 2000 draws are at most 5 · sqrt(0.25 / 2000) = 0.056.
    np.testing.assert_allclose(drawn(temperature=1.0), probabilities, atol=0.056)
    squared = probabilities**2 / (probabilities**2).sum()
    np.testing.assert_allclose(drawn(temperature=0.5), squared, atol=0.056)
    np.testing.assert_array_equal(drawn(temperature=1.0, top_p=1e-9), [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(drawn(temperature=1e-45), [0, 1, 0, 0, 0])


def test_the_nucleus_of_a_row_does_not_depend_on_other_rows():
    logits, numbers = jax.random.normal(jax.random.key(0), (32, 1000)) * 2, jnp.arange(32)
    before = jax.jit(jax.vmap(lambda x: jnp.cumsum(jax.nn.softmax(x)) - jax.nn.softmax(x)))
    ordered = jnp.sort(logits, descending=True)
    row = int((differs := before(ordered) != jnp.concatenate([before(x[None]) for x in ordered])).any(-1).argmax())
    for limit in before(ordered)[row][differs[row]][:3]:  # the last bit of a float sum would select the nucleus
        for top_p in (float(limit), float(np.nextafter(limit, np.float32(1)))):
            draw = jax.jit(functools.partial(choose, sampling=Sampling(1.0, top_p)))
            for at in range(20):
                chosen = draw(logits, numbers, jnp.full(32, at))[row : row + 1]
                own = draw(logits[row : row + 1], numbers[row : row + 1], jnp.full(1, at))
                np.testing.assert_array_equal(own, chosen)


def test_what_does_not_fit_is_refused(served, finished):
    engine = served("", "").engine(slots=2)
    outside = np.zeros(2, np.int32), np.asarray([0, 32], np.int32), np.asarray([True, True]), np.zeros(2, np.int32)
    for call, message in (
        (lambda: Sampling(temperature=float("nan")), "temperature nan must not be negative"),
        (lambda: Sampling(seed=-1), "seed -1 must be between"),
        (lambda: served("", "").engine(slots=0), "slots 0 must be at least 1"),
        (lambda: served("", "").engine(max_length=1), "max_length 1 must be at least 2"),
        (lambda: engine.generate([Prompt([1], "prompt 1")], 0), "max_new_tokens 0 must be at least 1"),
        (lambda: engine.decode(engine.empty(), *outside), "are outside of a cache with max_length 32"),
        (lambda: open_served(finished(""), {"mlp_dim": 16}), r"its configuration requires this array with mlp_dim$"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
