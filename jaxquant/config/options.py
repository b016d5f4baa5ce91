"""Options: config fields that change a recipe, the groups of these fields, and the change that each group makes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

from jaxquant.core import typed
from jaxquant.core.calibration import Calibration, parse_calibration
from jaxquant.core.recipe import FORWARD, DelayedSpec, MatmulSpec, Operand, Recipe, SparsitySpec, TensorSpec

OPERANDS = ("fwd_lhs", "fwd_rhs", "dlhs_lhs", "dlhs_rhs", "drhs_lhs", "drhs_rhs")
"""Order of the six values of ``constant_bound_config`` and ``per_tensor_scales``, with AQT's names.

In AQT the output gradient is the lhs of both backward matmuls. In jaxquant ``drhs = lhs · grad``, so AQT's drhs_lhs is
``drhs.rhs`` here, and AQT's drhs_rhs is ``drhs.lhs``.
"""
_RECIPE_OPERANDS = (("fwd", "lhs"), ("fwd", "rhs"), ("dlhs", "lhs"), ("dlhs", "rhs"), ("drhs", "rhs"), ("drhs", "lhs"))


def _option(group: str, default: Any, least: float | None = None, most: float = math.inf, condition: str = "") -> Any:
    """Declare an option.

    Args:
      group: name of the option's group in ``GROUPS``.
      default: value if a config does not set the option.
      least, most: range of a number; ``least`` is None if the option is not a number.
      condition: text that replaces "at least …" in errors, or "".
    """
    return dataclasses.field(default=default, metadata={"group": group, "range": (least, most, condition)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Fields of QuantConfig that change a recipe, with MaxText's defaults; ``QuantConfig`` documents each field."""

    quantization_local_shard_count: int = _option(
        "shards", -1, -1, 2**20, "-1 (one block for each device), 0 (float weight gradient) or a number of blocks"
    )
    constant_bound_config: tuple[float, ...] | str = _option("bounds", ())
    per_tensor_scales: tuple[bool, ...] = _option("bounds", ())
    weight_quantization_calibration_method: str = _option("weight_quantization_calibration_method", "absmax")
    act_quantization_calibration_method: str = _option("act_quantization_calibration_method", "absmax")
    bwd_quantization_calibration_method: str = _option("bwd_quantization_calibration_method", "absmax")
    drhs_grad_quantization_calibration_method: str = _option("drhs_grad_quantization_calibration_method", "")
    weight_sparsity_n: int | None = _option("sparsity", None)
    weight_sparsity_m: int | None = _option("sparsity", None, 1, 2**16)
    weight_sparsity_start_step: int = _option("sparsity", 50, 0, 2**31 - 1)
    weight_sparsity_update_step: int = _option("sparsity", 10, 1, 2**31 - 1)
    amax_history_length: int = _option("delayed", DelayedSpec().amax_history_length, 1, 2**20)
    amax_margin: int = _option("delayed", DelayedSpec().margin, -64, 64)
    amax_init: Literal["warmup", "flax"] = _option("delayed", DelayedSpec().amax_init)
    quantization_share_expert_scales: bool = _option("experts", False)
    four_over_six: bool = _option("four over six", False)
    scale_fmt: Literal["", "ue8m0"] = _option("scale format", "")
    activation_scale_ub: float | None = _option("activation bound", None, 1e-30, 1e30)
    square_weight_blocks: bool = _option("square blocks", False)
    quant_cfg_path: str = _option("file", "")
    replicate_quant_scale: bool = _option("stored scales", False)


@dataclasses.dataclass(frozen=True, slots=True)
class OptionGroup:
    """Config fields that change a recipe together; each ``Options`` field names its group.

    Attributes:
      change: function (recipe, options) -> changed recipe; None if the group does not change numerics.
      check: function that raises for values that no recipe supports; None if the checks of type and range are enough.
    """

    change: Callable[[Recipe, Options], Recipe] | None = None
    check: Callable[[Options], object] | None = None


def read_calibration(options: Options, field: str) -> Calibration:
    """Parse the text of a calibration field.

    Raises:
      ValueError: the text is invalid; the message names the field.
    """
    text = getattr(options, field)
    if field == "drhs_grad_quantization_calibration_method":
        text = text or options.bwd_quantization_calibration_method
    try:
        return parse_calibration(text)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def read_bounds(value: str | Sequence[float]) -> tuple[float, ...]:
    """Read ``constant_bound_config``: empty, six numbers, or six numbers in a comma-separated string.

    Raises:
      ValueError: the count is wrong, or a bound is not a finite number above 0.
    """
    if isinstance(value, str):
        try:
            value = [float(word) for word in value.split(",")] if value.strip() else []
        except ValueError:
            raise ValueError(f"constant_bound_config {typed.show(value)} must be six comma-separated numbers") from None
    if len(value) not in (0, len(OPERANDS)):
        raise ValueError(f"constant_bound_config must have 6 bounds ({', '.join(OPERANDS)}) or none, got {len(value)}")
    for name, bound in zip(OPERANDS, value, strict=False):
        if not 1e-30 <= bound <= 1e30:
            raise ValueError(f"constant_bound_config: bound {name} must be between 1e-30 and 1e30, got {bound:g}")
    return tuple(float(bound) for bound in value)


