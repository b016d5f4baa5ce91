"""The remat policy of quantized layers."""

import jax

from jaxquant.ops.gradients import RESIDUAL_NAME

save_quantized = jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME)
"""Remat policy that keeps what quantized layers save for backward (one byte an element) and recomputes the rest."""
