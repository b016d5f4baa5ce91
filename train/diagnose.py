"""Name the first array of a training state, or of a step, that is not finite, with its layer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import state as quantization_state
from jaxquant.core.trees import leaves_by_path
from train import processes
from train.model import EXECUTION_ORDER
from train.step import Batch, Program, TrainState

Finding = tuple[str, int | None, float]
"""Module or parameter path, index of its layer (None outside the layers), amax."""

STACK = "layers"
"""The module whose arrays hold all layers, one behind the other."""


class FiniteCheck:
    """Names the first array of a state that is not finite; reads every array once, where it lies."""

    def __init__(self, program: Program):
        self._amaxes = jax.jit(_amaxes, out_shardings=program.replicated)

    def __call__(self, state: TrainState) -> str | None:
        """Return path, and layer where layers are stacked, of the first; parameters come first. None if all is finite.

        It waits for the state.
        """
        parts = {part: getattr(state, part) for part in ("params", "quant_state", "opt_state")}
        found = (each for part, tree in parts.items() for each in _findings(self._amaxes(tree), f"{part}/"))
        return next((_place(each) for each in found if not np.isfinite(each[2])), None)

    def timed(self, state: TrainState) -> tuple[str | None, float]:
        """Check, and return the seconds of it, too: the wait for the step that made the state is not among them."""
        jax.block_until_ready(state)
        began = time.perf_counter()
        return self(state), time.perf_counter() - began


def explain_non_finite(program: Program, state: TrainState, batch: Batch, key: jax.Array) -> str:
    """Find where the first non-finite number of a step appears.

    The forward pass is run again on the batch with every module's output kept, and the outputs are read in the order
    in which the modules finish. If all are finite, the gradients are read in the order of the backward pass.

    Args:
      state: the last good one, from which the failing step started.
      batch: of the failing step.
      key: of the failing step's random streams.
    """

    def outputs(state: TrainState, batch: Batch) -> Any:
        _, kept = program.model.linen.apply(
            quantization_state.merge(state.params, state.quant_state),
            *(batch[name] for name in ("inputs", "segment_ids", "positions")),
            rngs={"quant": key},
            capture_intermediates=lambda module, method: isinstance(module, nn.Module) and method == "__call__",
            mutable=["intermediates"],
        )
        return kept["intermediates"]

    def gradients(state: TrainState, batch: Batch) -> Any:
        with quantization_state.frozen():  # nothing is trained any more
            return jax.grad(program.loss)(state.params, state.quant_state, batch, key)

    def sorted_amaxes(function: Callable[..., Any], backwards: bool) -> list[Finding]:
        run = jax.jit(lambda *inputs: _amaxes(function(*inputs)), out_shardings=program.replicated)
        return sorted(_findings(run(state, dict(batch))), key=_rank, reverse=backwards)

    # Modules that quantization puts inside a layer are left out: the layer is what is asked for.
    modules = [each for each in sorted_amaxes(outputs, False) if (_inside(each) or STACK) in EXECUTION_ORDER]
    for what, found in (("output", modules), ("gradient", sorted_amaxes(gradients, True))):
        for index, each in enumerate(found):
            if not np.isfinite(each[2]):
                before = f" (before it {_place(found[index - 1])}, amax {found[index - 1][2]:.4g})" if index else ""
                return f"the first non-finite {what} is that of {_place(each)}, amax {each[2]}{before}"
    return "every layer's output and gradient is finite by itself; their sum or norm overflows"


def _amaxes(tree: Any) -> dict[str, jax.Array]:
    """Reduce each floating array in a tree to its amax, one per layer where layers are stacked, NaN where one is."""

    def reduce(path: str, x: jax.Array) -> jax.Array:
        axes = tuple(range(int(STACK in path.split("/") and x.ndim > 0), x.ndim))
        # XLA's vectorized maximum on CPU loses a NaN.
        amax = jnp.max(jnp.where(jnp.isnan(x), 0, jnp.abs(x)), axis=axes).astype(jnp.float32)
        return jnp.where(jnp.isnan(x).any(axis=axes), jnp.nan, amax)

    leaves = leaves_by_path(tree).items()
    return {path: reduce(path, leaf) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}


def _findings(amaxes: dict[str, jax.Array], prefix: str = "") -> Iterable[Finding]:
    for path, amax in jax.device_get(processes.in_order(amaxes)).items():
        name = prefix + (re.sub(r"/?__call__(/[0-9]+)*$", "", path) or "logits")
        if amax.ndim:
            yield from ((name, layer, float(each)) for layer, each in enumerate(amax))
        else:
            number = re.match(r"layers_(\d+)", name)
            yield name, int(number[1]) if number else None, float(amax)


def _inside(finding: Finding) -> str:
    """Return the path inside its layer, or of what is in none."""
    path, layer, _ = finding
    return path if layer is None else path.partition("/")[2]


def _rank(finding: Finding) -> tuple[int, int, int]:
    """Place a path in execution order: before the layers, layer by layer, after them."""
    known = [name for name in EXECUTION_ORDER if f"{_inside(finding)}/".startswith(f"{name}/")]
    # The longest match is the module itself; a path that nothing matches is the layer's own output.
    place = EXECUTION_ORDER.index(max(known, key=len, default=STACK))
    if finding[1] is None:
        return (0 if place == 0 else 2), 0, place
    return 1, finding[1], place


def _place(finding: Finding) -> str:
    path, layer, _ = finding
    return path if layer is None else f"{path}, layer {layer}"
