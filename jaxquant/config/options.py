"""Options: what each config field does to the numbers of a recipe's row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax

from jaxquant.config import loader
from jaxquant.config.recipes import (
    BOUND_OPTIONS,
    CALIBRATION_OPTIONS,
    DELAYED_OPTIONS,
    SHARD_OPTIONS,
    SPARSITY_OPTIONS,
    RecipeRow,
)
from jaxquant.core.calibration import Calibration, parse_calibration
from jaxquant.core.recipe import DelayedSpec, MatmulSpec, Recipe, SparsitySpec, TensorSpec

OPERANDS = ("fwd_lhs", "fwd_rhs", "dlhs_lhs", "dlhs_rhs", "drhs_lhs", "drhs_rhs")
"""Order of the six values of ``constant_bound_config`` and ``per_tensor_scales``, in AQT's meaning.

Both backward matmuls of AQT have the output gradient as their lhs. Ours is ``drhs = lhs · grad``, so AQT's drhs_lhs
is our ``drhs.rhs`` and AQT's drhs_rhs our ``drhs.lhs``.
"""
_OURS = (("fwd", "lhs"), ("fwd", "rhs"), ("dlhs", "lhs"), ("dlhs", "rhs"), ("drhs", "rhs"), ("drhs", "lhs"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The fields of QuantConfig that change a recipe, with MaxText's defaults; see ``QuantConfig`` for each."""

    quantization_local_shard_count: int = -1
    constant_bound_config: tuple[float, ...] | str = ()
    per_tensor_scales: tuple[bool, ...] = ()
    weight_quantization_calibration_method: str = "absmax"
    act_quantization_calibration_method: str = "absmax"
    bwd_quantization_calibration_method: str = "absmax"
    weight_sparsity_n: int | None = None
    weight_sparsity_m: int | None = None
    weight_sparsity_start_step: int = 50
    weight_sparsity_update_step: int = 10
    amax_history_length: int = 1024
    amax_margin: int = 0
    amax_init: Literal["warmup", "flax"] = "warmup"
    quant_cfg_path: str = ""
    replicate_quant_scale: bool = False


def read_calibration(options: Options, field: str) -> Calibration:
    """Parse one of the three calibration strings.

    Raises:
      ValueError: names the field and what is wrong.
    """
    try:
        return parse_calibration(getattr(options, field))
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def read_bounds(value: str | Sequence[float]) -> tuple[float, ...]:
    """Read ``constant_bound_config``: nothing, six numbers, or six numbers in a comma-separated string.

    Raises:
      ValueError: another count, a word that is no number, or a bound that is not finite and above 0.
    """
    if isinstance(value, str):
        try:
            value = [float(word) for word in value.split(",")] if value.strip() else []
        except ValueError:
            raise ValueError(f"constant_bound_config {value!r} must be six comma-separated numbers") from None
    if len(value) not in (0, len(OPERANDS)):
        raise ValueError(f"constant_bound_config needs six bounds ({', '.join(OPERANDS)}) or none, got {len(value)}")
    for name, bound in zip(OPERANDS, value, strict=False):
        if not 1e-30 <= bound <= 1e30:
            raise ValueError(
                f"constant_bound_config {name} must be a finite bound above 0, from 1e-30 to 1e30, got {bound:g}"
            )
    return tuple(float(bound) for bound in value)


def check(options: Options) -> None:
    """Refuse values that no recipe could honour, whether or not the chosen one reads them.

    Raises:
      ValueError: names the field, the condition and the value.
    """
    for field in sorted(CALIBRATION_OPTIONS):
        read_calibration(options, field)
    bounds = read_bounds(options.constant_bound_config)
    flags = options.per_tensor_scales
    if len(flags) not in (0, len(OPERANDS)):
        raise ValueError(f"per_tensor_scales needs six flags ({', '.join(OPERANDS)}) or none, got {len(flags)}")
    if bounds and not all(flags):
        raise ValueError("per_tensor_scales has no effect beside constant_bound_config, whose bounds are per tensor")
    if options.quantization_local_shard_count < -1:
        raise ValueError(
            "quantization_local_shard_count must be -1 (local device count), 0 (float weight gradient) or more, "
            f"got {options.quantization_local_shard_count}"
        )
    if options.amax_history_length < 1:
        raise ValueError(f"amax_history_length must be at least 1, got {options.amax_history_length}")
    for field, most in _LARGEST.items():
        if (getattr(options, field) or 0) > most:
            raise ValueError(f"{field} must be at most {most}, got {loader.show(getattr(options, field))}")
    if abs(options.amax_margin) > 64:
        raise ValueError(f"amax_margin must lie between -64 and 64, got {loader.show(options.amax_margin)}")
    _check_sparsity(options)


