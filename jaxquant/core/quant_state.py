"""The layout of quant state: which tensors and fields there are, and their names where they lie flat beside each other.

Ops take it nested, ``{"input": {"scale": …, "amax_history": …}}``. Models, checkpoints and flax's own ops have it flat,
``{"input_scale": …, "input_amax_history": …}``. Nothing else spells these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
PACKED = "packed"
"""Stands for a tensor's name where the state of many tensors is stacked (``state.packed``)."""
NAMES = frozenset(f"{tensor}_{field}" for tensor in (*TENSORS, PACKED) for field in FIELDS)


def flat(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return nested quant state under its flat names."""
    return {f"{tensor}_{field}": value for tensor, fields in state.items() for field, value in fields.items()}


def nested(variables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return flat quant state by tensor and field."""
    return {each: fields_of(variables, each) for each in (*TENSORS, SPARSITY, HEALTH) if fields_of(variables, each)}


def fields_of(variables: Mapping[str, Any], tensor: str) -> dict[str, Any]:
    """Return the fields of one tensor of flat quant state."""
    names = {SPARSITY: SPARSITY_FIELDS, HEALTH: (PROBE,)}.get(tensor, FIELDS)
    return {name: variables[f"{tensor}_{name}"] for name in names if f"{tensor}_{name}" in variables}


def delayed_tensors(names: Iterable[Any]) -> list[str]:
    """Return the tensors with delayed scaling among flat names."""
    return [name.removesuffix(f"_{HISTORY}") for name in names if is_named(name, HISTORY)]


def is_named(name: Any, field: str) -> bool:
    """Check whether a flat name is of a field."""
    return isinstance(name, str) and name.endswith(f"_{field}")
