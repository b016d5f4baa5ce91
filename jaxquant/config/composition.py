"""Compositions: recipes that take each of the three matmuls from another recipe, and the checks on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxquant.core.quant_state import TENSORS
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, Side, TensorSpec


def compose(name: str, parts: Sequence[Recipe | None]) -> Recipe:
    """Return the recipe that takes its three matmuls from three recipes.

    Args:
      name: name of the composed recipe.
      parts: recipes of forward, dlhs and drhs; None is float.

    Raises:
      ValueError: two rows use different delayed scaling for one tensor, or a part is flax's own op.
      NotImplementedError: only a backward matmul has its weight in a tensor format.
    """
    quantized = [part for part in parts if part is not None]
    if any(part.matches_flax for part in quantized) and any(part != parts[0] for part in parts):
        raise ValueError(
            f"amax_init 'flax' runs flax's own op for all three matmuls, but quantization {name} differs; use 'warmup'"
        )
    _check_histories(name, parts)
    forward = parts[0] or Recipe(name, MatmulSpec())
    dlhs, drhs = _backward(name, forward, parts[1], "dlhs"), _backward(name, forward, parts[2], "drhs")
    shares = any(part.shares_experts for part in quantized)
    composed = dataclasses.replace(forward, name=name, dlhs=dlhs, drhs=drhs, delayed=None, shares_experts=shares)
    if any(isinstance(spec, TensorSpec) and spec.scaling == "delayed" for spec in composed.specs.values()):
        composed = dataclasses.replace(composed, delayed=next(filter(None, (part.delayed for part in quantized))))
    return composed


def _check_histories(name: str, parts: Sequence[Recipe | None]) -> None:
    """Raise if two rows use different delayed scaling for one tensor, which has only one amax history."""
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
                f"quantization {name}: {' and '.join(specs)} scale one tensor, the {tensor}, by its history in "
                "different ways; take both matmuls from the same string"
            )


def _backward(name: str, forward: Recipe, part: Recipe | None, matmul: Literal["dlhs", "drhs"]) -> MatmulSpec:
    """Return a backward matmul. Operands that the forward matmul quantizes differently are quantized from float."""
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
            f"quantization {name}: the weight of {matmul} in the tensor format {operand.codec} must be the forward "
            f"weight; take fwd from the same string, or {matmul} from another"
        )
    return dataclasses.replace(spec, **{side: operand})
