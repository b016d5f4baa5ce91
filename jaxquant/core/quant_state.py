"""Quant state of one layer: names of its tensors and their fields.

Ops read the state by tensor and field, ``{"input": {"scale": …, "amax_history": …, "amax_bins": …}, …}``. A model
stores the state of such tensors in tables (``jaxquant.state.table``).
"""

from __future__ import annotations

from typing import Any

TENSORS = {"input": ("fwd_lhs", "drhs_lhs"), "kernel": ("fwd_rhs", "dlhs_rhs"), "output_grad": ("dlhs_lhs", "drhs_rhs")}
"""Tensors with delayed scaling, named as in flax, and the operands that are quantized from each."""
SCALE, HISTORY, BINS = FIELDS = ("scale", "amax_history", "amax_bins")
"""Fields of each tensor; ``core.delayed`` documents them."""
SPARSITY = "sparsity"
SPARSITY_FIELDS = STEP, MASK, USES = ("step", "mask", "uses")
"""Fields of a sparse weight; ``ops.sparsity`` documents them."""
# Entry next to a layer's tensors while ``audit.health`` measures the layer, and its only field.
HEALTH, PROBE = "health", "probe"

Fields = dict[str, Any]
"""Arrays (or their shapes) of one tensor, by field."""
LayerState = dict[str, Fields]
"""Fields of each tensor of a layer."""
