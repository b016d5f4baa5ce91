"""Report: every contraction of a traced function, with its recipe or the reason for which it is in float."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxquant.trace.plan import Contraction


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One contraction.

    Attributes:
      path: of the layer; of a contraction without a parameter, the name scopes around it.
      operation: primitive of the traced program.
      lhs, rhs: shapes of the operands, in one step of the scans around them.
      weight: "lhs" or "rhs", None where no operand is made of parameters alone.
      stack: lengths of the scans over the weight, outermost first.
      batch: sizes of the weight's batch axes, whose elements are quantized each by itself.
      recipe: config string, None for float.
      reason: which rule or default decided, or why it stays float.
      is_out_of_reach: whether it has a parameter and stays float whatever rules say.
    """

    path: str
    operation: str
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    weight: str | None
    stack: tuple[int, ...]
    batch: tuple[int, ...]
    recipe: str | None
    reason: str
    is_out_of_reach: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The contractions of a function in the order of its program; prints as a table."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def quantized(self) -> list[Row]:
        """The rows with a recipe."""
        return [row for row in self.rows if row.recipe is not None]

    @property
    def out_of_reach(self) -> list[Row]:
        """The rows that no rule can quantize though they have a parameter."""
        return [row for row in self.rows if row.is_out_of_reach]

    def __str__(self) -> str:
        header = ("path", "operation", "lhs", "rhs", "recipe", "reason")
        cells = [
            (row.path or "-", row.operation, _shape(row.lhs), _shape(row.rhs), row.recipe or "float", row.reason)
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
                 for line in (header, *cells)]  # fmt: skip
        return "\n".join([*lines, f"{len(self.quantized)} of {len(self.rows)} contractions are quantized"])


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "-"


def row_of(site: Contraction) -> Row:
    """Describe a contraction, decided."""
    lhs, rhs = (*site.shapes, (), ())[:2]
    return Row(
        site.path,
        site.operation,
        lhs,
        rhs,
        None if site.side is None else ("lhs", "rhs")[site.side],
        tuple(length for _, length in site.stack),
        site.batch,
        None if site.recipe is None else site.recipe.name,
        site.reason,
        site.is_out_of_reach,
    )
