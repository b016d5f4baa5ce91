"""The rule of delayed scaling as a plain Python loop over the amaxes of a step, to check the properties with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.recipe import DelayedSpec

LENGTH = 4
WEIGHTS = (1.0, 0.25, 3.0)
"""Of three uses in a loss that is linear: each use's output gradient has this amax."""
LARGEST = {"input": "float8_e4m3fn", "kernel": "float8_e4m3fn", "output_grad": "float8_e5m2"}


def inputs(step: int) -> jax.Array:
    """Three inputs of unequal scale, [3, 4, 8]."""
    scales = jnp.roll(jnp.array([1.0, 11.0, 0.03]), step)
    return jax.random.normal(jax.random.key(step), (3, 4, 8)) * scales[:, None, None]


def amax(x: jax.Array) -> float:
    return float(jnp.max(jnp.abs(x)))


class PythonLoop:
    """Quant state of one layer: step by step, from the amaxes of every use in a step."""

    def __init__(self, spec: DelayedSpec | None = None):
        length = LENGTH if spec is None else spec.amax_history_length
        self.history = {tensor: [np.float32(0)] * length for tensor in LARGEST}
        self.scale = dict.fromkeys(LARGEST, np.float32(1))

    def step(self, **uses: Sequence[float]) -> None:
        """Advance by a step in which each tensor had these amaxes, none where it was not used."""
        for tensor, amaxes in uses.items():
            past = max(self.history[tensor])
            if amaxes and past > 0:
                self.scale[tensor] = past * np.float32(1 / ELEMENTS[LARGEST[tensor]].max)
            finite = [np.float32(amax) for amax in amaxes if math.isfinite(amax)]
            if finite:
                self.history[tensor] = [max(finite), *self.history[tensor][2:], self.history[tensor][0]]

    def check(self, quant_state, layer: int | None = None) -> None:
        """Compare with the variables of one op: ``input_scale``, ``input_amax_history``, …, bit for bit."""
        for tensor in LARGEST:
            for field, expected in (("amax_history", self.history[tensor]), ("scale", [self.scale[tensor]])):
                value = np.asarray(quant_state[f"{tensor}_{field}"])
                np.testing.assert_array_equal(value if layer is None else value[layer], expected, f"{tensor}_{field}")


def op_state(tree):
    """Find the variables of the one op in a quant state tree."""
    while "input_scale" not in tree:
        (tree,) = tree.values()
    return tree
