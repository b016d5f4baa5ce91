"""Quant state of one layer: which tensors and fields there are, and their names.

Ops take it by tensor and field, ``{"input": {"scale": …, "amax_history": …, "amax_bins": …}, …}``. The state of a model
is tables of such tensors (``jaxquant.state.table``).
"""

from __future__ import annotations

from typing import Any

TENSORS = {"input": ("fwd_lhs", "drhs_lhs"), "kernel": ("fwd_rhs", "dlhs_rhs"), "output_grad": ("dlhs_lhs", "drhs_rhs")}
"""Tensors with delayed scaling, by flax's names, and the operands that are made of each."""
SCALE, HISTORY, BINS = FIELDS = ("scale", "amax_history", "amax_bins")
"""Fields of each; ``core.delayed`` has their meaning."""
SPARSITY = "sparsity"
SPARSITY_FIELDS = STEP, MASK, USES = ("step", "mask", "uses")
"""Fields of a sparse weight; ``ops.sparsity`` has their meaning."""
# Beside the tensors of a layer, while ``audit.health`` measures it, and its one field.
HEALTH, PROBE = "health", "probe"

Fields = dict[str, Any]
"""Arrays (or their shapes) of one tensor by field."""
LayerState = dict[str, Fields]
"""Fields of a layer's tensors."""