_LARGEST = {
    "amax_history_length": 2**20,
    "quantization_local_shard_count": 2**20,
    "weight_sparsity_m": 2**16,
    "weight_sparsity_start_step": 2**31 - 1,
    "weight_sparsity_update_step": 2**31 - 1,
}


def _check_sparsity(options: Options) -> None:
    n, m = options.weight_sparsity_n, options.weight_sparsity_m
    if (n is None) != (m is None):
        raise ValueError(f"weight_sparsity_n and weight_sparsity_m belong together, got {n} and {m}")
    if n is not None and m is not None and not 0 < n < m:
        raise ValueError(f"weight_sparsity_n must be above 0 and below weight_sparsity_m, got {n} of {m}")
    for field, least in (("weight_sparsity_start_step", 0), ("weight_sparsity_update_step", 1)):
        value, default = getattr(options, field), getattr(Options, field)
        if value < least:
            raise ValueError(f"{field} must be at least {least}, got {value}")
        if n is None and value != default:
            raise ValueError(f"{field} {value} has no effect without weight_sparsity_n and weight_sparsity_m")


def resolve_shards(options: Options) -> int:
    """Give ``quantization_local_shard_count`` with -1 resolved to the local device count, which starts JAX."""
    count = options.quantization_local_shard_count
    return jax.local_device_count() if count == -1 else count


def apply(row: RecipeRow, options: Options, shards: int) -> Recipe | None:
    """Give a row's recipe with the options that the row reads.

    Args:
      row: the row.
      options: the fields of a config.
      shards: what ``resolve_shards`` gives; a parameter so that a config can be checked before JAX is started.

    Raises:
      ValueError: a calibration that the dtype cannot have.
    """
    recipe = row.recipe
    if recipe is None:
        return None
    if row.options >= SHARD_OPTIONS:
        recipe = _sharded(recipe, shards)
    if row.options >= CALIBRATION_OPTIONS:
        recipe = _calibrated(recipe, options)
    if row.options >= BOUND_OPTIONS:
        recipe = _bounded(recipe, read_bounds(options.constant_bound_config), options.per_tensor_scales)
    if row.options >= DELAYED_OPTIONS:
        delayed = DelayedSpec(options.amax_history_length, options.amax_margin, options.amax_init)
        recipe = dataclasses.replace(recipe, delayed=delayed)
    n, m = options.weight_sparsity_n, options.weight_sparsity_m
    if row.options >= SPARSITY_OPTIONS and n is not None and m is not None:
        sparsity = SparsitySpec(n, m, options.weight_sparsity_start_step, options.weight_sparsity_update_step)
        recipe = dataclasses.replace(recipe, sparsity=sparsity)
    return recipe


def _sharded(recipe: Recipe, count: int) -> Recipe:
    """Cut the weight gradient's contraction in ``count`` blocks; 0 leaves that matmul in float."""
    if count == 0:
        return dataclasses.replace(recipe, drhs=MatmulSpec())
    return dataclasses.replace(recipe, drhs=dataclasses.replace(recipe.drhs, shards=count))


def _with_calibration(spec: TensorSpec, calibration: Calibration) -> TensorSpec:
    granularity = "per_tensor" if calibration.method == "fixed" else spec.granularity
    return dataclasses.replace(spec, calibration=calibration, granularity=granularity)


def _calibrated(recipe: Recipe, options: Options) -> Recipe:
    for field, places in (
        ("act_quantization_calibration_method", (("fwd", "lhs"),)),
        ("weight_quantization_calibration_method", (("fwd", "rhs"),)),
        ("bwd_quantization_calibration_method", (("dlhs", "lhs"), ("drhs", "rhs"))),
    ):
        calibration = read_calibration(options, field)
        try:
            for matmul, side in places:
                spec = _with_calibration(getattr(getattr(recipe, matmul), side), calibration)
                recipe = _replace_operand(recipe, matmul, side, spec)
        except ValueError as error:  # an asymmetric range on a float dtype
            raise ValueError(f"{field}: {error}") from None
    return recipe


def _bounded(recipe: Recipe, bounds: tuple[float, ...], per_tensor: tuple[bool, ...]) -> Recipe:
    for index, (matmul, side) in enumerate(_OURS):
        spec = getattr(getattr(recipe, matmul), side)
        if bounds:
            spec = _with_calibration(spec, Calibration("fixed", 1.0, -bounds[index], bounds[index]))
        elif per_tensor and not per_tensor[index]:
            spec = dataclasses.replace(spec, granularity="per_channel")
        recipe = _replace_operand(recipe, matmul, side, spec)
    return recipe


def _replace_operand(recipe: Recipe, matmul: str, side: str, spec: TensorSpec) -> Recipe:
    changed = dataclasses.replace(getattr(recipe, matmul), **{side: spec})
    return dataclasses.replace(recipe, **{matmul: changed})
