"""Compositions: a recipe that takes each of its three matmuls from another one, and what does not go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxquant.core.quant_state import TENSORS
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, Side, TensorSpec


def compose(name: str, parts: Sequence[Recipe | None]) -> Recipe:
    """Return the recipe whose matmuls are those of three recipes, None being float.

    Args:
      name: of the recipe that comes out.
      parts: the recipes that forward, dlhs and drhs are taken from.

    Raises:
      ValueError: a tensor that two rows scale by its history, each in its own way; flax's op in parts.
      NotImplementedError: a weight in a tensor format in a backward matmul alone.
    """
    given = [part for part in parts if part is not None]
    if any(part.matches_flax for part in given) and any(part != parts[0] for part in parts):
        raise ValueError(
            f"amax_init 'flax' is flax's own op of three matmuls, and quantization {name} has others; use 'warmup'"
        )
    _check_histories(name, parts)
    forward = parts[0] or Recipe(name, MatmulSpec())
    dlhs, drhs = _backward(name, forward, parts[1], "dlhs"), _backward(name, forward, parts[2], "drhs")
    shares = any(part.shares_experts for part in given)
    composed = dataclasses.replace(forward, name=name, dlhs=dlhs, drhs=drhs, delayed=None, shares_experts=shares)
    if any(isinstance(spec, TensorSpec) and spec.scaling == "delayed" for spec in composed.specs.values()):
        composed = dataclasses.replace(composed, delayed=next(filter(None, (part.delayed for part in given))))
    return composed


def _check_histories(name: str, parts: Sequence[Recipe | None]) -> None:
    """Refuse two rows that scale a tensor by its one history, each in its own way."""
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
                "different ways; take both matmuls from one of them"
            )


def _backward(name: str, forward: Recipe, part: Recipe | None, matmul: Literal["dlhs", "drhs"]) -> MatmulSpec:
    """Return a backward matmul of a recipe, each operand made of the float tensor where the forward is another's."""
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
            f"quantization {name}: the weight of {matmul} in the tensor format {operand.codec} is the forward's; take "
            f"fwd from the same string, or {matmul} from another"
        )
    return dataclasses.replace(spec, **{side: operand})
