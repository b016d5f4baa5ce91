"""Whether a training state is finite: looked at before it is saved, called good, or gone on from."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.core.trees import leaves_by_path
from train import processes
from train.diagnose import STACK
from train.step import Program, TrainState


class FiniteCheck:
    """Names the first array of a state that is not finite; reads every array once, where it lies."""

    def __init__(self, program: Program):
        self._flags = jax.jit(_flags, out_shardings=program.replicated)

    def __call__(self, state: TrainState) -> str | None:
        """Return path, and layer where layers are stacked, of the first; parameters come first. None if all is finite.

        It waits for the state.
        """
        flags = processes.in_order(self._flags(state))
        for path, of_layers in zip(_floats(state), jax.device_get(flags), strict=True):
            if not of_layers.all():
                return f"{path}, layer {np.argmin(of_layers)}" if of_layers.ndim else path
        return None

    def timed(self, state: TrainState) -> tuple[str | None, float]:
        """Check, and return the seconds of it, too: the wait for the step that made the state is not among them."""
        jax.block_until_ready(state)
        began = time.perf_counter()
        return self(state), time.perf_counter() - began


def _floats(state: TrainState) -> dict[str, jax.Array]:
    parts = {part: getattr(state, part) for part in ("params", "quant_state", "opt_state")}
    leaves = ((f"{part}/{path}", leaf) for part, tree in parts.items() for path, leaf in leaves_by_path(tree).items())
    return {path: leaf for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}


def _flags(state: TrainState) -> list[jax.Array]:
    """Return whether each array is finite, by layer where layers are stacked."""
    return [
        jnp.isfinite(leaf).all(axis=tuple(range(int(STACK in path.split("/") and leaf.ndim > 0), leaf.ndim)))
        for path, leaf in _floats(state).items()
    ]
