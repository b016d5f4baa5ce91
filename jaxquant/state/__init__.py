"""Quant state in a training loop: split it from the parameters, and apply what a backward pass observed."""

from jaxquant.state.nnx import TRAINED, Gradients, QuantState, advance, apply_gradients, grad, value_and_grad
from jaxquant.state.optimizer import Optimizer, OptimizerState, TrainState
from jaxquant.state.packed import PackedState, pack, unpack
from jaxquant.state.stored import from_flax, strip_bins, warm, with_bins
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT, accumulate, merge, no_observation, nothing_seen, split, update
from jaxquant.state.watch import by_hand, frozen

__all__ = [
    "OVERWRITE_WITH_GRADIENT",
    "TRAINED",
    "Gradients",
    "Optimizer",
    "OptimizerState",
    "PackedState",
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
    "nothing_seen",
    "pack",
    "split",
    "strip_bins",
    "unpack",
    "update",
    "value_and_grad",
    "warm",
    "with_bins",
]
