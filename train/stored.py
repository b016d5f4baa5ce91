"""A training state as its checkpoints hold it: without the bins of quant state, which are zeros between two steps."""

from __future__ import annotations

from typing import Any

from jaxquant import state as quantization_state
from train.step import TrainState


def to_stored(state: TrainState) -> dict[str, Any]:
    """Return what is written of a training state, of arrays or of their shapes."""
    return state._asdict() | {"quant_state": quantization_state.strip_bins(state.quant_state)}


def from_stored(stored: dict[str, Any], abstract_state: TrainState) -> TrainState:
    """Return the training state of what was read; its bins lie where those of ``abstract_state`` do."""
    state = TrainState(**stored)
    return state._replace(quant_state=quantization_state.with_bins(state.quant_state, abstract_state.quant_state))
