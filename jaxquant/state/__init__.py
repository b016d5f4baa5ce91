"""Quant state in a training loop: split it from the parameters, and update it from a step's observation."""

from jaxquant.state.nnx import QuantState, advance, apply_gradients, grad, value_and_grad
from jaxquant.state.optimizer import Optimizer, TrainState
from jaxquant.state.table import from_flax, rows_of
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT, accumulate, merge, no_observation, split, update, warm
from jaxquant.state.watch import by_hand, frozen

__all__ = [
    "OVERWRITE_WITH_GRADIENT",
    "Optimizer",
    "QuantState",
    "TrainState",
    "accumulate",
    "advance",
    "apply_gradients",
    "by_hand",
    "from_flax",
    "frozen",
    "grad",
    "merge",
    "no_observation",
    "rows_of",
    "split",
    "update",
    "value_and_grad",
    "warm",
]
