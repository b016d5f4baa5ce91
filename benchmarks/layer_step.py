"""One decoder layer of Llama 3 8B, forward and backward, timed under every recipe and library in one run."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gemms import Contender, run_contenders
from benchmarks.schemes import Row
from benchmarks.timing import median_ratio, seconds
from jaxquant import state as quantization_state
from jaxquant.inject.model import maybe_quantize_model
from train.attention import choose, visibility
from train.model import DecoderConfig, DecoderLayer

LLAMA = DecoderConfig(
    vocab_size=128256,
    emb_dim=4096,
    mlp_dim=14336,
    num_layers=1,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
)
TINY = dataclasses.replace(LLAMA, emb_dim=128, mlp_dim=256, num_query_heads=2, num_kv_heads=1, head_dim=64)
"""A layer that a CPU runs in milliseconds."""
CONTENDERS = (
    Contender("jax"),
    Contender("qwix", "fp8_full"),
    Contender("aqt", "int8"),
    *(Contender("native", recipe) for recipe in ("fp8", "fp8_current", "fp8_full", "int8", "int8_delayed")),
    *(Contender("native", recipe, "pallas") for recipe in ("fp8", "fp8_current", "int8", "fp8_block")),
)


class _Step:
    """The compiled gradient of one layer."""

    def __init__(self, contender: Contender, config: DecoderConfig, batch: int, length: int):
        tokens = jnp.zeros((batch, length), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
        x = jax.random.normal(jax.random.key(0), (batch, length, config.emb_dim), jnp.bfloat16)
        inputs = x, visibility(config.attention, tokens, None), positions
        model = maybe_quantize_model(DecoderLayer(config), contender.config(), *inputs)
        keys = {"params": jax.random.key(1), "quant": jax.random.key(2)}
        self._params, self._state = quantization_state.split(jax.jit(model.init)(keys, *inputs))
        self._inputs = inputs

        def loss(params: Any, state: Any, inputs: Any) -> jax.Array:
            out, _ = model.apply(quantization_state.merge(params, state), *inputs, rngs={"quant": jax.random.key(3)})
            return jnp.mean(jnp.square(out.astype(jnp.float32)))

        def step(params: Any, state: Any, inputs: Any) -> Any:
            whole = lambda params, state, x: loss(params, state, (x, *inputs[1:]))  # noqa: E731
            gradients, state, x = jax.grad(whole, argnums=(0, 1, 2))(params, state, inputs[0])
            return gradients, state, x

        self._step = jax.jit(step)
        self.contender, self.times = contender, []
        jax.block_until_ready(self._run())
        self._state = quantization_state.warm(self._state)
        for _ in range(2):  # the first compiles the step of warm histories
            jax.block_until_ready(self._run())

    def _run(self) -> Any:
        gradients, self._state, x = self._step(self._params, self._state, self._inputs)
        return gradients, self._state, x

    def measure(self) -> None:
        self.times.append(seconds(self._run))


def measure_layer_step(
    config: DecoderConfig = LLAMA,
    rounds: int = 20,
    contenders: Sequence[Contender] = CONTENDERS,
    batch: int = 2,
    length: int = 8192,
) -> list[Row]:
    """Time forward and backward of one decoder layer of Llama 3 8B: parameters in float32, activations in bf16.

    Every contender runs once a round; `step ms` is the median. `speedup` is the median over rounds of the unquantized
    layer's time over the contender's in that round. All have the attention that is in the row.

    Args:
      config: the layer.
      rounds: measurements of each.
      contenders: what is compared, with the first one. One that cannot run here says why in its row.
      batch, length: sequences and their tokens.
    """
    kind = choose("auto", jax.default_backend(), config.head_dim, length, config.dtype)
    config = dataclasses.replace(config, attention=kind)
    steps, failed = run_contenders(contenders, lambda one: _Step(one, config, batch, length), rounds)
    rows = [
        step.contender.cells
        | {
            "attention": kind,
            "step ms": round(1000 * statistics.median(step.times), 3),
            "speedup": round(median_ratio(steps[0].times, step.times), 3),
            "note": "",
        }
        for step in steps
    ]
    not_run = {"attention": kind, "step ms": "–", "speedup": "–"}
    return rows + [one.cells | not_run | {"note": note} for one, note in failed]
