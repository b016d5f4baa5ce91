"""TensorSpec: quantization of one operand of a matmul: element type, granularity, scales."""

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
    """Selection of the e4m3 block scales in NVFP4 training; see ``core.micro``.

    Attributes:
      headroom: divisor of the element's bound; the result is the target of a block's amax.
      scale_bound: largest block scale.
      four_over_six: whether a block maps its amax to 4 instead of 6 if that has the smaller squared error.
      eden: number of elements in a vector whose block scales are corrected to remove the bias of rounding; 0 disables
        the correction.
    """

    headroom: float = 1.0
    scale_bound: float = 448.0
    four_over_six: bool = False
    eden: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """Quantization of one operand.

    Attributes:
      dtype: name of the element type, a key of ``ELEMENTS``.
      granularity: elements that share a scale. ``per_tensor``: all elements. ``per_channel``: elements along the
        contraction. ``per_tile``: ``tile_size`` neighbours along the contraction. ``per_block``: ``tile_size``
        neighbours along the contraction by ``free_size`` along the free axes. The last tile or block of an axis can be
        smaller and has its own scale.
      calibration: statistic from which the scale is computed.
      scaling: ``dynamic`` (this step's statistic; a ``fixed`` calibration is static anyway), ``delayed`` (amax history,
        needs state and ``per_tensor``) or ``static`` (a scale that is passed to the op; with ``outer_scale`` it is the
        outer scale, and the scales of the tiles follow this step's statistic).
      rounding: ``nearest`` (ties to even) or ``stochastic``.
      tile_size: number of elements along the contraction that share a scale, for ``per_tile`` and ``per_block``.
      reciprocal: whether to multiply by 1/scale instead of dividing by scale. AQT multiplies, Qwix and flax divide; the
        last bit of a qvalue depends on this choice.
      free_size: number of elements along the free axes that share a scale, for ``per_block``.
      tiling: layout of tiles over several contraction axes. ``nested``: a tile contains neighbours in the flattened
        order; for example, a tile of 128 on axes of sizes (32, 64) is a block of 2 by 64. ``each_axis``: ``tile_size``
        along each axis, which it must divide (AQT's ``intmp``).
      scale_dtype: dtype of stored scales: float32, float8_e8m0fnu (powers of two) or float8_e4m3fn.
      scale_rounding: ``exact`` (as computed), ``up`` (to the next power of two) or ``nearest`` (to a neighbour in
        ``scale_dtype``; with float32, to a power of two).
      outer_scale: whether the tensor has one float32 scale in addition to the scales of its tiles, as in NVFP4.
      amax_bound: upper bound of the amax, or None; larger values are clipped, and their gradient is zero.
        Checkpoints store it as ``activation_scale_ub``.
      codec: name of a tensor format of ``jaxquant.formats`` that encodes elements and scales together, or None. With a
        codec, all other fields except ``dtype``, the type of its elements, have their defaults.
      micro: selection of e4m3 block scales and the outer scale in training; None computes them as checkpoints do.
      source: tensor from which a backward operand is quantized: the float tensor (``original``), or the operand of the
        forward matmul (``forward``). With ``forward``, only the qvalues and scales of that operand are saved.
      keeps_grid: whether decoded integers quantize to the same elements and scales again, as weights require. The scale
        is then ``statistic / max`` in few significant bits (``Element.scale_bits``, or float16's 11 if they reproduce a
        float32 statistic), and the largest element can lose up to one code. Every code is used: the statistic is
        ``max(x, -x · max / (max + 1))``. Only the native backend reads this field, and only for integers with dynamic
        scaling, the calibration ``absmax`` without a factor, rounding to nearest and exact scales.
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
                    f"TensorSpec {name} must be set for granularity {' and '.join(owners)} and for no other, "
                    f"got {name} {size!r} with granularity {self.granularity!r}"
                )
            if size is not None and size < 1:
                raise ValueError(f"TensorSpec {name} must be at least 1, got {size}")
        if self.scaling == "delayed" and self.granularity != "per_tensor":
            raise ValueError(f"TensorSpec scaling 'delayed' needs granularity 'per_tensor', got {self.granularity!r}")
        self.calibration.check_dtype(self.dtype)
        self._check_scale()
        if self.codec is not None and dataclasses.replace(self, codec=None) != TensorSpec(self.dtype):
            raise ValueError(
                f"TensorSpec with codec {self.codec!r} must not set fields other than dtype, because the codec defines "
                "the scales; remove the other fields"
            )

    def _check_scale(self) -> None:
        allowed = _SCALE_ROUNDINGS[self.scale_dtype]
        if self.scale_rounding not in allowed:
            raise ValueError(
                f"TensorSpec scale_rounding {self.scale_rounding!r} is not valid for scale_dtype {self.scale_dtype}; "
                f"use {' or '.join(map(repr, allowed))}"
            )
        is_plain = (self.scale_dtype, self.scale_rounding, self.outer_scale) == ("float32", "exact", False)
        is_given = self.outer_scale and self.micro is None and self.scaling == "static"
        if not is_plain and not is_given and (self.scaling != "dynamic" or not self.calibration.is_symmetric):
            raise ValueError(
                f"TensorSpec scale_dtype {self.scale_dtype}, scale_rounding {self.scale_rounding!r} and outer_scale "
                f"{self.outer_scale} need scaling 'dynamic' and a symmetric calibration, got {self.scaling!r} and "
                f"{self.calibration}"
            )
        if self.outer_scale and (self.tile_size is None or self.scale_dtype != "float8_e4m3fn"):
            raise ValueError(
                f"TensorSpec with outer_scale needs a tile_size and scale_dtype float8_e4m3fn, got tile_size "
                f"{self.tile_size} and scale_dtype {self.scale_dtype}"
            )
        if self.micro is not None and not self.outer_scale:
            raise ValueError("TensorSpec with micro needs outer_scale; set outer_scale=True")
        if self.micro is not None and (self.clips or self.calibration != Calibration()):
            raise ValueError(
                f"TensorSpec with micro needs calibration absmax and amax_bound None, got {self.calibration} and "
                f"{self.amax_bound}"
            )
        if self.micro is not None and self.micro.four_over_six and self.draws:
            raise ValueError(
                "TensorSpec with micro.four_over_six needs rounding 'nearest' and micro.eden 0, got "
                f"{self.rounding!r} and {self.micro.eden}"
            )
        if self.amax_bound is not None and not self.amax_bound > 0:
            raise ValueError(f"TensorSpec amax_bound must be above 0, got {self.amax_bound}")
        has_statistic = self.calibration.method != "fixed" and self.calibration.is_symmetric
        if self.amax_bound is not None and not (self.scaling == "dynamic" and has_statistic):
            raise ValueError(
                f"TensorSpec amax_bound {self.amax_bound:g} needs scaling 'dynamic' and a symmetric calibration other "
                f"than fixed, got {self.scaling!r} and {self.calibration}"
            )
        if self.scaling != "dynamic" and self.calibration != Calibration():
            raise ValueError(
                f"TensorSpec calibration {self.calibration} has no effect with scaling {self.scaling!r}; use "
                "calibration absmax"
            )

    @property
    def negative_factor(self) -> float:
        """Factor for the magnitude of negative values in the statistic."""
        top = element(self.dtype).max
        return top / (top + 1) if self.has_grid_scale else 1.0

    @property
    def has_grid_scale(self) -> bool:
        """Whether ``keeps_grid`` takes effect, so that integers reach ``-max - 1`` without a zero point."""
        is_plain = self.scaling == "dynamic" and self.calibration == Calibration() and self.rounding == "nearest"
        return self.keeps_grid and is_plain and self.scale_rounding == "exact" and element(self.dtype).kind == "int"

    @property
    def clips(self) -> bool:
        """Whether the forward pass can clip values, which zeroes their gradient."""
        return self.calibration.clips or self.amax_bound is not None

    @property
    def spreads_nan(self) -> bool:
        """Whether one statistic covers the complete tensor, so that one NaN makes every element NaN."""
        is_marked = self.scaling == "delayed" and element(self.dtype).kind == "int"  # integers cannot represent NaN
        is_read = is_marked or (self.scaling == "dynamic" and self.calibration.method != "fixed")
        return is_read and (self.outer_scale or self.granularity == "per_tensor")

    @property
    def row_dependence(self) -> Literal["row", "batch", "history"]:
        """Values that determine the scale and the rounding of a row; see ``Recipe.row_dependence``."""
        if self.scaling == "delayed":
            return "history"
        is_constant = self.calibration.method == "fixed" or (self.scaling == "static" and not self.outer_scale)
        has_tensor_scale = self.granularity == "per_tensor" or (self.outer_scale and self.scaling == "dynamic")
        is_shared = not is_constant and (has_tensor_scale or (self.free_size or 1) > 1)
        return "batch" if is_shared or self.draws else "row"

    @property
    def has_exact_sums(self) -> bool:
        """Whether sums of products of the elements, and the statistic behind their scale, are exact in any order."""
        is_whole = self.tile_size is None and self.codec is None
        has_maximum = self.calibration.is_symmetric and self.calibration.average is None
        return element(self.dtype).kind == "int" and is_whole and has_maximum

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn, for stochastic rounding or for EDEN's block scales."""
        return self.rounding == "stochastic" or (self.micro is not None and self.micro.eden > 0)


def keep_grid(spec: TensorSpec) -> TensorSpec:
    """Return the spec of a forward weight: integers with this step's statistic keep their grid."""
    is_integer = element(spec.dtype).kind == "int"
    return dataclasses.replace(spec, keeps_grid=is_integer and spec.scaling == "dynamic" and spec.codec is None)


_SIZES = {"tile_size": ("per_tile", "per_block"), "free_size": ("per_block",)}
"""Size field of ``TensorSpec`` -> granularities that require the field."""
_SCALE_ROUNDINGS = {
    "float32": ("exact", "up", "nearest"),
    "float8_e8m0fnu": ("up", "nearest"),
    "float8_e4m3fn": ("nearest",),
}