def check(options: Options) -> None:
    """Raise for values that no recipe supports, even if the selected recipe does not read them.

    Args:
      options: fields of a config.

    Raises:
      ValueError: a value is out of range; the message has the field, the condition and the value.
    """
    for field in dataclasses.fields(Options):
        value, (least, most, condition) = getattr(options, field.name), field.metadata["range"]
        if None not in (least, value) and not least <= value <= most:
            bound = f"at most {most}" if value > most else condition or f"at least {least}"
            raise ValueError(f"{field.name} must be {bound}, got {typed.show(value)}")
    for group in GROUPS.values():
        if group.check is not None:
            group.check(options)


def apply_groups(recipe: Recipe | None, groups: Collection[str], options: Options) -> Recipe | None:
    """Apply the options that a row reads to the recipe of the row.

    Args:
      recipe: recipe of a row, or None.
      groups: names of the groups that the row reads.
      options: fields of a config.

    Raises:
      ValueError: the dtype does not support a calibration.
    """
    for name, group in GROUPS.items():
        if recipe is not None and name in groups and group.change is not None:
            recipe = group.change(recipe, options)
    return recipe


# -- blocks of the weight gradient -------------------------------------------------------------------------------------


def _apply_shard_count(recipe: Recipe, options: Options) -> Recipe:
    """Split the contraction of the weight gradient into blocks; a count of 0 keeps that matmul in float."""
    count = options.quantization_local_shard_count
    drhs = dataclasses.replace(recipe.drhs, shards=count) if count else MatmulSpec()
    return dataclasses.replace(recipe, drhs=drhs)


# -- calibration -------------------------------------------------------------------------------------------------------

_CALIBRATED = {
    "act_quantization_calibration_method": (("fwd", "lhs"), ("drhs", "lhs")),
    "weight_quantization_calibration_method": (("fwd", "rhs"), ("dlhs", "rhs")),
    "bwd_quantization_calibration_method": (("dlhs", "lhs"), ("drhs", "rhs")),
    "drhs_grad_quantization_calibration_method": (("drhs", "rhs"),),
}
"""Operands that each calibration field changes; an operand that reuses the forward operand is not listed."""


def _set_calibration(spec: TensorSpec, calibration: Calibration) -> TensorSpec:
    if calibration.method == "fixed":  # one scale per tensor
        spec = dataclasses.replace(spec, granularity="per_tensor", tile_size=None, free_size=None)
    return dataclasses.replace(spec, calibration=calibration)


def _calibration_group(field: str) -> OptionGroup:
    def change_calibration(recipe: Recipe, options: Options) -> Recipe:
        change = functools.partial(_set_calibration, calibration=read_calibration(options, field))
        try:
            return _change(recipe, _CALIBRATED[field], change)
        except ValueError as error:  # an asymmetric range on a float dtype
            raise ValueError(f"{field}: {error}") from None

    return OptionGroup(change_calibration, functools.partial(read_calibration, field=field))


# -- constant bounds ---------------------------------------------------------------------------------------------------


def _check_bounds(options: Options) -> None:
    bounds, flags = read_bounds(options.constant_bound_config), options.per_tensor_scales
    if len(flags) not in (0, len(OPERANDS)):
        raise ValueError(f"per_tensor_scales must have 6 flags ({', '.join(OPERANDS)}) or none, got {len(flags)}")
    if bounds and not all(flags):
        raise ValueError("per_tensor_scales has no effect with constant_bound_config; remove one of the two fields")


def _apply_bounds(recipe: Recipe, options: Options) -> Recipe:
    bounds, per_tensor = read_bounds(options.constant_bound_config), options.per_tensor_scales
    for place, bound in zip(_RECIPE_OPERANDS, bounds, strict=False):
        fixed = Calibration("fixed", 1.0, -bound, bound)
        recipe = _change(recipe, [place], functools.partial(_set_calibration, calibration=fixed))
    if bounds:
        return recipe
    places = [place for place, is_whole in zip(_RECIPE_OPERANDS, per_tensor, strict=False) if not is_whole]
    return _change(recipe, places, lambda spec: dataclasses.replace(spec, granularity="per_channel"))


def _change(recipe: Recipe, places: Iterable[tuple[str, str]], change: Callable[[TensorSpec], Operand]) -> Recipe:
    """Return the recipe after changing the spec of each listed operand; operands without their own spec stay."""
    for matmul, side in places:
        spec = getattr(getattr(recipe, matmul), side)
        if isinstance(spec, TensorSpec):
            changed = dataclasses.replace(getattr(recipe, matmul), **{side: change(spec)})
            recipe = dataclasses.replace(recipe, **{matmul: changed})
    return recipe


# -- delayed scaling, sparsity -----------------------------------------------------------------------------------------


def _apply_delayed(recipe: Recipe, options: Options) -> Recipe:
    delayed = DelayedSpec(options.amax_history_length, options.amax_margin, options.amax_init)
    return dataclasses.replace(recipe, delayed=delayed)


