"""Types of a recipe: how each of the six operands of a quantized matmul and its two gradients is made. No numbers here.

The forward matmul of ``y = lhs · rhs`` has the activation as ``lhs`` and the weight as ``rhs``. Its gradients are
``dlhs = grad · rhs`` (operands: ``dlhs.lhs`` the output gradient, ``dlhs.rhs`` the weight) and
``drhs = lhs · grad`` (operands: ``drhs.lhs`` the activation, ``drhs.rhs`` the output gradient).
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

from jaxquant.core.calibration import Calibration
from jaxquant.core.dtypes import element

Granularity = Literal["per_tensor", "per_channel", "per_tile"]
FORWARD: Final = "forward"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """How one operand becomes a quantized tensor.

    Attributes:
      dtype: element type by name, a key of ``ELEMENTS``.
      granularity: who shares a scale. ``per_tensor``: all elements. ``per_channel``: elements along the contraction.
        ``per_tile``: ``tile_size`` neighbours along every contraction axis.
      calibration: statistic that gives the scale.
      scaling: ``dynamic`` (this step's statistic; a ``fixed`` calibration is static by itself) or ``delayed``
        (amax history, needs state and ``per_tensor``).
      rounding: ``nearest`` (ties to even) or ``stochastic``.
      tile_size: elements that share a scale, for ``per_tile``.
      reciprocal: multiply by 1/scale instead of dividing by scale. AQT multiplies, Qwix and flax divide; the last
        bit of a qvalue depends on it.
    """

    dtype: str
    granularity: Granularity = "per_channel"
    calibration: Calibration = Calibration()
    scaling: Literal["dynamic", "delayed"] = "dynamic"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    tile_size: int | None = None
    reciprocal: bool = False

    def __post_init__(self) -> None:
        element(self.dtype)
        if (self.granularity == "per_tile") != (self.tile_size is not None):
            raise ValueError(
                f"TensorSpec granularity {self.granularity!r} with tile_size {self.tile_size!r}: "
                "a tile_size belongs to per_tile and per_tile needs one"
            )
        if self.scaling == "delayed" and self.granularity != "per_tensor":
            raise ValueError(f"TensorSpec scaling 'delayed' needs granularity 'per_tensor', got {self.granularity!r}")
        self.calibration.check_dtype(self.dtype)


Operand = TensorSpec | Literal["forward"] | None
"""A backward operand: its own spec, the forward's quantized tensor (``FORWARD``), or the float original (None)."""


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulSpec:
    """One of the three matmuls.

    Attributes:
      lhs, rhs: operands; None is float. ``FORWARD`` (backward matmuls only) reuses the forward's qvalues: their
        per-channel scale is multiplied into the other operand before that one is quantized.
      accumulator: dtype name asked of the matmul (``preferred_element_type``), or None for the result's dtype
        (float32 where the result is float16).
      shards: the first contraction axis is cut into this many blocks, each quantized by itself (1: whole).
    """

    lhs: Operand = None
    rhs: Operand = None
    accumulator: str | None = None
    shards: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class DelayedSpec:
    """Delayed scaling: see ``core.delayed``.

    Attributes:
      amax_history_length: steps that the amax history remembers.
      margin: the scale is multiplied by ``2**margin``.
      amax_init: ``warmup`` (a tensor without history is scaled by its own amax; non-finite amaxes are not recorded)
        or ``flax`` (scale 1 at the first step, bit-identical to ``flax.linen.fp8_ops``).
    """

    amax_history_length: int = 1024
    margin: int = 0
    amax_init: Literal["warmup", "flax"] = "warmup"


@dataclasses.dataclass(frozen=True, slots=True)
class SparsitySpec:
    """N:M weight sparsity: ``n`` of every ``m`` weights kept along the contraction axis.

    Attributes:
      n, m: kept weights and group size, 0 < n < m.
      start_step: dense before this step.
      update_step: steps between two mask updates.
    """

    n: int
    m: int
    start_step: int
    update_step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """All numbers of one quantized training scheme.

    Attributes:
      name: the config string.
      fwd, dlhs, drhs: the three matmuls.
      delayed: parameters of delayed scaling, where an operand asks for it.
      sparsity: N:M sparsity of the weight, or None.
    """

    name: str
    fwd: MatmulSpec
    dlhs: MatmulSpec = MatmulSpec()
    drhs: MatmulSpec = MatmulSpec()
    delayed: DelayedSpec | None = None
    sparsity: SparsitySpec | None = None

    @property
    def specs(self) -> dict[str, Operand]:
        """The six operands by name, in the order fwd, dlhs, drhs and lhs, rhs."""
        return {
            f"{matmul}_{side}": getattr(getattr(self, matmul), side)
            for matmul in ("fwd", "dlhs", "drhs")
            for side in ("lhs", "rhs")
        }

    @property
    def is_stochastic(self) -> bool:
        """Whether an operand is rounded stochastically."""
        return any(isinstance(spec, TensorSpec) and spec.rounding == "stochastic" for spec in self.specs.values())

    @property
    def is_flax(self) -> bool:
        """Whether delayed scaling follows ``flax.linen.fp8_ops`` bit for bit."""
        return self.delayed is not None and self.delayed.amax_init == "flax"

    @property
    def is_stateful(self) -> bool:
        """Whether the op needs quant state (amax histories or a sparsity mask)."""
        return self.delayed is not None or self.sparsity is not None
