"""Which code computes a piece of an op: XLA's own program, or a kernel. A choice of speed alone, never of numbers."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Literal

Implementation = Literal["xla", "pallas"]
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"dot_general": ("xla", "pallas"), "quantize": ("xla", "pallas")}
"""Implementations of each piece, the one that runs everywhere first."""

BLOCKS = "matmul of blocks"
"""The product of two operands in blocks: ``cudnn``'s where the chip has one, ``pallas`` where it is asked for and has a
kernel, which sums exact products in float32 as cuDNN does; else ``xla``'s of dequantized (rounded) operands."""


_REFUSED = "pallas was asked for; "


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """An implementation and why it runs.

    Attributes:
      name: a name of ``IMPLEMENTATIONS``.
      reason: in words.
    """

    name: str
    reason: str

    @property
    def asks_for_pallas(self) -> bool:
        """Whether kernels were asked for, granted or not."""
        return self.name == "pallas" or self.reason.startswith(_REFUSED)


PICKED = "XLA's program: no kernel is faster than it by a measurement on a chip"
"""Why none but XLA is picked."""

_made: dict[tuple[str, Choice], None] = {}


def choices_made() -> list[tuple[str, Choice]]:
    """Return each piece and choice of this process's traces, once each, the first first. A cached trace is none."""
    return list(_made)


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
        return Choice(known[0], PICKED)
    if implementation not in known:
        near = difflib.get_close_matches(str(implementation), known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known ones are {', '.join(known)}; None picks"
        raise ValueError(f"implementation {implementation!r} of {piece} is not known; {hint}")
    return Choice(implementation, "asked for")


def settle(piece: str, implementation: str | None, refusal: Callable[[], str | None]) -> Choice:
    """Choose what computes a piece of one call, and note it for ``choices_made``.

    Args:
      piece, implementation: as ``choose_implementation`` takes them.
      refusal: says why the kernel does not compute this call, None where it does; asked where the kernel is wanted.
    """
    choice = choose_implementation(piece, implementation)
    if choice.name == "pallas" and (why := refusal()) is not None:
        choice = Choice("xla", f"{_REFUSED}{why}")
    _made[piece, choice] = None
    return choice


def settle_blocks(own: str | None, implementation: str | None, kernel: Callable[[], str | None]) -> Choice:
    """Choose what multiplies two operands in blocks, and note it for ``choices_made``.

    Args:
      own: why the chip's own matmul of blocks does not, None where it does.
      implementation: the one that was asked for; None picks the chip's own or else XLA's.
      kernel: says why the kernel does not, None where it does; asked where it is wanted.
    """
    if own is None:
        choice = Choice("cudnn", "the chip multiplies these blocks")
    elif implementation != "pallas":
        choice = Choice("xla", own)
    else:
        why = kernel()
        choice = Choice("pallas", "asked for") if why is None else Choice("xla", f"{_REFUSED}{why}")
    _made[BLOCKS, choice] = None
    return choice
