"""Estimated time of a compiled step, from the chip's peak rates and achieved shares.

- On GPUs, instructions run one after another. A matmul takes the time of its operations or of its memory traffic,
  whichever is longer. Every other instruction takes the time of its memory traffic.
- On TPUs, an instruction takes the compiler's ``estimated_cycles``, divided by the chip's clock. The step takes at
  least the time of all HBM traffic.
- Communication overlaps with everything else.
"""

from __future__ import annotations

import dataclasses

from jaxquant.aot import links
from jaxquant.aot.chips import Chip
from jaxquant.aot.hlo import bits
from jaxquant.aot.program import HloStep


def kind(dtype: str) -> str:
    """Return the kind of peak rate for a matmul with this operand dtype: fp4, fp8, int8, bf16 or f32.

    Chips have no unit for integers of more than 8 bits; such matmuls are estimated as f32.

    Args:
      dtype: HLO dtype.
    """
    if dtype.startswith("f4"):
        return "fp4"
    if dtype.startswith("f8"):
        return "fp8"
    if dtype[0] in "su":
        return "int8" if bits(dtype) <= 8 else "f32"
    return "f32" if dtype in ("f32", "f64") else "bf16"


@dataclasses.dataclass
class Roofline:
    """An estimate of a step's time on one chip, in seconds.

    Attributes:
      matmul: matrix products, with the instructions fused into them, and kernels that multiply.
      moves: everything else on the chip.
      communication: communication between chips.
      memory: all traffic of the chip's memory, or 0 if the other figures include this traffic.
    """

    matmul: float
    moves: float
    communication: float
    memory: float = 0.0

    @property
    def step(self) -> float:
        return max(self.matmul + self.moves, self.communication, self.memory)


def estimate(chip: Chip, program: HloStep, devices: int = 1) -> Roofline:
    """Estimate the time of a step.

    Args:
      chip: chip that runs the step.
      program: compiled step.
      devices: number of devices of the program.
    """

    def rate(*kinds: str) -> float:
        return min(chip.peak[each] * chip.shares.get(each, 1.0) for each in kinds)

    bandwidth = chip.bandwidth * chip.shares.get("memory", 1.0)
    seconds, memory = 0.0, program.prefetched / bandwidth
    for matmul in program.matmuls:
        size = (matmul.bytes or sum(array.bytes for array in (matmul.lhs, matmul.rhs, matmul.out))) / bandwidth
        memory += matmul.times * size
        kinds = {kind(matmul.lhs.dtype), kind(matmul.rhs.dtype)}  # a matmul of two kinds runs at the slower rate
        is_clocked = chip.clock and matmul.cycles
        seconds += matmul.times * (matmul.cycles / chip.clock if is_clocked else max(matmul.flops / rate(*kinds), size))
    for kernel in program.kernels:
        size = kernel.bytes / bandwidth
        own = rate(kind(kernel.dtype)) * (1.0 if chip.platform == "cuda" else KERNEL_SHARE)
        clocked = kernel.cycles / chip.clock if chip.clock else 0.0
        seconds += kernel.times * max(kernel.flops / own, size, clocked)
        memory += kernel.times * size
    moves = 0.0
    for move in program.moves:
        size = move.times * move.bytes / bandwidth
        moves += move.times * move.cycles / chip.clock if chip.clock and move.cycles else size
        memory += size
    communication = sum(each.times * links.duration(chip, each, devices) for each in program.collectives)
    n = chip.devices  # the devices of a chip share its rates; the compiler's cycles are the cycles of one device
    return Roofline(seconds, moves, communication * n, 0.0 if chip.platform == "cuda" else memory * n)


KERNEL_SHARE = 0.5
"""Assumed share of a TPU's peak rate for attention kernels, whose cycles are unknown."""
