"""Which code computes a piece of an op: XLA's own program, or a kernel. A choice of speed alone, never of numbers."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Literal

Implementation = Literal["xla"]
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"dot_general": ("xla",), "quantize": ("xla",)}
"""Implementations of each piece, the one that runs everywhere first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """An implementation and why it runs.

    Attributes:
      name: a name of ``IMPLEMENTATIONS``.
      reason: in words.
    """

    name: str
    reason: str


def choose_implementation(piece: str, implementation: str | None = None) -> Choice:
    """Choose what computes a piece of an op.

    Args:
      piece: "dot_general" (the low-precision matmul) or "quantize" (the cast of an operand).
      implementation: the one that was asked for; None picks.

    Raises:
      ValueError: the piece has no implementation of that name; lists those that it has.
    """
    known = IMPLEMENTATIONS[piece]
    if implementation is None:
        return Choice(known[0], f"{known[0]!r} is the only implementation of {piece}" if len(known) == 1 else "default")
    if implementation not in known:
        near = difflib.get_close_matches(str(implementation), known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known ones are {', '.join(known)}; None picks"
        raise ValueError(f"implementation {implementation!r} of {piece} is not known; {hint}")
    return Choice(implementation, "asked for")
