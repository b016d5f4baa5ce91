"""The dtypes of a matmul's operands, as data; callers that print them convert them to text."""

from __future__ import annotations

import dataclasses

from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.recipe import Matmul, Recipe, Side


@dataclasses.dataclass(frozen=True, slots=True)
class OperandDtype:
    """The dtype of one operand.

    Attributes:
      dtype: name of the dtype that is multiplied; "float" if the float dtype is not known.
      rounded_to: low-precision dtype to which the values of a float operand were rounded, or None.
    """

    dtype: str = "float"
    rounded_to: str | None = None

    @property
    def is_low(self) -> bool:
        """Whether the multiplied elements have a low-precision dtype."""
        return self.dtype in ELEMENTS

    @property
    def is_quantized(self) -> bool:
        """Whether the elements have a low-precision dtype or were rounded to one."""
        return self.is_low or self.rounded_to is not None

    def __str__(self) -> str:
        return f"{self.dtype} ({self.rounded_to} dequantized)" if self.rounded_to else self.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulDtypes:
    """The dtypes of both operands of a matmul. The matmul is low-precision if both are."""

    lhs: OperandDtype = OperandDtype()
    rhs: OperandDtype = OperandDtype()

    @property
    def is_low(self) -> bool:
        return self.lhs.is_low and self.rhs.is_low

    @property
    def elements(self) -> tuple[str, ...]:
        """Both dtypes of a low-precision matmul, or () for a float matmul."""
        return (self.lhs.dtype, self.rhs.dtype) if self.is_low else ()

    def __str__(self) -> str:
        """Format as "int8 × int8", "float (int8 dequantized)" or "float"."""
        if self.is_low:
            return f"{self.lhs} × {self.rhs}"
        held = [f"{each.rounded_to} dequantized" for each in (self.lhs, self.rhs) if each.rounded_to]
        held += [each.dtype for each in (self.lhs, self.rhs) if each.is_low]
        return f"float ({', '.join(held)})" if held else "float"

    @classmethod
    def of_specs(cls, lhs: str | None, rhs: str | None) -> MatmulDtypes:
        """Return the dtypes of a matmul from the dtypes to which its operands are quantized.

        If only one operand is quantized, it is dequantized for a float matmul.

        Args:
          lhs, rhs: low-precision dtype of each operand, or None if it is not quantized.
        """
        if lhs is not None and rhs is not None:
            return cls(OperandDtype(lhs), OperandDtype(rhs))
        return cls(OperandDtype(rounded_to=lhs), OperandDtype(rounded_to=rhs))


def matmul_dtypes(recipe: Recipe | None) -> dict[str, MatmulDtypes]:
    """Return the operand dtypes that a recipe requests, by "fwd", "dlhs" and "drhs"; a None recipe is a float layer."""

    def dtype(matmul: Matmul, side: Side) -> str | None:
        spec = recipe and recipe.resolve(matmul, side)
        return None if spec is None else spec.codec or spec.dtype

    return {name: MatmulDtypes.of_specs(dtype(name, "lhs"), dtype(name, "rhs")) for name in ("fwd", "dlhs", "drhs")}
