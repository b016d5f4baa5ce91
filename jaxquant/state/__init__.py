"""Quant state in a training loop: split it from the parameters, and apply what a backward pass says of it."""

from jaxquant.state.optimizer import Optimizer, OptimizerState, TrainState
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT, accumulate, from_flax, merge, nothing_seen, split, update

__all__ = [
    "OVERWRITE_WITH_GRADIENT",
    "Optimizer",
    "OptimizerState",
    "TrainState",
    "accumulate",
    "from_flax",
    "merge",
    "nothing_seen",
    "split",
    "update",
]
