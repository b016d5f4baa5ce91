"""Batched sampling with the log-probabilities of the sampled tokens, for reinforcement learning.

A rollout is one jitted function of the parameters, so new parameters do not compile it again. With exact numerics, a
row depends only on its prompt, its number, the sampling and the parameters, and its tokens equal the tokens of
``generate.Engine``. With standard numerics, last bits also depend on the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.serving.kv_cache import KVCache
from jaxquant.training.generate import Sampling, choose, run_rows
from jaxquant.training.layers import DecoderConfig
from jaxquant.training.model import empty_cache
from jaxquant.training.step import Model


class Rollout(NamedTuple):
    """Prompts with their sampled continuations, one text per row; padding follows each text.

    Attributes:
      tokens: [rows, prompt length + new tokens] int32; padding is 0.
      is_new: mask of the sampled tokens, including the token that ends a text.
      log_probs: float32, log-probability of each sampled token, given the tokens before it; 0 elsewhere. The
        distribution is the softmax of the logits, for every temperature and top_p; a trainer computes the same values
        as minus the losses that the decoder returns for ``targets``.
      lengths: [rows] int32, number of tokens of each text.
    """

    tokens: jax.Array
    is_new: jax.Array
    log_probs: jax.Array
    lengths: jax.Array


def pad_prompts(prompts: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts as an array [rows, length], padded with 0, and their lengths [rows].

    Args:
      prompts: token ids of each prompt.
      length: padded length; a rollout is compiled for each padded length.

    Raises:
      ValueError: a prompt is empty or longer than ``length``.
    """
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    if bad := [row for row, size in enumerate(lengths) if not 1 <= size <= length]:
        raise ValueError(f"prompt {bad[0]} has {lengths[bad[0]]} tokens; provide between 1 and {length} tokens")
    padded = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded, lengths


def make_rollout(
    model: Model, shape: DecoderConfig, *, new_tokens: int, sampling: Sampling, end_tokens: Collection[int]
) -> Callable[[Any, Any, jax.Array, jax.Array, jax.Array], Rollout]:
    """Return a jitted function that continues prompts.

    Its arguments are the parameters and quant state of ``model``, the padded prompts and their lengths
    (``pad_prompts``), and the numbers of the prompts [rows] int32. Rows with the same prompt and number get the same
    samples.

    Args:
      model: decoder, with float or converted parameters.
      shape: shape of the decoder.
      new_tokens: maximum number of new tokens of each text.
      sampling: method of choosing tokens.
      end_tokens: tokens that end a text.

    Raises:
      ValueError: ``new_tokens`` is below 1.
    """
    if new_tokens < 1:
        raise ValueError(f"new_tokens {new_tokens} must be at least 1")
    ends = np.asarray(sorted(end_tokens), np.int32)

    def continue_prompts(
        params: Any, quant_state: Any, prompts: jax.Array, lengths: jax.Array, numbers: jax.Array
    ) -> Rollout:
        (rows, size), limits = prompts.shape, lengths + new_tokens

        def run(cache: KVCache, *inputs: jax.Array) -> tuple[jax.Array, KVCache]:
            return run_rows(model, shape, (params, quant_state), cache, *inputs)

        def extend(texts: Rollout, logits: jax.Array, active: jax.Array) -> tuple[Rollout, jax.Array]:
            """Append a token to each active row; return also the rows that continue."""
            at, chosen = (jnp.arange(rows), texts.lengths), choose(logits, numbers, texts.lengths, sampling)
            texts = Rollout(
                texts.tokens.at[at].set(jnp.where(active, chosen, 0)),
                texts.is_new.at[at].set(active),
                texts.log_probs.at[at].set(jnp.where(active, -shape.math.token_losses(logits, chosen), 0)),
                texts.lengths + active,
            )
            return texts, active & ~jnp.isin(chosen, ends) & (texts.lengths < limits)

        def decode(carry: tuple[KVCache, Rollout, jax.Array]) -> tuple[KVCache, Rollout, jax.Array]:
            cache, texts, active = carry
            last = texts.lengths[:, None] - 1
            tokens = jnp.take_along_axis(texts.tokens, last, axis=1)
            logits, cache = run(cache, tokens, active[:, None].astype(jnp.int32), last)
            return cache, *extend(texts, logits, active)

        places = jnp.arange(size)[None]
        valid, positions = places < lengths[:, None], jnp.minimum(places, lengths[:, None] - 1)
        copied = jnp.take_along_axis(prompts, positions, axis=1)  # padding copies the last token, as in ``Engine``
        cache = empty_cache(shape, rows, size + new_tokens)
        logits, cache = run(cache, copied, valid.astype(jnp.int32), positions)
        tokens = jnp.pad(jnp.where(valid, prompts, 0), ((0, 0), (0, new_tokens)))
        texts = Rollout(tokens, jnp.zeros(tokens.shape, bool), jnp.zeros(tokens.shape), lengths)
        carry = (cache, *extend(texts, logits, jnp.ones(rows, bool)))
        return jax.lax.while_loop(lambda carry: carry[2].any(), decode, carry)[1]

    return jax.jit(continue_prompts)
