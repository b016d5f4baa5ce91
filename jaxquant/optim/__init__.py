"""Memory-saving optimizers: moments in 8 bits, and bfloat16 weights without a float32 copy."""

from jaxquant.optim.codes import SCHEMES
from jaxquant.optim.health import moment_health
from jaxquant.optim.state import (
    MOMENTS,
    NewWeights,
    QuantizedState,
    apply_updates,
    describe_state,
    quantize_state,
    update_where,
)
from jaxquant.optim.weights import compensated_round, stochastic_round

__all__ = [
    "MOMENTS",
    "SCHEMES",
    "NewWeights",
    "QuantizedState",
    "apply_updates",
    "compensated_round",
    "describe_state",
    "moment_health",
    "quantize_state",
    "stochastic_round",
    "update_where",
]
