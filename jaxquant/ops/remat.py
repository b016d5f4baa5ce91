"""Remat policies: what jax.checkpoint keeps of a model with quantized layers."""

import os
from typing import Any

import jax
from jax.extend.core import Primitive

from jaxquant.ops.gradients import RESIDUAL_NAME, RESULT_NAME

save_quantized = jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME)
"""Remat policy that keeps what quantized layers save for backward (one byte an element) and recomputes the rest."""

_save_dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_KERNELS = ("pallas_call", "dot_product_attention_fwd_wrapper", "dot_product_attention_fp8_fwd_wrapper", "ragged_dot_general", "conv_general_dilated")


def save_matmuls(primitive: Primitive, *operands: Any, **parameters: Any) -> bool:
    if primitive.name == "name":
        return parameters["name"] == RESULT_NAME or (bool(os.environ.get("KEEP8")) and parameters["name"] == RESIDUAL_NAME)
    return primitive.name in _KERNELS or bool(_save_dots(primitive, *operands, **parameters))
