"""Selection of the code that computes part of an op: XLA or a kernel. Except for ``BLOCKS``, only the speed differs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from jaxquant.core.typed import nearest

IMPLEMENTATIONS = ("xla", "pallas")
"""Implementations; the first one runs everywhere."""

BLOCKS = "matmul of blocks"
"""Product of two operands in blocks: by ``cudnn`` (the instruction of the chip), by ``pallas`` (our kernel for Hopper,
which sums exact products in float32, as cuDNN does), or by ``xla`` (a matmul of the rounded, dequantized operands)."""
BLOCKS_PAY = "on an H200 fp8_block trains 1.39 times as fast as with XLA: benchmarks/results/gemm-set-nvidia-h200.md"
"""Reason why Hopper GPUs multiply blocks with the kernel by default."""
STORED_CASTS_PAY = "an H200 casts a tensor with its amax 1.85 times as fast: benchmarks/results/kernels-nvidia-h200.md"
"""Reason why Hopper GPUs cast stored tensors with the kernel by default."""
INT8_PAYS = "on an H200 the kernel takes half the time of XLA for int8: benchmarks/results/kernels-nvidia-h200.md"
"""Reason why Hopper GPUs multiply int8 with the kernel by default."""
HOPPER_CASTS_PAY = "on an H200 the kernel is 1.2 to 1.6 times as fast as XLA: benchmarks/results/kernels-nvidia-h200.md"
"""Reason why Hopper GPUs cast blocks with the kernel by default, unless they also write values."""
TPU_CASTS_PAY = "in the TPU compiler's schedules, the kernel takes a fraction of the cycles of XLA's program"
"""Reason why TPUs cast blocks with the kernel by default."""


REFUSED = "pallas was requested; "
"""Prefix of the reason if a kernel was requested but does not run."""
_NOT_SELECTED = "XLA's program: "


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """An implementation and the reason for it.

    Attributes:
      name: one of ``IMPLEMENTATIONS``, or "cudnn" for blocks.
      reason: reason for the choice, in words.
    """

    name: str
    reason: str

    @property
    def requests_kernel(self) -> bool:
        """Whether a kernel was requested or selected, even if that kernel cannot run."""
        return self.name == "pallas" or self.reason.startswith(REFUSED)


XLA_BY_DEFAULT = "XLA's program, because no kernel is known to be faster here"
"""Reason for XLA if no kernel is known to be faster."""

_choices: dict[tuple[str, Choice], None] = {}


def choices_made() -> list[tuple[str, Choice]]:
    """Return each piece and choice of this process's traces, without duplicates. A cached trace adds no choice."""
    return list(_choices)


@contextlib.contextmanager
def collect_choices() -> Iterator[list[dict[str, str]]]:
    """Collect the choices of new traces as rows, filled when the block ends. A cached trace adds no choice."""
    earlier, rows = dict(_choices), []
    _choices.clear()
    try:
        yield rows
    finally:
        rows += [{"piece": piece, "implementation": each.name, "reason": each.reason} for piece, each in _choices]
        earlier |= _choices
        _choices.clear()
        _choices.update(earlier)


def check_implementation(op: str, implementation: str | None) -> None:
    """Raise if an implementation does not exist.

    Raises:
      ValueError: the implementation is neither None nor one of ``IMPLEMENTATIONS``.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        known = f"use {', '.join(map(repr, IMPLEMENTATIONS))}, or None for automatic selection"
        hint = nearest(implementation, IMPLEMENTATIONS, otherwise=known)
        raise ValueError(f"implementation {implementation!r} of {op} is not known; {hint}")


def select_implementation(
    piece: str, implementation: str | None, refusal: Callable[[], str | None], reason_to_prefer: str | None = None
) -> Choice:
    """Select the implementation of a piece of one call, and record it for ``choices_made``.

    Args:
      piece: "dot_general" (the low-precision matmul), "quantize" (the cast of an operand) or "block_quantize" (the
        cast of tiles and blocks, for several matmuls).
      implementation: requested implementation, or None to select one.
      refusal: function that returns the reason why the kernel cannot compute this call, or None if it can. Called only
        if the kernel is requested or preferred.
      reason_to_prefer: reason to select the kernel if no implementation is requested, or None to select XLA.
    """
    if implementation is not None:
        choice = Choice(implementation, "requested")
    else:
        choice = Choice("xla", XLA_BY_DEFAULT) if reason_to_prefer is None else Choice("pallas", reason_to_prefer)
    if choice.name == "pallas" and (why := refusal()) is not None:
        choice = Choice("xla", f"{_NOT_SELECTED if implementation is None else REFUSED}{why}")
    return record_choice(piece, choice)


def record_choice(piece: str, choice: Choice) -> Choice:
    """Record the choice of a call for a piece, for ``choices_made``, and return it."""
    _choices[piece, choice] = None
    return choice


def select_block_matmul(
    chip_refusal: str | None, implementation: str | None, refusal: Callable[[], str | None]
) -> Choice:
    """Select the implementation of a product of two operands in blocks, and record it for ``choices_made``.

    Args:
      chip_refusal: reason why the chip's own block matmul cannot compute the product, or None if it can.
      implementation: requested implementation. None selects the chip's own matmul, or else the kernel if possible.
      refusal: function that returns the reason why the kernel cannot compute the product, or None if it can. Called
        only if the chip cannot compute the product.
    """
    if implementation == "xla":
        return record_choice(BLOCKS, Choice("xla", "requested"))
    if chip_refusal is None:
        prefix = REFUSED if implementation == "pallas" else ""
        return record_choice(BLOCKS, Choice("cudnn", f"{prefix}the chip has its own matmul for these blocks"))
    if (why := refusal()) is not None:
        return record_choice(
            BLOCKS, Choice("xla", f"{chip_refusal}; {why}" if implementation is None else f"{REFUSED}{why}")
        )
    return record_choice(BLOCKS, Choice("pallas", BLOCKS_PAY if implementation is None else "requested"))
