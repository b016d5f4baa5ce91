"""Whether a training state is finite: looked at before it is saved, called good, or gone on from."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
        flags = np.asarray(processes.in_order(self._flags(state)))
        if flags.all():
            return None
        place = int(np.argmin(flags))
        for path, leaf in _floats(state):
            count = leaf.shape[0] if _is_stacked(path, leaf) else 1
            if place < count:
                name = "/".join(path)
                return f"{name}, layer {place}" if _is_stacked(path, leaf) else name
            place -= count
        raise AssertionError("more flags than arrays")

    def timed(self, state: TrainState) -> tuple[str | None, float]:
        """Check, and return the seconds of it, too: the wait for the step that made the state is not among them."""
        jax.block_until_ready(state)
        began = time.perf_counter()
        return self(state), time.perf_counter() - began


def _floats(state: TrainState) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for part in ("params", "quant_state", "opt_state"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(state, part)):
            names = (str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                found.append(((part, *names), leaf))
    return found


def _is_stacked(path: tuple[str, ...], leaf: Any) -> bool:
    return STACK in path and leaf.ndim > 0


def _flags(state: TrainState) -> jax.Array:
    flags = [
        jnp.isfinite(leaf).all(axis=tuple(range(int(_is_stacked(path, leaf)), leaf.ndim))).reshape(-1)
        for path, leaf in _floats(state)
    ]
    return jnp.concatenate(flags)
