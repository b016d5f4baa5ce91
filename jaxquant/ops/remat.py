"""Remat policies: what ``jax.checkpoint`` keeps for the backward pass of a model with quantized layers."""

from typing import Any

import jax
from jax.extend.core import Primitive

from jaxquant.kernels import KERNEL_PREFIX
from jaxquant.ops.gradients import RESIDUAL_NAME, RESULT_NAME

save_quantized = jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME)
"""Remat policy that keeps what quantized layers save for backward (one byte an element) and recomputes the rest.

The results of matmuls are part of the rest: they are computed again wherever a norm, a gate or attention needs them.
"""

_KERNELS = frozenset(
    {
        "conv_general_dilated",
        "dot_product_attention_fp8_fwd_wrapper",
        "dot_product_attention_fwd_wrapper",
        "pallas_call",
        "ragged_dot_general",
    }
)
"""Primitives whose results are kept: matmuls under other names, cuDNN's attention, kernels such as splash attention."""
_CASTS = (f"{KERNEL_PREFIX}quantize", f"{KERNEL_PREFIX}block_quantize")
"""How the names of kernels begin whose results are not: casts."""


def save_matmuls(primitive: Primitive, *operands: Any, **parameters: Any) -> bool:
    """Decide what ``jax.checkpoint`` keeps: the results of matmuls, of attention kernels and of other kernels.

    The backward pass then runs no quantized matmul, no float matmul without batch axes and no attention kernel a second
    time. It recomputes norms, gates, rotations and the casts to 8 bits. Of a quantized matmul the result in its own
    dtype is kept, not the sum before its scales. Float matmuls with batch axes are recomputed, as
    ``dots_with_no_batch_dims_saveable`` does: the scores of attention without a kernel are such, and take more memory
    than all the rest.

    Args:
      primitive: the operation, as ``jax.checkpoint`` asks of a policy.
      operands: their abstract values.
      parameters: of the operation.
    """
    if primitive.name == "name":
        return parameters["name"] == RESULT_NAME
    if primitive.name == "pallas_call" and str(parameters["name"]).startswith(_CASTS):
        return False
    is_dot = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **parameters)
    return bool(is_dot) or primitive.name in _KERNELS
