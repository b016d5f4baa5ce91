"""What a quantized KV cache costs and saves: error of the logits, bytes, prefill and decode speed."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.schemes import ROOT, Row, tell
from benchmarks.timing import median_ratio, seconds, undisturbed
from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build
from jaxquant.serving.kv_cache import SHARED_AXES, SPECS, nbytes
from train.config import TrainConfig
from train.frameworks import Model, make_model
from train.generate import Engine, Prompt
from train.model import DecoderConfig, empty_cache
from train.serving import open_served
from train.step import model_config
from train.tokenizer import ByteTokenizer

FORMATS = (("", ""), *((dtype, axis) for dtype in SPECS for axis in SHARED_AXES))
"""(kv_quant_dtype, kv_quant_axis), the unquantized one first."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder to measure.

    Attributes:
      model, params, quant_state, shape: the decoder.
      tokens: text that it reads, [texts, length].
    """

    model: Model
    params: Any
    quant_state: Any
    shape: DecoderConfig
    tokens: np.ndarray


def random_decoder(texts: int, length: int, overrides: Mapping[str, Any] | None = None) -> Decoder:
    """Make a decoder of the quickstart's shape with random weights, and random bytes as its text."""
    fields = load_yaml(str(ROOT / "configs/quickstart.yml")) | {"health_every": 0} | dict(overrides or {})
    config: TrainConfig = build(TrainConfig, fields)
    shape = model_config(config, ByteTokenizer.vocab_size)
    model = make_model(config, shape, jnp.zeros((1, length), jnp.int32))
    params, quant_state = jax.jit(model.init)(jax.random.key(config.seed))
    tokens = np.random.default_rng(0).integers(0, 256, (texts, length), np.int32)
    return Decoder(model, params, quant_state, shape, tokens)


def trained_decoder(run: str, texts: int, length: int) -> Decoder:
    """Open a run's decoder, with the beginnings of sources of this package as its text.

    Raises:
      ValueError, OSError: the run cannot be served, or a tokenizer gives too few tokens.
    """
    served = open_served(run)
    files = sorted((ROOT / "jaxquant").rglob("*.py"))
    encoded = (served.tokenizer.encode_prompt(path.read_text()) for path in files)
    long = [tokens[:length] for tokens in encoded if len(tokens) >= length][:texts]
    if len(long) < texts:
        raise ValueError(
            f"only {len(long)} sources have {length} tokens and {texts} were asked; ask for fewer or shorter"
        )
    return Decoder(served.model, served.params, served.quant_state, served.shape, np.stack(long).astype(np.int32))


class _Measured:
    """An engine with one format of the cache, all of its slots filled."""

    def __init__(self, decoder: Decoder, dtype: str, axis: str, chunk: int):
        texts, length = decoder.tokens.shape
        self.decoder, self.label = decoder, (dtype or "none", axis or "–")
        self._quantization: Any = {"kv_quant_dtype": dtype} | ({"kv_quant_axis": axis} if axis else {})
        self._engine = Engine(
            decoder.model,
            decoder.params,
            decoder.quant_state,
            decoder.shape,
            max_length=length,
            slots=texts,
            prefill_chunk=chunk,
            **self._quantization,
        )
        self._prompts = [
            Prompt(row[: length // 2], f"text {number}", number) for number, row in enumerate(decoder.tokens)
        ]
        self.prefill_times: list[float] = []
        self.decode_times: list[float] = []
        self._cache = self._engine.empty()
        self.bytes = nbytes(self._cache)
        self._zeros = np.zeros(texts, np.int32)
        for slot, prompt in enumerate(self._prompts):
            self._cache = self._engine.insert(self._cache, self._engine.prefill(prompt)[1], slot)
        self._steps(1)

    def _steps(self, count: int) -> None:
        """Decode the second halves of the texts, every slot at once."""
        half = self.decoder.tokens.shape[1] // 2
        everywhere = np.ones(len(self.decoder.tokens), bool)
        for step in range(count):
            column = half + step
            _, self._cache = self._engine.decode(
                self._cache, self.decoder.tokens[:, column].copy(), self._zeros + column, everywhere, self._zeros
            )
        jax.block_until_ready(self._cache)

    def measure(self, steps: int) -> None:
        prompt = self._prompts[0]
        self.prefill_times.append(seconds(lambda: self._engine.prefill(prompt)[1]) / len(prompt.tokens))
        self.decode_times.append(seconds(lambda: self._steps(steps)) / steps / len(self._prompts))

    def logits(self) -> np.ndarray:
        """Return the logits of the whole texts, token by token through the cache: what decoding sees."""
        decoder, (texts, length) = self.decoder, self.decoder.tokens.shape

        @jax.jit
        def read(cache: Any, tokens: jax.Array) -> jax.Array:
            def step(cache: Any, item: Any) -> Any:
                token, at = item
                one, at = jnp.ones((texts, 1), jnp.int32), jnp.full((texts, 1), at)
                logits, cache = decoder.model.apply(
                    decoder.params,
                    decoder.quant_state,
                    token[:, None],
                    one,
                    at,
                    rngs={"quant": jax.random.key(0)},
                    cache=cache,
                )
                return cache, logits[:, 0]

            return jax.lax.scan(step, cache, (tokens.T, jnp.arange(length)))[1]

        return np.asarray(read(empty_cache(decoder.shape, texts, length, **self._quantization), decoder.tokens))


def measure_decode(decoder: Decoder, rounds: int, chunk: int = 64) -> list[Row]:
    """Compare a decoder with each quantized KV cache to the same with an unquantized one, in one run.

    `logits`: Frobenius norm of the logits' difference over that of the logits, every token of the texts decoded through
    the cache. `agreement`: share of positions whose likeliest next token is the same. `bytes`: of the whole cache,
    scales included. Speeds: a prompt of half the length prefilled in chunks, alone; then tokens decoded in all slots at
    once, one round of every format after the other, so that a slow moment of the machine hits all alike. A ratio of
    speeds is the median over rounds of the unquantized time over the format's in that round: above 1 is faster.

    Args:
      decoder: what is measured.
      rounds: measurements of each.
      chunk: tokens of a prefill's chunk.
    """
    measured = []
    for dtype, axis in FORMATS:
        began = time.perf_counter()
        measured.append(_Measured(decoder, dtype, axis, chunk))
        tell(f"compiled {' '.join(measured[-1].label)} in {time.perf_counter() - began:.1f} s")
    steps = min(16, decoder.tokens.shape[1] // 2)
    with undisturbed():
        for _, one in itertools.product(range(rounds), measured):
            one.measure(steps)
    base = measured[0]
    reference = base.logits()
    texts, length = decoder.tokens.shape

    rows = []
    for one in measured:
        logits = reference if one is base else one.logits()
        rows.append(
            {
                "kv cache": one.label[0],
                "axis": one.label[1],
                "texts": f"{texts} x {length}",
                "logits": f"{np.linalg.norm(logits - reference) / np.linalg.norm(reference):.4f}",
                "agreement": f"{(logits.argmax(-1) == reference.argmax(-1)).mean():.2%}",
                "bytes": one.bytes,
                "bytes ratio": round(one.bytes / base.bytes, 3),
                "prefill tokens/s": round(1 / statistics.median(one.prefill_times)),
                "prefill ratio": round(median_ratio(base.prefill_times, one.prefill_times), 2),
                "decode tokens/s": round(1 / statistics.median(one.decode_times)),
                "decode ratio": round(median_ratio(base.decode_times, one.decode_times), 2),
            }
        )
    return rows
