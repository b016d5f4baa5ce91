"""Compositions: recipes that take each of the three matmuls from another recipe, and the checks on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxquant.core.quant_state import TENSORS
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, Side, TensorSpec


def compose(name: str, parts: Sequence[Recipe | None]) -> Recipe:
    """Return a recipe whose three matmuls come from three recipes.

    Args:
      name: name of the composed recipe.
      parts: recipes of forward, dlhs and drhs; None is float.

    Raises:
      ValueError: two recipes use different delayed scaling for one tensor, or some but not all matmuls use flax's op.
      NotImplementedError: a backward matmul has its weight in a tensor format that the forward matmul does not use.
    """
    quantized = [part for part in parts if part is not None]
    if any(part.matches_flax for part in quantized) and any(part != parts[0] for part in parts):
        raise ValueError(
            f"amax_init 'flax' needs one config string for all three matmuls, got {name}; set amax_init to 'warmup'"
        )
    _check_histories(name, parts)
    forward = parts[0] or Recipe(name, MatmulSpec())
    dlhs, drhs = _compose_backward(name, forward, parts[1], "dlhs"), _compose_backward(name, forward, parts[2], "drhs")
    shares = any(part.shares_experts for part in quantized)
    composed = dataclasses.replace(forward, name=name, dlhs=dlhs, drhs=drhs, delayed=None, shares_experts=shares)
    if any(isinstance(spec, TensorSpec) and spec.scaling == "delayed" for spec in composed.specs.values()):
        composed = dataclasses.replace(composed, delayed=next(filter(None, (part.delayed for part in quantized))))
    return composed


def _check_histories(name: str, parts: Sequence[Recipe | None]) -> None:
    """Raise if two recipes use different delayed scaling for one tensor, which has only one amax history."""
    rows: dict[Any, Recipe | None] = dict(zip(("fwd", "dlhs", "drhs"), parts, strict=True))
    for tensor, operands in TENSORS.items():
        specs: dict[str, TensorSpec] = {}
        for matmul, side in (operand.split("_") for operand in operands):
            row: Any = rows[matmul]
            spec = row and row.resolve(matmul, side)
            if spec is not None and spec.scaling == "delayed":
                specs[f"{row.name!r} of {matmul}"] = spec
        if len(set(specs.values())) > 1:
            raise ValueError(
                f"quantization {name}: {' and '.join(specs)} use different delayed scaling for the {tensor}; use the "
                "same config string for both matmuls"
            )


def _compose_backward(name: str, forward: Recipe, part: Recipe | None, matmul: Literal["dlhs", "drhs"]) -> MatmulSpec:
    """Return a backward matmul; an operand is quantized again if the forward matmul quantizes it differently."""
    if part is None:
        return MatmulSpec()
    side: Side = "rhs" if matmul == "dlhs" else "lhs"
    spec, own = getattr(part, matmul), part.resolve("fwd", side)
    arithmetic = None if part.arithmetic == forward.arithmetic else part.arithmetic
    spec = dataclasses.replace(spec, arithmetic=arithmetic)
    if own == forward.resolve("fwd", side) and arithmetic is None:
        return spec
    operand = getattr(spec, side)
    if operand == FORWARD:
        operand = own
    elif isinstance(operand, TensorSpec):
        operand = dataclasses.replace(operand, source="original")
    if isinstance(operand, TensorSpec) and operand.codec is not None:
        raise NotImplementedError(
            f"quantization {name}: {matmul} reads the weight in the GGML format {operand.codec}, but fwd does not; "
            f"set fwd to the same config string as {matmul}, or {matmul} to a string of another format"
        )
    return dataclasses.replace(spec, **{side: operand})
