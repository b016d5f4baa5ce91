"""Training ops: quantized contractions with their backward passes."""

from jaxquant.ops.dot_general import dot_general, initial_state
from jaxquant.ops.einsum import einsum
from jaxquant.ops.implementation import choose_implementation

__all__ = ["choose_implementation", "dot_general", "einsum", "initial_state"]
