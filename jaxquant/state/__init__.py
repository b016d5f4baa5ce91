"""Quant state in a training loop: split it from the parameters, and apply what a backward pass observed."""

from jaxquant.state.nnx import (
    TRAINED,
    Gradients,
    QuantState,
    advance,
    apply_gradients,
    grad,
    value_and_grad,
)
from jaxquant.state.optimizer import Optimizer, OptimizerState, TrainState
from jaxquant.state.tree import (
    OVERWRITE_WITH_GRADIENT,
    accumulate,
    from_flax,
    merge,
    no_observation,
    nothing_seen,
    split,
    strip_bins,
    update,
    warm,
    with_bins,
)
from jaxquant.state.watch import by_hand, frozen

__all__ = [
    "OVERWRITE_WITH_GRADIENT",
    "TRAINED",
    "Gradients",
    "Optimizer",
    "OptimizerState",
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
    "split",
    "strip_bins",
    "update",
    "value_and_grad",
    "warm",
    "with_bins",
]
