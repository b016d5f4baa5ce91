"""What a quantized layer adds to a program and keeps for backward, measured on stacks of dense layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.schemes import UNQUANTIZED, Row, Scheme
from jaxquant import state as quantization_state
from jaxquant.audit.cost import program_lines, saved_for_backward
from jaxquant.inject.model import maybe_quantize_model

_FUNCTION = re.compile(r"""\s*func\.func (?:public |private )?@("[^"]+"|[\w.$-]+)\(""")
_CALL = re.compile(r"""\b(?:func\.)?call @("[^"]+"|[\w.$-]+)\(""")


class _Stack(nn.Module):
    """Dense layers in bf16 with float32 parameters, as large-model training has them, one a width."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index, width in enumerate(self.widths):
            x = nn.Dense(width, use_bias=False, dtype=jnp.bfloat16, name=f"dense_{index}")(x)
        return x


def stack_loss(scheme: Scheme, widths: tuple[int, ...]) -> tuple[Callable[..., Any], Any]:
    """Return a scalar function of (params, quant_state, inputs) of a stack of dense layers, and abstract arguments."""
    x = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    model = maybe_quantize_model(_Stack(widths), scheme.config, x)
    keys = {"params": jax.random.key(0), "quant": jax.random.key(1)}
    params, state = quantization_state.split(jax.eval_shape(model.init, keys, x))

    def loss(params: Any, state: Any, x: jax.Array) -> jax.Array:
        variables = quantization_state.merge(params, state)
        out: Any = model.apply(variables, x, rngs={"quant": jax.random.key(2)})
        return out.astype(jnp.float32).sum()

    return loss, (params, state, x)


def inlined_lines(text: str) -> int:
    """Count the operations' lines of a StableHLO module as if every call were replaced by the body of its function.

    Args:
      text: of the module, as ``lowered.as_text()`` returns it.

    Raises:
      ValueError: there is no function ``main``.
    """
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if found := _FUNCTION.match(line):
            name = found[1]
            bodies[name] = []
        elif name and line.strip() not in ("", "}") and not line.strip().startswith("return "):
            bodies[name].append(line)
    if "main" not in bodies:
        raise ValueError(f"StableHLO module has no function @main, only {sorted(bodies)}")
    counts: dict[str, int] = {}

    def count(function: str) -> int:
        if function not in counts:
            calls = [_CALL.search(line) for line in bodies[function]]
            counts[function] = sum(count(call[1]) if call else 1 for call in calls)
        return counts[function]

    return count("main")


def measure_trace(chosen: Sequence[Scheme], layers: int = 4) -> list[Row]:
    """Count StableHLO lines of the gradient of a stack that one more bf16 dense layer adds: (lines(2N) - lines(N)) / N.

    `same shape`: layers of one shape, helper functions once. `new shape`: layers of different shapes, so that none
    finds its helper functions made already. `inlined`: every call replaced by the body of its function.

    The goal, at most 3 times as many lines as bf16, is met where layers share a shape, on the native backend; a layer
    of a new shape costs more, on every backend (`new shape ratio`).
    """

    def lower(scheme: Scheme, widths: tuple[int, ...]) -> str:
        loss, args = stack_loss(scheme, widths)
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).as_text()

    def count(scheme: Scheme) -> dict[str, float]:
        same = [lower(scheme, (128,) * depth) for depth in (layers, 2 * layers)]
        new = [lower(scheme, tuple(128 + 32 * i for i in range(depth))) for depth in (layers, 2 * layers)]
        texts = {
            "same shape": (same, program_lines),
            "new shape": (new, program_lines),
            "inlined": (same, inlined_lines),
        }
        return {name: (lines(twice) - lines(once)) / layers for name, ((once, twice), lines) in texts.items()}

    base = count(UNQUANTIZED)
    rows = []
    for scheme in (UNQUANTIZED, *chosen):
        counts = count(scheme)
        ratios = {f"{name} ratio": round(lines / base[name], 2) for name, lines in counts.items()}
        rows.append({**scheme.cells, **counts, **ratios})
    return rows


def measure_memory(chosen: Sequence[Scheme], layers: int = 4) -> list[Row]:
    """Count bytes that one more bf16 dense layer saves for backward, parameters, quant state and inputs not counted.

    The layer has 256 × 128 activations and a 128 × 128 kernel.
    """

    def count(scheme: Scheme) -> dict[str, float]:
        once, twice = (saved_for_backward(*_flat(stack_loss(scheme, (128,) * depth))) for depth in (layers, 2 * layers))
        return {dtype: (twice[dtype] - once.get(dtype, 0)) / layers for dtype in sorted(twice)}

    base = sum(count(UNQUANTIZED).values())
    rows = []
    for scheme in (UNQUANTIZED, *chosen):
        parts = count(scheme)
        total = sum(parts.values())
        what = ", ".join(f"{dtype} {size:,.0f}" for dtype, size in parts.items() if size)
        rows.append({**scheme.cells, "bytes a layer": round(total), "ratio": round(total / base, 3), "by dtype": what})
    return rows


def _flat(pair: tuple[Callable[..., Any], Any]) -> Iterator[Any]:
    function, args = pair
    yield function
    yield from args
