"""Training ops: quantized contractions with their backward passes."""

from jaxquant.ops.dot_general import dot_general, initial_state
from jaxquant.ops.einsum import einsum
from jaxquant.ops.ragged import ragged_dot

__all__ = ["dot_general", "einsum", "initial_state", "ragged_dot"]
