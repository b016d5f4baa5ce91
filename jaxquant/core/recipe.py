"""Types of a recipe: specs of the six operands of a quantized matmul and its two gradients. Contains no recipe.

The forward matmul of ``y = lhs · rhs`` has the activation as ``lhs`` and the weight as ``rhs``. Its gradients are
``dlhs = grad · rhs`` (operands: ``dlhs.lhs`` the output gradient, ``dlhs.rhs`` the weight) and
``drhs = lhs · grad`` (operands: ``drhs.lhs`` the activation, ``drhs.rhs`` the output gradient).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Final, Literal

from jaxquant.core.dtypes import element
from jaxquant.core.quant_state import TENSORS
from jaxquant.core.tensor_spec import TensorSpec
from jaxquant.core.typed import Typed, check_fields, show

Matmul = Literal["fwd", "dlhs", "drhs"]
Side = Literal["lhs", "rhs"]
FORWARD: Final = "forward"


@dataclasses.dataclass(frozen=True, slots=True)
class Rotation:
    """A Hadamard rotation of both operands of a matmul along its contraction.

    Attributes:
      size: number of neighbours that are rotated together, a power of two.
      signs: ``fixed`` (TransformerEngine's, in runs of 16) or ``fresh`` (drawn in every backward pass).
    """

    size: int
    signs: Literal["fixed", "fresh"] = "fixed"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.size < 2 or self.size & (self.size - 1) or (self.signs == "fixed" and self.size % 16):
            raise ValueError(f"Rotation size must be a power of two (at least 16 if signs is fixed), got {self.size}")


Operand = TensorSpec | Literal["forward"] | None
"""A backward operand: its own spec, the forward's quantized tensor (``FORWARD``), or the float original (None)."""


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulSpec:
    """One of the three matmuls.

    Attributes:
      lhs, rhs: operands; None is float. ``FORWARD`` (backward matmuls only) reuses the forward's qvalues: their
        per-channel scale is multiplied into the other operand before that operand is quantized.
      accumulator: dtype name of the accumulator (``preferred_element_type``), or None for the result's dtype (float32
        if the result is float16).
      shards: number of blocks of the first contraction axis that are quantized separately; -1 is one block for each
        device that shares the axis, see ``ops.pieces.with_shards``.
      rotation: rotation of both operands before quantization, or None. If there are several contraction axes, the last
        axis with at least ``size`` elements is rotated, and tiles lie along that axis.
      arithmetic: arithmetic of a backward matmul that differs from ``Recipe.arithmetic``; otherwise None.
    """

    lhs: Operand = None
    rhs: Operand = None
    accumulator: str | None = None
    shards: int = 1
    rotation: Rotation | None = None
    arithmetic: Literal["exact", "lean"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        sides = (self.lhs, self.rhs)
        if self.rotation is not None and not all(isinstance(side, TensorSpec) for side in sides):
            raise ValueError(f"MatmulSpec with rotation needs a TensorSpec for lhs and rhs, got {sides}")
        if self.rotation is not None and self.shards != 1:
            raise ValueError(f"MatmulSpec with rotation needs shards 1, got {self.shards}")

    @property
    def is_late(self) -> bool:
        """Whether the residual of a backward matmul is quantized in the backward pass, as fresh signs require."""
        sides = [side for side in (self.lhs, self.rhs) if isinstance(side, TensorSpec)]
        return self.draws_signs or any(side.source == "forward" for side in sides)

    @property
    def draws_signs(self) -> bool:
        """Whether both operands are rotated with fresh signs."""
        return self.rotation is not None and self.rotation.signs == "fresh"


@dataclasses.dataclass(frozen=True, slots=True)
class DelayedSpec(Typed):
    """Parameters of delayed scaling; see ``core.delayed``.

    Attributes:
      amax_history_length: number of steps in the amax history.
      margin: exponent of the factor ``2**margin`` of the scale.
      amax_init: ``warmup`` (a tensor without history is scaled by its own amax; non-finite amaxes are not recorded)
        or ``flax`` (scale 1 at the first step, bit-identical to ``flax.linen.fp8_ops``).
    """

    amax_history_length: int = 1024
    margin: int = 0
    amax_init: Literal["warmup", "flax"] = "warmup"


@dataclasses.dataclass(frozen=True, slots=True)
class SparsitySpec(Typed):
    """N:M weight sparsity: ``n`` of every ``m`` weights along the contraction axis are kept.

    Attributes:
      n, m: kept weights and group size, 0 < n < m.
      start_step: first sparse step.
      update_step: number of steps between two mask updates.
    """

    n: int
    m: int
    start_step: int
    update_step: int


@dataclasses.dataclass(frozen=True)  # without slots, for cached properties
class Recipe:
    """Complete description of the numerics of one quantized training scheme.

    Attributes:
      name: config string.
      fwd, dlhs, drhs: specs of the three matmuls.
      delayed: parameters of delayed scaling, if an operand uses it.
      sparsity: N:M sparsity of the weight, or None.
      arithmetic: ``exact``: operands are scaled in float32. The kernel's gradient has the output gradient's dtype, or
        float32 for a float32 kernel if that is the accumulator. ``lean``: a bfloat16 operand is divided by its scale
        rounded to bfloat16, and the quotient is rounded to bfloat16, at half the cost on a TPU. The gradient of a
        float32 kernel is float32, which saves a pass over the gradient. The numerics are the same on every platform;
        docs/guide/delayed.md lists every rounding.
      shares_experts: whether all batch elements (experts) of a weight share per-tensor scales and their state;
        otherwise each has its own.
      expert_axes: mesh axes over which a ``jax.shard_map`` splits experts with separate scales, so that statistics are
        not reduced over them. Empty in the recipe table; set at trace time.

    Raises:
      ValueError: two specs use delayed scaling for one tensor; or experts share scales although the weight is sparse or
        no operand has a per-tensor scale.
    """

    name: str
    fwd: MatmulSpec
    dlhs: MatmulSpec = MatmulSpec()
    drhs: MatmulSpec = MatmulSpec()
    delayed: DelayedSpec | None = None
    sparsity: SparsitySpec | None = None
    arithmetic: Literal["exact", "lean"] = "exact"
    shares_experts: bool = False
    expert_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for tensor, operands in TENSORS.items():
            specs = [self.specs[operand] for operand in operands]
            first, second = (isinstance(spec, TensorSpec) and spec.scaling == "delayed" for spec in specs)
            if first and second and specs[0] != specs[1]:
                raise ValueError(
                    f"recipe {self.name!r} has one amax history for the {tensor}, so {' and '.join(operands)} need the "
                    f"same TensorSpec, got {show(specs[0])} and {show(specs[1])}"
                )
        if self.fwd.rotation is not None or self.fwd.is_late:
            raise ValueError(
                f"recipe {self.name!r} has a rotation or source in fwd; set rotation and source only in dlhs and drhs"
            )
        specs = [spec for spec in self.specs.values() if isinstance(spec, TensorSpec)]
        if self.shares_experts and not any(spec.granularity == "per_tensor" for spec in specs):
            raise ValueError(
                f"recipe {self.name!r} has no per-tensor scale that experts can share; set "
                "quantization_share_expert_scales to false"
            )
        if self.shares_experts and self.sparsity is not None:
            raise ValueError(
                f"recipe {self.name!r} has weight sparsity, for which experts cannot share scales; set "
                "quantization_share_expert_scales to false"
            )

    @functools.cached_property
    def specs(self) -> dict[str, Operand]:
        """Specs of the six operands by name, in the order fwd, dlhs, drhs and lhs, rhs."""
        return {
            f"{matmul}_{side}": getattr(getattr(self, matmul), side)
            for matmul in ("fwd", "dlhs", "drhs")
            for side in ("lhs", "rhs")
        }

    def resolve(self, matmul: Matmul, side: Side) -> TensorSpec | None:
        """Return the spec of an operand (of the forward operand for ``FORWARD``), or None if the operand is float."""
        operand = getattr(getattr(self, matmul), side)
        if operand == FORWARD:
            operand = self.fwd.rhs if matmul == "dlhs" else self.fwd.lhs
        return operand if isinstance(operand, TensorSpec) else None

    def spec_of(self, tensor: str) -> TensorSpec | None:
        """Return the spec of a tensor of ``TENSORS`` (one with delayed scaling if possible), or None if it is float."""
        specs = [spec for operand in TENSORS[tensor] if isinstance(spec := self.specs[operand], TensorSpec)]
        return next((spec for spec in specs if spec.scaling == "delayed"), next(iter(specs), None))

    def residual_kind(self, side: Side) -> Literal["forward", "own", "float"]:
        """Return the kind of residual that is saved of a forward operand for the backward pass.

        ``forward``: the operand of the forward matmul; ``own``: a separate quantization, made in the forward pass;
        ``float``: the original tensor.
        """
        matmul, operand = (self.drhs, self.drhs.lhs) if side == "lhs" else (self.dlhs, self.dlhs.rhs)
        if operand == FORWARD or (isinstance(operand, TensorSpec) and operand.source == "forward"):
            return "forward"
        return "own" if isinstance(operand, TensorSpec) and not matmul.is_late else "float"

    def for_matmul(self, matmul: Matmul) -> Recipe:
        """Return the recipe with the arithmetic of one of its matmuls."""
        own = getattr(self, matmul).arithmetic
        return self if own in (None, self.arithmetic) else dataclasses.replace(self, arithmetic=own)

    @functools.cached_property
    def is_stochastic(self) -> bool:
        """Whether an operand is rounded stochastically or rotated with fresh signs."""
        draws = self.dlhs.draws_signs or self.drhs.draws_signs
        return draws or any(isinstance(spec, TensorSpec) and spec.draws for spec in self.specs.values())

    @functools.cached_property
    def row_dependence(self) -> Literal["row", "batch", "history"]:
        """Values that determine the scale of a row of the forward activation, and so the row of the result.

        ``row``: the row (of a convolution: the example) or constants. ``batch``: also the other rows. ``history``: past
        steps, and before the first step the other rows. All rows share the weight, so its scales do not matter.
        """
        return self.fwd.lhs.row_dependence if isinstance(self.fwd.lhs, TensorSpec) else "row"

    @functools.cached_property
    def exact_contraction_size(self) -> int | None:
        """Largest contraction size whose forward sums are exact, so that their order does not matter; None if float.

        Sums of products of integers are exact in int32 up to ``(2³¹ - 1) / (|lhs| · |rhs|)`` products, where ``|lhs|``
        and ``|rhs|`` are the largest codes. ``ops.contract`` splits a longer sum; a longer sum of a convolution or a
        ragged matmul can overflow. Sums of tiles or shards are float, and so are average calibrations and zero points.
        """
        specs = [spec for spec in (self.fwd.lhs, self.fwd.rhs) if isinstance(spec, TensorSpec) and spec.has_exact_sums]
        if len(specs) < 2 or self.fwd.accumulator != "int32" or self.fwd.shards != 1:
            return None
        return (2**31 - 1) // math.prod(int(element(spec.dtype).max) + spec.has_grid_scale for spec in specs)

    @functools.cached_property
    def is_batch_invariant(self) -> bool:
        """Whether a row of the native forward result has the same bits in every batch, if int32 sums stay int32.

        ``jaxquant audit --invariant`` checks the int32 sums of a compiled program.
        """
        return self.row_dependence == "row" and self.exact_contraction_size is not None

    @functools.cached_property
    def has_opaque_gradient(self) -> bool:
        """Whether autodiff finds no tangent for a forward operand: integers or bytes whose scales have no tangent."""
        specs = [spec for spec in (self.resolve("fwd", "lhs"), self.resolve("fwd", "rhs")) if spec is not None]
        known = [s for s in specs if s.scaling == "static" or s.calibration.method == "fixed" or s.has_grid_scale]
        return any(spec.codec is not None for spec in specs) or any(element(spec.dtype).kind == "int" for spec in known)

    @functools.cached_property
    def matches_flax(self) -> bool:
        """Whether delayed scaling follows ``flax.linen.fp8_ops`` bit for bit."""
        return self.delayed is not None and self.delayed.amax_init == "flax"

    @functools.cached_property
    def is_lean(self) -> bool:
        """Whether the arithmetic is lean; flax mode always uses flax's arithmetic."""
        return self.arithmetic == "lean" and not self.matches_flax

    @functools.cached_property
    def shares_gradient(self) -> bool:
        """Whether the output gradient is quantized once, for both backward matmuls."""
        grad = self.dlhs.lhs
        if not isinstance(grad, TensorSpec) or grad != self.drhs.rhs:
            return False
        is_plain = self.dlhs.rhs == self.drhs.lhs == FORWARD and self.dlhs.shards == self.drhs.shards == 1
        sides = (grad, self.resolve("fwd", "lhs"), self.resolve("fwd", "rhs"))
        is_whole = all(each is not None and each.granularity == "per_tensor" for each in sides)
        return self.is_lean and is_plain and is_whole

    @functools.cached_property
    def is_stateful(self) -> bool:
        """Whether the op needs quant state (amax histories or a sparsity mask)."""
        return self.delayed is not None or self.sparsity is not None
