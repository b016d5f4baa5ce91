"""Text generation: prefill a prompt in chunks, insert it into a slot, decode all slots together, one token per step.

There are three programs with static shapes, so nothing is compiled again for other prompts. The completion of a prompt
depends on the prompt, its number, the sampling, the seed and ``prefill_chunk``, but not on the prompts in other slots:

* A prompt is prefilled separately, in chunks of one size. The last chunk is padded with copies of its last token. These
  copies are not written to the cache and do not change a per-tensor scale.
* ``run_rows`` maps a function of one row over the slots, so a dynamic per-tensor scale covers one token in decoding. In
  a prefill, the scale covers a chunk. Such scales occur with ``fp8_current``, NVFP4, ``aqt_fp8_full`` without bounds,
  and delayed scaling before the first step. With these recipes, another ``prefill_chunk`` may change the completion,
  and the cache may differ slightly from the cache of one pass over the whole text. All other recipes have scales per
  token, or static scales.

The random key depends on the prompt's number and on the position. A finished slot is reused for the next prompt.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import exact
from jaxquant.core.typed import check_fields
from jaxquant.serving.kv_cache import KVCache
from jaxquant.training.layers import DecoderConfig
from jaxquant.training.model import empty_cache
from jaxquant.training.step import Model


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes:
      tokens: tokens of the prompt, after the beginning-of-document token if the tokenizer has one; empty for an empty
        text.
      name: name in error messages, such as "prompt 3" or "prompts.txt line 7".
      number: index of the random stream; two prompts with the same number and tokens get the same samples.
    """

    tokens: Sequence[int] | np.ndarray
    name: str
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """Result of a prompt.

    Attributes:
      prompt: prompt that was continued.
      tokens: new tokens, without the end of the document.
      stopped: reason for the end: ``max_new_tokens``, ``cache_end``, ``document_end`` or ``refused``.
      message: reason why the prompt was refused, as one sentence; otherwise "".
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    stopped: Literal["max_new_tokens", "cache_end", "document_end", "refused"]
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Method of choosing a token from logits.

    Attributes:
      temperature: 0 selects the most likely token; otherwise the logits are divided by the temperature and a token is
        sampled.
      top_p: sample from the smallest set of most likely tokens that reaches this share of the probability.
      seed: seed of the samples.

    Raises:
      ValueError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not (0 <= self.temperature < float("inf")):
            raise ValueError(f"temperature {self.temperature} must not be negative; 0 selects the most likely token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be above 0 and at most 1; 1 samples from all tokens")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed {self.seed} must be between 0 and 4294967295")


def sample(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Choose a token from logits [V].

    Args:
      logits: logits of one position.
      key: random key; unused if the temperature is 0.
      sampling: temperature and top_p.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    # Subtract the maximum, and raise the temperature to a normal float32 number: a tiny temperature then selects the
    # most likely token, and nothing overflows.
    logits = logits.astype(jnp.float32)
    logits = (logits - logits.max()) / max(sampling.temperature, float(jnp.finfo(jnp.float32).tiny))
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, descending=True)
        # A sum of integers has the same bits in every batch.
        shares = jnp.round(exact.softmax(ordered) * 2**30).astype(jnp.int32)
        # Keep the most likely token, even if a small top_p rounds to 0.
        kept = (jnp.cumsum(shares) - shares < round(sampling.top_p * 2**30)).at[0].set(True)
        logits = jnp.where(logits >= jnp.where(kept, ordered, jnp.inf).min(), logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def choose(logits: jax.Array, numbers: jax.Array, positions: jax.Array, sampling: Sampling) -> jax.Array:
    """Choose the next token of each row.

    Args:
      logits: logits [rows, V].
      numbers: [rows] int32, numbers of the prompts.
      positions: [rows] int32, positions of the next tokens. The random key depends on the number and the position.
      sampling: method of choosing tokens, with the seed.
    """

    def choose_one(logits: jax.Array, number: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(sampling.seed), number), position)
        return sample(logits, key, sampling)

    return jax.vmap(choose_one)(logits, numbers, positions)


def run_rows(
    model: Model, shape: DecoderConfig, variables: tuple[Any, Any], cache: KVCache, *inputs: jax.Array
) -> tuple[jax.Array, KVCache]:
    """Run tokens through a decoder with a cache, one row at a time in the sense of ``jax.vmap``.

    Args:
      model, shape: decoder and its shape.
      variables: parameters and quant state.
      cache: cache of all rows.
      inputs: tokens, mask of the tokens that are not padding, and positions, each [rows, tokens] int32. Padding
        follows the other tokens.

    Returns:
      The logits [rows, V] after the last token of each row that is not padding, and the updated cache.
    """

    def run(row: KVCache, tokens: jax.Array, valid: jax.Array, positions: jax.Array) -> tuple[jax.Array, KVCache]:
        one, rngs = jax.tree.map(lambda leaf: leaf[None], row), {"quant": jax.random.key(0)}
        logits, one = model.apply(*variables, tokens[None], valid[None], positions[None], rngs=rngs, cache=one)
        return logits[0, valid.sum() - 1], jax.tree.map(lambda leaf: leaf[0], one)

    # jax cannot vmap a ragged matmul with shared weights, so a decoder with experts processes one row at a time.
    return jax.lax.map(lambda one: run(*one), (cache, *inputs)) if shape.num_experts else jax.vmap(run)(cache, *inputs)


class Engine:
    """A decoder with a cache for ``slots`` texts of ``max_length`` tokens each.

    Args:
      model, params, quant_state: decoder, its parameters and its quant state.
      shape: shape of the decoder.
      max_length: maximum number of tokens of a prompt and its completion together.
      slots: number of texts that are decoded together.
      prefill_chunk: number of tokens of a prompt per prefill call.
      sampling: method of choosing tokens.
      end_tokens: tokens that end a text.
      quantization: ``kv_quant_dtype`` and ``kv_quant_axis`` of the cache, see ``jaxquant.serving.kv_cache``.

    Raises:
      ValueError: a size is out of range, or the quantization of the cache is unknown.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        quant_state: Any,
        shape: DecoderConfig,
        *,
        max_length: int,
        slots: int = 8,
        prefill_chunk: int = 64,
        sampling: Sampling | None = None,
        end_tokens: Collection[int] = (),
        **quantization: Any,
    ):
        sizes = (("max_length", max_length, 2), ("slots", slots, 1), ("prefill_chunk", prefill_chunk, 1))
        for name, value, least in sizes:
            if value < least:
                raise ValueError(f"{name} {value} must be at least {least}")
        self.max_length, self.slots, self.prefill_chunk = max_length, slots, prefill_chunk
        self._model, self._shape, self._variables = model, shape, (params, quant_state)
        self._sampling, self._ends = sampling or Sampling(), end_tokens
        self._empty = lambda rows: empty_cache(shape, rows, max_length, **quantization)
        jax.eval_shape(lambda: self._empty(1))  # raises for an unknown quantization
        self._step = jax.jit(self._run_and_choose, donate_argnums=1)
        self._insert = jax.jit(_insert, donate_argnums=0)

    # -- the three programs ------------------------------------------------------------------------------------------

    def prefill(self, prompt: Prompt) -> tuple[int, KVCache]:
        """Run a prompt; returns its first new token and a one-row cache that holds the prompt."""
        tokens, size = np.asarray(prompt.tokens, np.int32), self.prefill_chunk
        numbers, cache, token = np.asarray([prompt.number], np.int32), self._empty(1), None
        for start in range(0, len(tokens), size):
            positions = np.arange(start, start + size, dtype=np.int32)
            valid = positions < len(tokens)
            positions = np.minimum(positions, len(tokens) - 1)
            chunk = (tokens[positions][None], valid[None].astype(np.int32), positions[None])
            token, cache = self._step(self._variables, cache, *chunk, numbers)
        assert token is not None
        return int(token[0]), cache

    def empty(self) -> KVCache:
        """Create the cache of all slots."""
        return self._empty(self.slots)

    def insert(self, cache: KVCache, row: KVCache, slot: int) -> KVCache:
        """Insert a one-row cache into a slot; donates ``cache``."""
        return self._insert(cache, row, np.int32(slot))

    def decode(
        self, cache: KVCache, tokens: np.ndarray, positions: np.ndarray, active: np.ndarray, numbers: np.ndarray
    ) -> tuple[np.ndarray, KVCache]:
        """Run one token in each slot and choose the next tokens; donates ``cache``.

        Args:
          cache: cache of all slots.
          tokens, positions: [slots] int32, latest token of each slot and its position.
          active: [slots] bool; inactive slots write nothing.
          numbers: [slots] int32, numbers of the prompts.

        Raises:
          ValueError: a position is outside of the cache.
        """
        if (positions[active] >= self.max_length).any() or (positions[active] < 0).any():
            raise ValueError(f"positions {positions[active]} are outside of a cache with max_length {self.max_length}")
        columns = (tokens[:, None], active[:, None].astype(np.int32), positions[:, None])
        chosen, cache = self._step(self._variables, cache, *columns, numbers)
        return np.asarray(chosen), cache

    def programs(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Return the jitted prefill and decode programs, each with the shapes of its arguments."""

        def program(rows: int, length: int) -> tuple[Any, tuple[Any, ...]]:
            cache = jax.eval_shape(lambda: self._empty(rows))
            column, numbers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, length), (rows,)))
            return self._step, (self._variables, cache, column, column, column, numbers)

        return {"prefill": program(1, self.prefill_chunk), "decode": program(self.slots, 1)}

    def _run_and_choose(
        self,
        variables: Any,
        cache: KVCache,
        tokens: jax.Array,
        valid: jax.Array,
        positions: jax.Array,
        numbers: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """Run a chunk of a prompt, or one token of each slot, and choose the next tokens."""
        logits, cache = run_rows(self._model, self._shape, variables, cache, tokens, valid, positions)
        return choose(logits, numbers, positions.max(axis=1) + 1, self._sampling), cache

    # -- all prompts -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        on_token: Callable[[int, int], None] = lambda place, token: None,
        on_done: Callable[[int, Completion], None] = lambda place, completion: None,
    ) -> list[Completion]:
        """Continue every prompt; empty and too long prompts are refused without affecting the others.

        Args:
          prompts: any number of prompts.
          max_new_tokens: maximum number of new tokens per prompt.
          on_token: callback with the index of a prompt and its new token.
          on_done: callback with the index of a prompt and its completion, refused prompts first.

        Returns:
          The completions, in the order of the prompts.

        Raises:
          ValueError: ``max_new_tokens`` is below 1.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {max_new_tokens} must be at least 1")
        done: dict[int, Completion] = {}
        waiting, running = collections.deque(enumerate(prompts)), {}  # indices by slot
        texts: list[list[int]] = [[] for _ in prompts]

        def finish(place: int, stopped: Any, message: str = "") -> None:
            done[place] = Completion(prompts[place], tuple(texts[place]), stopped, message)
            on_done(place, done[place])

        def is_finished(place: int, token: int) -> bool:
            """Record a new token; returns whether the text ends with this token."""
            if token in self._ends:
                finish(place, "document_end")
                return True
            texts[place].append(token)
            on_token(place, token)
            if len(texts[place]) == max_new_tokens:
                finish(place, "max_new_tokens")
            elif len(prompts[place].tokens) + len(texts[place]) == self.max_length:
                finish(place, "cache_end")
            return place in done

        for place, prompt in enumerate(prompts):
            if message := self.refusal(prompt):
                finish(place, "refused", message)
        cache = self.empty()
        tokens, positions, numbers = (np.zeros(self.slots, np.int32) for _ in range(3))
        while waiting or running:
            for slot in range(self.slots):
                while slot not in running and waiting:
                    place, prompt = waiting.popleft()
                    if place in done:
                        continue
                    tokens[slot], row = self.prefill(prompt)
                    if not is_finished(place, int(tokens[slot])):
                        cache = self.insert(cache, row, slot)
                        running[slot] = place
                        positions[slot], numbers[slot] = len(prompt.tokens), prompt.number
            if not running:
                break
            active = np.isin(np.arange(self.slots), list(running))
            # Copies, because the arrays may be read asynchronously after the loop has changed them.
            chosen, cache = self.decode(cache, tokens.copy(), positions.copy(), active, numbers.copy())
            tokens[active] = chosen[active]
            positions[active] += 1
            running = {slot: place for slot, place in running.items() if not is_finished(place, int(tokens[slot]))}
        return [done[place] for place in range(len(prompts))]

    def refusal(self, prompt: Prompt) -> str:
        """Return the reason why a prompt is refused, or ""."""
        length, limit = len(prompt.tokens), self.max_length - 1
        if not length:
            return f"{prompt.name} is empty; provide at least one token"
        if length > limit:
            return f"{prompt.name} has {length} tokens, but the limit is {limit}; shorten it or raise max_length"
        return ""


def _insert(cache: KVCache, row: KVCache, slot: jax.Array) -> KVCache:
    return jax.tree.map(lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one[0], slot, 0), cache, row)
