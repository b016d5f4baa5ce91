"""einsum: a quantized two-operand einsum, on ``dot_general``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxquant.core.qtensor import ConvertedKernel
from jaxquant.core.recipe import Recipe
from jaxquant.core.rounding import RandomKey
from jaxquant.core.sharding import Sharding, named, transposed
from jaxquant.ops.dimensions import DotDimensionNumbers
from jaxquant.ops.dot_general import QuantState, dot_general

Array = jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class EinsumPlan:
    """An equation as one contraction: what is summed first, the dimension numbers, and the final transposition."""

    lhs_sum: tuple[int, ...]
    rhs_sum: tuple[int, ...]
    dimension_numbers: DotDimensionNumbers
    permutation: tuple[int, ...]

    def summed(self, lhs: Any, rhs: Any, equation: str, is_converted: bool) -> tuple[Any, Any]:
        """Return the operands without the axes that are summed first.

        Args:
          lhs, rhs, equation: of the einsum.
          is_converted: whether the kernel is converted, or will be.

        Raises:
          NotImplementedError: axes of a converted kernel are summed.
        """
        if self.rhs_sum and is_converted:
            raise NotImplementedError(
                f"einsum {equation!r} sums axes of its kernel only, which a converted kernel cannot do; leave it in "
                "float with a rule"
            )
        return lhs.sum(self.lhs_sum) if self.lhs_sum else lhs, rhs.sum(self.rhs_sum) if self.rhs_sum else rhs


def plan_einsum(equation: str, lhs_ndim: int, rhs_ndim: int) -> EinsumPlan:
    """Read an einsum equation of two operands.

    Args:
      equation: such as "bsd,dhk->bshk"; "..." stands for leading axes that both operands or one of them have, and a
        missing "->" means the labels that occur once, in alphabetical order.

    Raises:
      ValueError: not two operands, a rank that does not fit, an unknown output label.
      NotImplementedError: a label twice in one operand (a diagonal).
    """
    text = equation.replace(" ", "")
    inputs, arrow, output = text.partition("->")
    operands = inputs.split(",")
    if len(operands) != 2:
        raise ValueError(f"einsum equation {equation!r} must have two operands, got {len(operands)}")
    lhs, rhs = (_expand(part, ndim, equation) for part, ndim in zip(operands, (lhs_ndim, rhs_ndim), strict=True))
    for labels in (lhs, rhs):
        if len(set(labels)) != len(labels):
            raise NotImplementedError(f"einsum equation {equation!r} takes a diagonal; a quantized einsum does not")
    dots = [label for label in (*lhs, *rhs) if label.isdigit()]
    if arrow:
        out = _replace_dots(output, sorted(set(dots), key=int, reverse=True))
    else:
        counts = {label: (*lhs, *rhs).count(label) for label in (*lhs, *rhs)}
        letters = sorted(label for label, count in counts.items() if count == 1 and not label.isdigit())
        out = [*sorted(set(dots), key=int, reverse=True), *letters]
    unknown = sorted(set(out) - set(lhs) - set(rhs))
    if unknown or len(set(out)) != len(out):
        raise ValueError(
            f"einsum equation {equation!r} has output labels that are unknown or repeated: {unknown or out}"
        )
    lhs_sum = tuple(i for i, label in enumerate(lhs) if label not in rhs and label not in out)
    rhs_sum = tuple(i for i, label in enumerate(rhs) if label not in lhs and label not in out)
    lhs = [label for i, label in enumerate(lhs) if i not in lhs_sum]
    rhs = [label for i, label in enumerate(rhs) if i not in rhs_sum]
    batch = [label for label in lhs if label in rhs and label in out]
    contract = [label for label in lhs if label in rhs and label not in out]
    numbers = (
        (tuple(map(lhs.index, contract)), tuple(map(rhs.index, contract))),
        (tuple(map(lhs.index, batch)), tuple(map(rhs.index, batch))),
    )
    made = batch + [label for label in lhs if label not in rhs] + [label for label in rhs if label not in lhs]
    return EinsumPlan(lhs_sum, rhs_sum, numbers, tuple(map(made.index, out)))


def _replace_dots(labels: str, dots: list[str]) -> list[str]:
    before, ellipsis, after = labels.partition("...")
    return [*before, *(dots if ellipsis else []), *after]


def _expand(labels: str, ndim: int, equation: str) -> list[str]:
    """Label the axes under an ellipsis "0", "1", …, counted from the last so that they align."""
    before, ellipsis, after = labels.partition("...")
    named = len(before) + len(after)
    if ndim < named or (not ellipsis and ndim != named):
        raise ValueError(f"einsum equation {equation!r} has {named} labels for an operand of rank {ndim}")
    return [*before, *(str(i) for i in reversed(range(ndim - named))), *after]


def einsum(
    equation: str,
    lhs: Float[Array, "*lhs"] | ConvertedKernel,
    rhs: Float[Array, "*rhs"] | ConvertedKernel,
    *,
    recipe: Recipe,
    state: QuantState | None = None,
    key: RandomKey | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    weight: int = 1,
    out_sharding: Sharding = None,
    implementation: str | None = None,
) -> Float[Array, "*out"]:
    """Contract an activation with a weight by an einsum equation, in the low precision of a recipe.

    Args:
      equation: two operands; see ``plan_einsum``.
      lhs, rhs: the operands in the equation's order; the weight may be a converted one.
      recipe, state, key, precision, preferred_element_type: as in ``dot_general``.
      weight: which operand is the weight, 0 or 1. The other is the activation, whatever order the equation has.
      out_sharding: of the result, as in ``dot_general``.
      implementation: as in ``dot_general``.

    Raises:
      ValueError, NotImplementedError: as ``plan_einsum``; weight is neither 0 nor 1.
    """
    if weight not in (0, 1):
        raise ValueError(f"einsum weight must be 0 or 1, the index of the weight operand, got {weight!r}")
    if weight == 0:
        inputs, arrow, output = equation.replace(" ", "").partition("->")
        first, _, second = inputs.partition(",")
        if not arrow:
            raise ValueError(f"einsum equation {equation!r} needs an explicit '->' when the weight comes first")
        equation, lhs, rhs = f"{second},{first}->{output}", rhs, lhs
    plan = plan_einsum(equation, lhs.ndim, rhs.ndim)
    lhs, rhs = plan.summed(lhs, rhs, equation, isinstance(rhs, ConvertedKernel))
    assert not isinstance(lhs, ConvertedKernel), "the weight is on the right by now"
    out = dot_general(
        lhs,
        rhs,
        plan.dimension_numbers,
        precision,
        preferred_element_type,
        recipe=recipe,
        state=state,
        key=key,
        out_sharding=transposed(named(out_sharding, lhs), plan.permutation),
        implementation=implementation,
    )
    return jnp.transpose(out, plan.permutation)
