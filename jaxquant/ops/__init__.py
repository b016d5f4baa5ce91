"""Training ops: quantized contractions with their backward passes."""

from jaxquant.ops.all_to_all import all_to_all
from jaxquant.ops.conv import conv_general_dilated
from jaxquant.ops.dot_general import dot_general, initial_state
from jaxquant.ops.einsum import einsum
from jaxquant.ops.ragged import ragged_dot

__all__ = [
    "all_to_all",
    "conv_general_dilated",
    "dot_general",
    "einsum",
    "initial_state",
    "ragged_dot",
]
