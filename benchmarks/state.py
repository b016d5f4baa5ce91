"""What it costs a jitted training step to carry quant state: leaves, dispatch, tracing, lowering, compiling."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxquant
from benchmarks.lowering import BATCH, MODELS, SEQUENCE
from benchmarks.schemes import Row
from train.model import Decoder, DecoderConfig

CARRIED = (("none", "-"), ("fp8", "packed"), ("fp8", "nested"), ("int8", "-"))
"""Config strings, and how the quant state is carried."""


def measure_state(calls: int = 300, compiles: bool = True) -> list[Row]:
    """Measure the step of loss and gradients of a decoder of 12 unscanned layers, as `lowering` does, natively.

    `leaves` are the arrays of parameters and quant state. `dispatch`: microseconds of a call of a jitted function that
    takes them, donated, and returns them as they are, the least of some calls: what a step pays beside its computation.
    `seconds`: of the processor, once, with empty caches; `compile` is by XLA for the CPU, and is not always measured.

    Args:
      calls: of the jitted function.
      compiles: whether the step is compiled, which takes minutes.
    """
    decoder = Decoder(
        DecoderConfig(256, 128, 384, num_query_heads=8, num_kv_heads=4, head_dim=32, **MODELS["12 layers, unscanned"])
    )
    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
    rows = []
    for string, carried in CARRIED:
        config = {"quantization": string, "quant_backend": "native"} if string != "none" else {"quantization": ""}
        model = jaxquant.maybe_quantize_model(decoder, config, tokens)
        params, state = jaxquant.state.split(jax.eval_shape(model.init, jax.random.key(0), tokens))
        state = jaxquant.state.pack(state) if carried == "packed" else state
        row: Row = {"quantization": string, "state": carried, "leaves": len(jax.tree.leaves((params, state)))}
        row["dispatch"] = round(_dispatch((params, state), calls) * 1e6)
        given = (params, state, tokens, jax.random.key(0))
        rows.append(row | _times(jax.jit(_step_of(model)), given, compiles))
    for row in rows:
        for name in ("dispatch", *(f"{what} seconds" for what in ("trace", "compile") if compiles)):
            row[f"{name.split()[0]}, of float's"] = round(row[name] / rows[0][name], 2)
    return rows


def _step_of(model: Any) -> Callable[..., Any]:
    def loss(params: Any, state: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        variables = jaxquant.state.merge(params, state)
        return model.apply(variables, tokens, targets=tokens, rngs={"quant": key}).mean()

    def step(params: Any, state: Any, tokens: jax.Array, key: jax.Array) -> Any:
        value, (grads, seen) = jax.value_and_grad(loss, argnums=(0, 1))(params, state, tokens, key)
        params = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
        return value, params, jaxquant.state.update(state, seen)

    return step


def _times(step: Any, args: Any, compiles: bool) -> Row:
    """Return the processor's seconds of each thing that comes before the first call of a step."""
    jax.clear_caches()
    marks = [time.process_time()]
    traced = step.trace(*args)
    marks.append(time.process_time())
    lowered = traced.lower()
    marks.append(time.process_time())
    if compiles:
        lowered.compile()
        marks.append(time.process_time())
    took = [round(end - begin, 1) for begin, end in itertools.pairwise(marks)]
    return {f"{what} seconds": each for what, each in zip(("trace", "lower", "compile"), took, strict=False)}


def _dispatch(shapes: Any, calls: int) -> float:
    """Return the seconds of a call that takes arrays of these shapes and returns them, the least of some."""
    carry = jax.jit(lambda tree, x: (tree, x + 1), donate_argnums=0)
    carried, best = (jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), jnp.zeros(())), float("inf")
    for _ in range(calls):
        begin = time.perf_counter()
        carried = jax.block_until_ready(carry(*carried))
        best = min(best, time.perf_counter() - begin)
    return best