def _check_sparsity(options: Options) -> None:
    n, m = options.weight_sparsity_n, options.weight_sparsity_m
    if (n is None) != (m is None):
        raise ValueError(f"weight_sparsity_n and weight_sparsity_m must be set together, got {n} and {m}")
    if n is not None and m is not None and not 0 < n < m:
        raise ValueError(f"weight_sparsity_n must be above 0 and below weight_sparsity_m, got {n} and {m}")
    for field in ("weight_sparsity_start_step", "weight_sparsity_update_step"):
        value = getattr(options, field)
        if n is None and value != getattr(Options, field):
            raise ValueError(f"{field} {value} has no effect; set weight_sparsity_n and weight_sparsity_m too")


def _apply_sparsity(recipe: Recipe, options: Options) -> Recipe:
    n, m = options.weight_sparsity_n, options.weight_sparsity_m
    if n is None or m is None:
        return recipe
    sparsity = SparsitySpec(n, m, options.weight_sparsity_start_step, options.weight_sparsity_update_step)
    return dataclasses.replace(recipe, sparsity=sparsity)


# -- experts -----------------------------------------------------------------------------------------------------------


def _apply_experts(recipe: Recipe, options: Options) -> Recipe:
    return dataclasses.replace(recipe, shares_experts=options.quantization_share_expert_scales)


# -- FP4 ---------------------------------------------------------------------------------------------------------------


def _apply_four_over_six(recipe: Recipe, options: Options) -> Recipe:
    """Map the amax of each block to 4 or 6, for operands that are rounded to nearest."""

    def change(spec: TensorSpec) -> TensorSpec:
        if spec.micro is None or spec.draws:
            return spec
        return dataclasses.replace(spec, micro=dataclasses.replace(spec.micro, four_over_six=True, scale_bound=256.0))

    return _change(recipe, _RECIPE_OPERANDS, change) if options.four_over_six else recipe


# -- tiles and blocks --------------------------------------------------------------------------------------------------


def _apply_scale_format(recipe: Recipe, options: Options) -> Recipe:
    """Round every scale up to a power of two."""
    places = _RECIPE_OPERANDS if options.scale_fmt == "ue8m0" else ()
    return _change(recipe, places, lambda spec: dataclasses.replace(spec, scale_rounding="up"))


def _apply_activation_bound(recipe: Recipe, options: Options) -> Recipe:
    """Clip the amax from which the activation's scales are computed, in both matmuls that read the activation."""
    bound, method = options.activation_scale_ub, "act_quantization_calibration_method"
    if bound is not None and read_calibration(options, method).method == "fixed":
        raise ValueError(
            f"activation_scale_ub {bound:g} has no effect with {method} {getattr(options, method)!r}, which does not "
            "read the largest value of a tensor; remove one of the two fields"
        )
    return _change(recipe, _CALIBRATED[method], lambda spec: dataclasses.replace(spec, amax_bound=bound))


def _apply_square_blocks(recipe: Recipe, options: Options) -> Recipe:
    """Return the recipe with square weight blocks, so that forward and dlhs share one quantized weight."""
    if not options.square_weight_blocks:
        return recipe
    recipe = _change(
        recipe,
        [("fwd", "rhs")],
        lambda spec: dataclasses.replace(spec, granularity="per_block", free_size=spec.tile_size),
    )
    return _change(recipe, [("dlhs", "rhs")], lambda spec: FORWARD)


# -- the table ---------------------------------------------------------------------------------------------------------

GROUPS: dict[str, OptionGroup] = {
    **{field: _calibration_group(field) for field in _CALIBRATED},
    "bounds": OptionGroup(_apply_bounds, _check_bounds),
    "shards": OptionGroup(_apply_shard_count),
    "delayed": OptionGroup(_apply_delayed),
    "sparsity": OptionGroup(_apply_sparsity, _check_sparsity),
    "experts": OptionGroup(_apply_experts),
    "four over six": OptionGroup(_apply_four_over_six),
    "scale format": OptionGroup(_apply_scale_format),
    "activation bound": OptionGroup(_apply_activation_bound),
    "square blocks": OptionGroup(_apply_square_blocks),
    "stored scales": OptionGroup(),
    "file": OptionGroup(),
}
"""All groups of options, in the order in which they are checked and applied; rows of ``RECIPES`` name these groups."""

CALIBRATION = tuple(_CALIBRATED)
"""Names of the groups of the calibration fields."""

PROBE = Options(
    quantization_local_shard_count=2,
    weight_quantization_calibration_method="absmax,0.5",
    act_quantization_calibration_method="absmax,0.5",
    bwd_quantization_calibration_method="absmax,0.5",
    drhs_grad_quantization_calibration_method="absmax,0.5",
    per_tensor_scales=(False,) * len(OPERANDS),
    weight_sparsity_n=1,
    weight_sparsity_m=2,
    amax_margin=1,
    quantization_share_expert_scales=True,
    four_over_six=True,
    scale_fmt="ue8m0",
    activation_scale_ub=1.0,
    square_weight_blocks=True,
)
"""Options with values that make each group change the recipe of every row that reads the group."""
