"""Which code computes a piece of an op: XLA's own program, or a kernel. A choice of speed alone, but for ``BLOCKS``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from jaxquant.core.typed import nearest

IMPLEMENTATIONS = ("xla", "pallas")
"""The one that runs everywhere first."""

BLOCKS = "matmul of blocks"
"""The product of two operands in blocks. ``cudnn`` is the instruction of the chip. ``pallas`` is our kernel for Hopper;
it sums exact products in float32, as cuDNN does. ``xla`` multiplies what it has dequantized, and so rounded."""
BLOCKS_PAY = "on an H200 kernels train fp8_block 1.39 times as fast as XLA: benchmarks/results/gemm-set-nvidia-h200.md"
"""Why Hopper GPUs multiply blocks by the kernel if no implementation is asked for."""
STORED_CASTS_PAY = "an H200 casts and measures a tensor 1.85 times as fast: benchmarks/results/kernels-nvidia-h200.md"
"""Why Hopper GPUs cast what lies in memory by the kernel if no implementation is asked for."""
INT8_PAYS = "on an H200 the kernel takes half the time of XLA's int8 matmul: benchmarks/results/kernels-nvidia-h200.md"
"""Why Hopper GPUs multiply int8 by the kernel if no implementation is asked for."""
HOPPER_CASTS_PAY = "on an H200 the kernel is 1.2 to 1.6 times as fast as XLA: benchmarks/results/kernels-nvidia-h200.md"
"""Why Hopper GPUs cast blocks by the kernel, but for casts whose values are wanted beside their elements: slower."""
TPU_CASTS_PAY = "on TPUs the kernel has a fraction of the cycles of XLA's program, by their compiler's schedules"
"""Why TPUs cast blocks by the kernel."""


REFUSED = "pallas was asked for; "
"""How the reason of a choice begins where a kernel was asked for and does not run."""
_NOT_SELECTED = "XLA's program: "


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """An implementation and why it runs.

    Attributes:
      name: one of ``IMPLEMENTATIONS``, or "cudnn" for blocks.
      reason: in words.
    """

    name: str
    reason: str

    @property
    def wants_kernel(self) -> bool:
        """Whether a kernel was asked for or picked, granted or not."""
        return self.name == "pallas" or self.reason.startswith(REFUSED)


PICKED = "XLA's program, which no kernel is known to beat here"
"""Why XLA is picked where nothing else is known."""

_made: dict[tuple[str, Choice], None] = {}


def choices_made() -> list[tuple[str, Choice]]:
    """Return each piece and choice of this process's traces, without repeats. A cached trace adds no choice."""
    return list(_made)


@contextlib.contextmanager
def noted() -> Iterator[list[dict[str, str]]]:
    """Collect the choices of new traces as rows, filled when the block ends. A cached trace makes no new choice."""
    earlier, rows = dict(_made), []
    _made.clear()
    try:
        yield rows
    finally:
        rows += [{"piece": piece, "implementation": each.name, "reason": each.reason} for piece, each in _made]
        earlier |= _made
        _made.clear()
        _made.update(earlier)


def check_implementation(op: str, implementation: str | None) -> None:
    """Refuse the name of an implementation that there is not; None picks.

    Raises:
      ValueError: names the op, and lists the implementations.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        known = f"known ones are {', '.join(IMPLEMENTATIONS)}; None picks"
        hint = nearest(implementation, IMPLEMENTATIONS, otherwise=known)
        raise ValueError(f"implementation {implementation!r} of {op} is not known; {hint}")


def select_implementation(
    piece: str, implementation: str | None, refusal: Callable[[], str | None], reason_to_prefer: str | None = None
) -> Choice:
    """Select what computes a piece of one call, and note it for ``choices_made``.

    Args:
      piece: "dot_general" (the low-precision matmul), "quantize" (the cast of an operand) or "block_quantize" (that of
        tiles and blocks, for several matmuls).
      implementation: the one that was asked for; None picks.
      refusal: says why the kernel does not compute this call, None where it does; asked where the kernel is wanted.
      reason_to_prefer: the reason to pick the kernel if no implementation is asked for; None picks XLA's program.
    """
    if implementation is not None:
        choice = Choice(implementation, "asked for")
    else:
        choice = Choice("xla", PICKED) if reason_to_prefer is None else Choice("pallas", reason_to_prefer)
    if choice.name == "pallas" and (why := refusal()) is not None:
        choice = Choice("xla", f"{_NOT_SELECTED if implementation is None else REFUSED}{why}")
    return record_choice(piece, choice)


def record_choice(piece: str, choice: Choice) -> Choice:
    """Note a choice that a call has made of a piece, for ``choices_made``, and return it."""
    _made[piece, choice] = None
    return choice


def select_block_matmul(own: str | None, implementation: str | None, kernel: Callable[[], str | None]) -> Choice:
    """Select what multiplies two operands in blocks, and note it for ``choices_made``.

    Args:
      own: why the chip's own matmul of blocks does not, None where it does.
      implementation: the one that was asked for; None picks the chip's own, or else the kernel where it runs.
      kernel: says why the kernel does not, None where it does; asked where the chip does not.
    """
    if implementation == "xla":
        return record_choice(BLOCKS, Choice("xla", "asked for"))
    if own is None:
        asked = REFUSED if implementation == "pallas" else ""
        return record_choice(BLOCKS, Choice("cudnn", f"{asked}the chip multiplies these blocks"))
    if (why := kernel()) is not None:
        return record_choice(BLOCKS, Choice("xla", f"{own}; {why}" if implementation is None else f"{REFUSED}{why}"))
    return record_choice(BLOCKS, Choice("pallas", BLOCKS_PAY if implementation is None else "asked for"))
