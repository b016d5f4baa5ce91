"""Quant state in a training loop: split it from the parameters, and apply what a backward pass says of it."""

from jaxquant.state.nnx import TRAINED, QuantState, advance, apply_gradients, frozen, grad, value_and_grad
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT, from_flax, merge, split, update

__all__ = [
    "OVERWRITE_WITH_GRADIENT",
    "TRAINED",
    "QuantState",
    "advance",
    "apply_gradients",
    "from_flax",
    "frozen",
    "grad",
    "merge",
    "split",
    "update",
    "value_and_grad",
]
