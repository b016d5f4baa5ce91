"""TensorSpec: how one operand of a matmul is quantized: its element, who shares a scale, and how scales are made."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxquant.core.calibration import Calibration
from jaxquant.core.dtypes import element
from jaxquant.core.typed import Typed, check_fields

Granularity = Literal["per_tensor", "per_channel", "per_tile", "per_block"]
ScaleDtype = Literal["float32", "float8_e8m0fnu", "float8_e4m3fn"]


@dataclasses.dataclass(frozen=True, slots=True)
class Micro(Typed):
    """How NVFP4 training chooses the e4m3 scales of blocks; see ``core.micro``.

    Attributes:
      headroom: a block's amax becomes the element's bound divided by this.
      scale_bound: the largest block scale.
      four_over_six: whether a block whose squared error is less with its amax at 4 takes that, where 6 is the bound.
      eden: elements of a vector whose block scales are corrected so that rounding has no bias; 0 for none.
    """

    headroom: float = 1.0
    scale_bound: float = 448.0
    four_over_six: bool = False
    eden: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """How one operand becomes a quantized tensor.

    Attributes:
      dtype: element type by name, a key of ``ELEMENTS``.
      granularity: who shares a scale. ``per_tensor``: all elements. ``per_channel``: elements along the contraction.
        ``per_tile``: ``tile_size`` neighbours along the contraction. ``per_block``: ``tile_size`` neighbours along the
        contraction by ``free_size`` along the free axes. The last tile or block of an axis may be smaller and has a
        scale of its own.
      calibration: statistic that gives the scale.
      scaling: ``dynamic`` (this step's statistic; a ``fixed`` calibration is static by itself), ``delayed`` (amax
        history, needs state and ``per_tensor``) or ``static`` (a scale that is passed to the op; with ``outer_scale``
        it is the outer scale, and the scales of the tiles follow this step's statistic).
      rounding: ``nearest`` (ties to even) or ``stochastic``.
      tile_size: elements along the contraction that share a scale, for ``per_tile`` and ``per_block``.
      reciprocal: multiply by 1/scale instead of dividing by scale. AQT multiplies, Qwix and flax divide; the last
        bit of a qvalue depends on it.
      free_size: elements along the free axes that share a scale, for ``per_block``.
      tiling: what a tile is where a contraction has several axes. ``nested``: neighbours in the flattened order, as far
        as axes nest: with a tile of 128, axes (32, 64) have blocks of 2 by 64. ``each_axis``: ``tile_size`` along each
        axis, which it must divide (AQT's ``intmp``).
      scale_dtype: dtype in which scales are kept: float32, float8_e8m0fnu (powers of two) or float8_e4m3fn.
      scale_rounding: ``exact`` (as computed), ``up`` (to the next power of two) or ``nearest`` (to a neighbour in
        ``scale_dtype``; with float32, to a power of two).
      outer_scale: whether the tensor has one float32 scale above those of its tiles, as NVFP4 has.
      amax_bound: largest amax that a scale may follow, None for no bound; what lies above is clipped and gets no
        gradient. ``activation_scale_ub`` of checkpoints.
      codec: name of a tensor format of ``jaxquant.formats`` whose encoder makes elements and scales together; every
        other field but ``dtype``, the type of its elements, has its default then. None for the fields above.
      micro: how e4m3 scales of blocks and the one above them are chosen in training, None for as checkpoints have them.
      source: what a backward operand is made of: the float tensor, or what the forward matmul read (``forward``), of
        which alone its bytes are kept then.
      keeps_grid: whether decoded integers quantize to the same elements and scales again, as weights need it. The scale
        is then ``statistic / max`` in few significant bits (``Element.scale_bits``, or float16's 11 if these give a
        float32 statistic back), and the largest element may lose up to one code. Every code is used: the statistic is
        ``max(x, -x · max / (max + 1))``. Only the native backend reads it, and only of integers with dynamic scaling,
        the plain calibration ``absmax``, rounding to nearest and exact scales.
    """

    dtype: str
    granularity: Granularity = "per_channel"
    calibration: Calibration = Calibration()
    scaling: Literal["dynamic", "delayed", "static"] = "dynamic"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    tile_size: int | None = None
    reciprocal: bool = False
    free_size: int | None = None
    tiling: Literal["nested", "each_axis"] = "nested"
    scale_dtype: ScaleDtype = "float32"
    scale_rounding: Literal["exact", "up", "nearest"] = "exact"
    outer_scale: bool = False
    amax_bound: float | None = None
    codec: str | None = None
    micro: Micro | None = None
    source: Literal["original", "forward"] = "original"
    keeps_grid: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        element(self.dtype)
        for name, owners in _SIZES.items():
            size = getattr(self, name)
            if (self.granularity in owners) != (size is not None):
                raise ValueError(
                    f"TensorSpec granularity {self.granularity!r} with {name} {size!r}: "
                    f"a {name} belongs to {' and '.join(owners)}, which {'need' if len(owners) > 1 else 'needs'} one"
                )
            if size is not None and size < 1:
                raise ValueError(f"TensorSpec {name} must be at least 1, got {size}")
        if self.scaling == "delayed" and self.granularity != "per_tensor":
            raise ValueError(f"TensorSpec scaling 'delayed' needs granularity 'per_tensor', got {self.granularity!r}")
        self.calibration.check_dtype(self.dtype)
        self._check_scale()
        if self.codec is not None and dataclasses.replace(self, codec=None) != TensorSpec(self.dtype):
            raise ValueError(
                f"TensorSpec codec {self.codec!r} makes its own scales; leave all fields but dtype at their defaults"
            )

    def _check_scale(self) -> None:
        allowed = _SCALE_ROUNDINGS[self.scale_dtype]
        if self.scale_rounding not in allowed:
            raise ValueError(
                f"TensorSpec scale_rounding {self.scale_rounding!r} does not give a {self.scale_dtype}; "
                f"use {' or '.join(map(repr, allowed))}"
            )
        is_plain = (self.scale_dtype, self.scale_rounding, self.outer_scale) == ("float32", "exact", False)
        is_given = self.outer_scale and self.micro is None and self.scaling == "static"
        if not is_plain and not is_given and (self.scaling != "dynamic" or not self.calibration.is_symmetric):
            raise ValueError(
                f"TensorSpec scale_dtype {self.scale_dtype}, scale_rounding {self.scale_rounding!r} and outer_scale "
                f"{self.outer_scale} need dynamic scaling and a symmetric calibration, got {self.scaling!r} and "
                f"{self.calibration}"
            )
        if self.outer_scale and (self.tile_size is None or self.scale_dtype != "float8_e4m3fn"):
            raise ValueError(
                f"TensorSpec outer_scale belongs to tiles with scales in float8_e4m3fn, got granularity "
                f"{self.granularity!r} and scale_dtype {self.scale_dtype}"
            )
        if self.micro is not None and not self.outer_scale:
            raise ValueError("TensorSpec micro belongs to blocks with an outer_scale, and outer_scale is False")
        if self.micro is not None and (self.clips or self.calibration != Calibration()):
            raise ValueError(
                f"TensorSpec micro reads the amax of each block itself; calibration {self.calibration} and amax_bound "
                f"{self.amax_bound} change that, use absmax and None"
            )
        if self.micro is not None and self.micro.four_over_six and self.draws:
            raise ValueError(
                "TensorSpec micro.four_over_six compares errors of rounding to nearest, and this spec draws; use it "
                "without stochastic rounding and without eden"
            )
        if self.amax_bound is not None and not self.amax_bound > 0:
            raise ValueError(f"TensorSpec amax_bound must be above 0, got {self.amax_bound}")
        has_statistic = self.calibration.method != "fixed" and self.calibration.is_symmetric
        if self.amax_bound is not None and not (self.scaling == "dynamic" and has_statistic):
            raise ValueError(
                f"TensorSpec amax_bound {self.amax_bound:g} bounds this step's statistic; scaling {self.scaling!r} "
                f"with calibration {self.calibration} has none"
            )
        if self.scaling != "dynamic" and self.calibration != Calibration():
            raise ValueError(
                f"TensorSpec calibration {self.calibration} is of this step's statistic, which scaling "
                f"{self.scaling!r} does not read; use absmax"
            )

    @property
    def share_below(self) -> float:
        """Factor of the magnitude of negative values in the statistic."""
        top = element(self.dtype).max
        return top / (top + 1) if self.has_grid_scale else 1.0

    @property
    def has_grid_scale(self) -> bool:
        """Whether the scale is chosen as ``keeps_grid`` says, and integers reach ``-max - 1`` without a zero point."""
        is_plain = self.scaling == "dynamic" and self.calibration == Calibration() and self.rounding == "nearest"
        return self.keeps_grid and is_plain and self.scale_rounding == "exact" and element(self.dtype).kind == "int"

    @property
    def clips(self) -> bool:
        """Whether values can lie outside the covered range, so that their gradient is zero."""
        return self.calibration.clips or self.amax_bound is not None

    @property
    def spreads_nan(self) -> bool:
        """Whether one number is made of this step's whole tensor, so that one NaN in it makes every element NaN."""
        is_marked = self.scaling == "delayed" and element(self.dtype).kind == "int"  # which hold no NaN themselves
        is_read = is_marked or (self.scaling == "dynamic" and self.calibration.method != "fixed")
        return is_read and (self.outer_scale or self.granularity == "per_tensor")

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn: for stochastic rounding, or for EDEN's block scales."""
        return self.rounding == "stochastic" or (self.micro is not None and self.micro.eden > 0)


def keeping_grid(spec: TensorSpec) -> TensorSpec:
    """Return the spec of a forward weight: integers keep their grid if the scale is of this step's statistic."""
    is_integer = element(spec.dtype).kind == "int"
    return dataclasses.replace(spec, keeps_grid=is_integer and spec.scaling == "dynamic" and spec.codec is None)


_SIZES = {"tile_size": ("per_tile", "per_block"), "free_size": ("per_block",)}
"""The granularities that each size belongs to."""
_SCALE_ROUNDINGS = {
    "float32": ("exact", "up", "nearest"),
    "float8_e8m0fnu": ("up", "nearest"),
    "float8_e4m3fn": ("nearest",),
}
