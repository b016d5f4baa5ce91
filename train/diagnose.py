"""Find the layer where a non-finite loss began."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import state as quantization_state
from jaxquant.core.trees import leaves_by_path, map_by_path
from train import processes
from train.model import EXECUTION_ORDER
from train.step import Batch, Program, TrainState

Finding = tuple[str, int | None, float]
"""Module or parameter path, index of its layer (None outside the layers), amax."""

STACK = "layers"
"""The module whose arrays hold all layers, one behind the other."""


def explain_non_finite(program: Program, state: TrainState, batch: Batch, key: jax.Array) -> str:
    """Find where the first non-finite number of a step appears.

    The forward pass is run again on the batch with every module's output kept, and the outputs are read in the order
    in which the modules finish. If all are finite, the gradients are read in the order of the backward pass.

    Args:
      state: the last good one, from which the failing step started.
      batch: of the failing step.
      key: of the failing step's random streams.
    """
    findings = list(_forward(program, state, batch, key))
    text = _first(findings, "output")
    if text:
        return text

    @_jit(program)
    def gradient_amaxes(state: TrainState, batch: Batch) -> Any:
        with quantization_state.frozen():  # nothing is trained any more
            return _amaxes(jax.grad(program.loss)(state.params, state.quant_state, batch, key))

    found = _findings(processes.in_order(gradient_amaxes(state, dict(batch))), lambda path: path)
    gradients = sorted(found, key=lambda f: _rank(f[0], f[1]), reverse=True)
    text = _first(gradients, "gradient")
    return text or "every layer's output and gradient is finite by itself; their sum or norm overflows"


def _forward(program: Program, state: TrainState, batch: Batch, key: jax.Array) -> list[Finding]:
    @_jit(program)
    def output_amaxes(state: TrainState, batch: Batch) -> Any:
        _, kept = program.model.linen.apply(
            quantization_state.merge(state.params, state.quant_state),
            batch["inputs"],
            batch["segment_ids"],
            batch["positions"],
            rngs={"quant": key},
            capture_intermediates=lambda module, method: isinstance(module, nn.Module) and method == "__call__",
            mutable=["intermediates"],
        )
        return _amaxes(kept["intermediates"])

    amaxes = processes.in_order(output_amaxes(state, dict(batch)))
    found = _findings(amaxes, lambda path: re.sub(r"/?__call__(/[0-9]+)*$", "", path) or "logits")
    # Modules that quantization puts inside a layer are left out: the layer is what is asked for.
    known = (f for f in found if (f[0] if f[1] is None else f[0].partition("/")[2] or "layers") in EXECUTION_ORDER)
    return sorted(known, key=lambda finding: _rank(finding[0], finding[1]))


def _jit(program: Program) -> Callable[[Callable[..., Any]], Any]:
    """Jit a function whose small results every process reads."""
    return partial(jax.jit, out_shardings=program.replicated)


def _amaxes(tree: Any) -> Any:
    """Reduce each floating array in a tree to its amax, one per layer where layers are stacked; drop the others."""

    def reduce(path: str, leaf: jax.Array) -> jax.Array | None:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return None
        return _amax(leaf, axis=tuple(range(1, leaf.ndim)) if path.split("/")[0] == STACK else None)

    return map_by_path(reduce, tree)


def _findings(amaxes: Any, name: Callable[[str], str]) -> Iterable[Finding]:
    for path, leaf in leaves_by_path(amaxes).items():
        full = name(path)
        module = full.split("/")[0]
        if module == STACK:
            yield from ((full, layer, float(amax)) for layer, amax in enumerate(np.asarray(leaf)))
        else:
            layer = int(module.removeprefix("layers_")) if module.startswith("layers_") else None
            yield full, layer, float(leaf)


def _amax(x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """Return the largest magnitude, NaN where there is a NaN: XLA's vectorized maximum on CPU loses it."""
    amax = jnp.max(jnp.where(jnp.isnan(x), 0, jnp.abs(x)), axis=axis).astype(jnp.float32)
    return jnp.where(jnp.isnan(x).any(axis=axis), jnp.nan, amax)


def _rank(path: str, layer: int | None) -> tuple[int, int, int]:
    """Place a path in execution order: before the layers, layer by layer, after them."""
    head, _, inside = path.partition("/")
    if layer is None:
        place = EXECUTION_ORDER.index(head) if head in EXECUTION_ORDER else len(EXECUTION_ORDER)
        return (0, 0, place) if head == EXECUTION_ORDER[0] else (2, 0, place)
    known = [i for i, name in enumerate(EXECUTION_ORDER) if inside == name or inside.startswith(name + "/")]
    # The longest match is the module itself; a path that nothing matches is the layer's own output.
    best = max(known, key=lambda i: len(EXECUTION_ORDER[i]), default=EXECUTION_ORDER.index("layers"))
    return 1, layer, best


def _first(findings: list[Finding], what: str) -> str | None:
    for index, (path, layer, amax) in enumerate(findings):
        if not np.isfinite(amax):
            text = f"the first non-finite {what} is that of {_place(path, layer)}, amax {amax}"
            if index:
                before, layer_before, amax_before = findings[index - 1]
                text += f" (before it {_place(before, layer_before)}, amax {amax_before:.4g})"
            return text
    return None


def _place(path: str, layer: int | None) -> str:
    return path if layer is None else f"{path}, layer {layer}"
