"""Delayed scaling as a Python loop over the amaxes of a step, which checks the properties."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.recipe import DelayedSpec
from tests.states import only as op_state
from tests.states import recorded

__all__ = ["LENGTH", "WEIGHTS", "PythonLoop", "amax", "inputs", "op_state"]

LENGTH = 4
WEIGHTS = (1.0, 0.25, 3.0)
"""Amax of the output gradient of each of three uses, in a linear loss."""
LARGEST = {"input": "float8_e4m3fn", "kernel": "float8_e4m3fn", "output_grad": "float8_e5m2"}


def inputs(step: int) -> jax.Array:
    """Return three inputs of different magnitudes, [3, 4, 8]."""
    scales = jnp.roll(jnp.array([1.0, 11.0, 0.03]), step)
    return jax.random.normal(jax.random.key(step), (3, 4, 8)) * scales[:, None, None]


def amax(x: jax.Array) -> float:
    return float(jnp.max(jnp.abs(x)))


class PythonLoop:
    """Quant state of one layer, updated step by step with the amaxes of every use in a step."""

    def __init__(self, spec: DelayedSpec | None = None):
        length = LENGTH if spec is None else spec.amax_history_length
        self.history = {tensor: [np.float32(0)] * length for tensor in LARGEST}
        self.scale = dict.fromkeys(LARGEST, np.float32(1))
        self.rtol = dict.fromkeys(LARGEST, 0.0)

    def step(self, **uses: Sequence[float]) -> None:
        """Advance by one step; the arguments are the amaxes of each tensor, empty for an unused tensor."""
        for tensor, amaxes in uses.items():
            past = max(self.history[tensor])
            if amaxes and past > 0:
                self.scale[tensor] = past * np.float32(1 / ELEMENTS[LARGEST[tensor]].max)
                # a mean of equal scales may differ from the scales in the last bit
                self.rtol[tensor] = 1e-6 if len(amaxes) > 1 else 0.0
            finite = [np.float32(amax) for amax in amaxes if math.isfinite(amax)]
            if finite:
                self.history[tensor] = [recorded(max(finite)), *self.history[tensor][2:], self.history[tensor][0]]

    def check(self, quant_state, layer: int | None = None) -> None:
        """Compare with the variables of one op: ``input_scale``, …, bit for bit except for means of scales."""
        for tensor in LARGEST:
            values = {name: np.asarray(quant_state[f"{tensor}_{name}"]) for name in ("amax_history", "scale")}
            if layer is not None:
                values = {name: value[layer] for name, value in values.items()}
            np.testing.assert_array_equal(values["amax_history"], self.history[tensor], tensor)
            np.testing.assert_allclose(
                values["scale"], [self.scale[tensor]], rtol=self.rtol[tensor], atol=0, err_msg=tensor
            )
