"""AQT: translation of a recipe to an AQT v2 config, which the backend in ``aqt`` runs.

AQT differs from other backends under every recipe:

- AQT multiplies by the reciprocal of the scale, so ``TensorSpec.reciprocal`` False differs in the last bit of a qvalue.
- AQT maps the amax of an integer weight to qmax + 0.5, so ``TensorSpec.keeps_grid`` has no effect, and decoded integers
  become smaller when they are quantized again.
- Scales have the dtype of the tensor (bfloat16 in a bfloat16 model), and an all-zero channel has the scale 1/bound.
- The result is cast to the dtype of the operands.
- On devices other than TPUs and GPUs, AQT runs int4×int4 as int8×int8 with the same values.

The qvalues of ``FORWARD`` operands are always exact, also in blocks of the weight gradient. AQT's ``use_fwd_quant``
passes the forward's qvalues to the backward matmul as floats and quantizes them again. A constant calibration at the
element's own bound makes the second scale exactly 1, so the second rounding changes nothing. (MaxText's int8 disables
``use_fwd_quant`` and quantizes the residual again; in a recipe, a separate operand spec does the same.)

AQT is no longer developed; ``jaxquant.config.backends`` lists the tested versions.
"""

# AQT decorates its dataclasses with a functools.partial, so that type checkers find no fields.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.backends._aqt import (
    aqt_dot_general,
    aqt_quantizer,
    calibration,
    config,
    fp8_numerics,
    int_numerics,
    stochastic_rounding,
)
from jaxquant.backends._aqt import tiled_dot_general as tiling
from jaxquant.backends._aqt import utils as aqt_utils
from jaxquant.backends.honours import NATIVE_INSTEAD, FieldValue, Gap, Honours, any_value, check_honoured, only, refuse
from jaxquant.core.calibration import Calibration
from jaxquant.core.dtypes import element
from jaxquant.core.recipe import FORWARD, MatmulSpec, Operand, Recipe, TensorSpec

_FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


@aqt_utils.flax_slots_kw_only_dataclass
class _ClippingFp8(fp8_numerics.Fp8Numerics):
    """AQT's fp8 with zero gradient for values outside the calibrated range, which AQT supports only for integers."""

    def vjp_bwd(self, res, grad):
        (x,) = res
        bound = element(jnp.dtype(self.dtype).name).bound
        return (grad * (jnp.abs(x) <= bound).astype(grad.dtype), None)


@aqt_utils.flax_slots_kw_only_dataclass
class _Blocked(aqt_dot_general.DotGeneralRaw):
    """AQT's matmul in blocks of the first contraction axis; raises if the number of blocks does not divide the axis."""

    recipe_name: str = aqt_utils.static_field(default="")
    count: int = aqt_utils.static_field(default=1)

    def __call__(self, lhs, rhs, lhs_qt, rhs_qt, dimension_numbers):
        axes = dimension_numbers[0][0]
        if axes and lhs.shape[axes[0]] % self.count:
            raise ValueError(
                f"quantization_local_shard_count {self.count} of {self.recipe_name!r} must divide the first "
                f"contraction axis of the weight gradient, of size {lhs.shape[axes[0]]}; use a divisor, or 0"
            )
        return aqt_dot_general.DotGeneralRaw.__call__(self, lhs, rhs, lhs_qt, rhs_qt, dimension_numbers)


_refuse = functools.partial(refuse, "AQT")


# -- supported fields --------------------------------------------------------------------------------------------------


def _dtype(field: FieldValue) -> Gap | None:
    if field.value in _FP8 or element(field.value).kind == "int":
        return None
    return Gap(f"dtype {field.value}", "use quant_backend 'native' or 'qwix'")


def _granularity(field: FieldValue) -> Gap | None:
    if field.value == "per_tile" and not field.place.startswith("fwd"):
        return Gap("tiles in a backward matmul")
    if field.value == "per_tile" and field.spec.tiling != "each_axis":
        return Gap("tiling 'nested'", "use tiling 'each_axis', or quant_backend 'native'")
    return only("per_tensor", "per_tile")(field)


def _calibration(field: FieldValue) -> Gap | None:
    method = field.spec.calibration
    if method.method == "fixed" and method.is_symmetric:
        return None
    return Gap(f"calibration {method}", "use absmax, a symmetric fixed range, or another quant_backend")


def _rounding(field: FieldValue) -> Gap | None:
    if field.value == "stochastic" and field.spec.dtype in _FP8:
        return Gap("stochastic rounding of subnormal fp8 numbers")
    return only("stochastic")(field)


def _scaling(field: FieldValue) -> Gap | None:
    return Gap("delayed scaling") if field.value == "delayed" else Gap()


def _shards(field: FieldValue) -> Gap | None:
    return Gap("shards in the forward matmul", "use tile_size", "fwd_lhs") if field.place == "fwd" else None


HONOURS: Honours = {
    Recipe: {
        "name": any_value,
        "delayed": lambda field: Gap("delayed scaling", place="fwd_rhs"),
        "sparsity": lambda field: Gap("N:M sparsity", place="fwd_rhs"),
    },
    MatmulSpec: {"lhs": only(FORWARD), "rhs": only(FORWARD), "accumulator": any_value, "shards": _shards},
    TensorSpec: {
        "dtype": _dtype,
        "granularity": _granularity,
        "scaling": _scaling,
        "rounding": _rounding,
        "tile_size": any_value,
        "tiling": only("each_axis"),
        "reciprocal": any_value,
        "keeps_grid": any_value,
    },
    Calibration: {"method": _calibration, "factor": any_value, "minimum": any_value, "maximum": any_value},
}
"""Supported values of each single field. ``to_aqt`` rejects unsupported combinations."""


# -- translation -------------------------------------------------------------------------------------------------------


def _numerics(spec: TensorSpec) -> Any:
    """Return AQT's numerics of an element type."""
    if spec.dtype in _FP8:
        name = _FP8[spec.dtype]
        kind = _ClippingFp8 if spec.calibration.clips else fp8_numerics.Fp8Numerics
        return kind(dtype=fp8_numerics.fp8_map[name], exponent_bits=int(name[1]), mantissa_bits=int(name[3]))
    return int_numerics.IntSymmetric(
        bits=element(spec.dtype).bits,
        preserve_zero=True,
        preserve_max_val=False,
        clip=True,
        clip_gradient=spec.calibration.clips,
        round=True,
        noise_fn=stochastic_rounding.JaxUniform() if spec.rounding == "stochastic" else None,
        dtype=getattr(jnp, spec.dtype),
    )


def _calibrator(method: Calibration) -> Callable[..., Any]:
    """Return AQT's calibration."""
    if method.method == "fixed":
        return functools.partial(calibration.ConstantCalibration, bound=method.maximum)
    factor = None if method.factor == 1.0 else method.factor
    return functools.partial(calibration.AbsMaxCalibration, clipping_scale=factor)


def _quantizer(spec: TensorSpec) -> aqt_quantizer.Quantizer:
    return aqt_quantizer.Quantizer(
        numerics=_numerics(spec),
        calib_shared_axes="per_tensor" if spec.granularity == "per_tensor" else None,
        scale_stop_grad=True,
        calibration=_calibrator(spec.calibration),
        context=aqt_utils.Context(key=None, train_step=None),
    )


def _reused(recipe: Recipe, place: str, spec: Operand, other: Operand) -> aqt_quantizer.Quantizer:
    """Return a quantizer with a scale of exactly 1 for the forward's qvalues, or an empty one if other is float."""
    if not isinstance(spec, TensorSpec) or spec.granularity == "per_tile":
        raise _refuse(recipe, place, "reuse of a float or tiled forward tensor", "set a separate TensorSpec")
    if other is None:
        return aqt_quantizer.quantizer_make(None, initialize_calibration=False)
    whole = _quantizer(TensorSpec(spec.dtype))
    whole.calibration = functools.partial(calibration.ConstantCalibration, bound=element(spec.dtype).bound)
    return whole


def _accumulator(recipe: Recipe, place: str, requested: str | None, dtypes: Sequence[str | None]) -> Any:
    """Return the dtype that AQT requests from the matmul.

    With two quantized operands, None means the dtype of the result. AQT casts to that dtype right after the matmul, so
    float32 (int32 between integers, which is exact) gives the same numbers.
    """
    kinds = [None if dtype is None else element(dtype).kind for dtype in dtypes]
    if requested == "int32" and kinds != ["int", "int"]:
        raise _refuse(recipe, place, f"int32 accumulation of {dtypes[0]} by {dtypes[1]}", "use a float accumulator")
    if requested is None and None not in kinds:
        requested = "int32" if kinds == ["int", "int"] else "float32"
    return None if requested is None else getattr(jnp, requested)


def _dot_int8(lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    """Multiply int8 by int4 as int8; JAX would widen mixed integers to int32."""
    return jax.lax.dot_general(lhs.astype(jnp.int8), rhs.astype(jnp.int8), *args, **kwargs)


def tile_size(recipe: Recipe) -> int | None:
    """Return the tile size of the forward matmul, for which AQT tiles both operands."""
    specs = {side: spec for side in ("lhs", "rhs") if isinstance(spec := getattr(recipe.fwd, side), TensorSpec)}
    sizes = {spec.tile_size for spec in specs.values()}
    if len(sizes) > 1:
        raise _refuse(recipe, "fwd_lhs", "separate tile sizes for fwd_lhs and fwd_rhs", "use one tile size for both")
    return sizes.pop() if sizes else None


def to_aqt(recipe: Recipe) -> aqt_dot_general.DotGeneral:
    """Translate a recipe to an AQT config.

    In both of AQT's gradients the output gradient is lhs, so our ``drhs.lhs`` (the activation) is AQT's ``drhs.rhs``.
    The tile size is not part of the config; ``tiling_fn`` applies the tile size in the matmul.

    Args:
      recipe: recipe to translate.

    Raises:
      NotImplementedError: AQT does not support an operand; the error names an alternative.

    Source: ``aqt.jax.v2.config.config_v4``, without the settings that ``config_v4`` resets.
    """
    check_honoured("AQT", HONOURS, recipe)
    tile = tile_size(recipe)
    result = config.default_unquantized_config()
    for name, raw, places in (
        ("fwd", result.fwd, ("lhs", "rhs")),
        ("dlhs", result.dlhs, ("lhs", "rhs")),
        ("drhs", result.drhs, ("rhs", "lhs")),
    ):
        matmul: MatmulSpec = getattr(recipe, name)
        operands = [getattr(matmul, side) for side in places]
        if name != "fwd" and tile is not None and any(operands):
            raise _refuse(recipe, f"{name}_{places[0]}", "quantized dlhs or drhs with a tiled fwd", NATIVE_INSTEAD)
        dtypes: list[str | None] = []
        for ours, theirs, spec in zip(places, ("lhs", "rhs"), operands, strict=True):
            place, other = f"{name}_{ours}", operands[1 if theirs == "lhs" else 0]
            source = recipe.fwd.rhs if name == "dlhs" else recipe.fwd.lhs
            if spec == FORWARD:
                if theirs == "lhs" or name == "fwd":
                    raise _refuse(recipe, place, "reuse of a forward tensor", "set a separate TensorSpec")
                setattr(raw.dg_quantizer, theirs, _reused(recipe, place, source, other))
                raw.rhs.use_fwd_quant = True
                spec = None if other is None else source
            elif isinstance(spec, TensorSpec):
                if spec.granularity == "per_tensor" and matmul.shards > 1:
                    raise _refuse(recipe, place, "per-tensor scales in shards", "use per_channel, or shards 1")
                setattr(raw.dg_quantizer, theirs, _quantizer(spec))
            dtypes.append(spec.dtype if isinstance(spec, TensorSpec) else None)
        raw.dg_accumulator_dtype = _accumulator(recipe, f"{name}_lhs", matmul.accumulator, dtypes)
        if set(dtypes) == {"int8", "int4"}:
            raw.dot_general = _dot_int8
        if matmul.shards > 1 and any(operands):
            setattr(result, name, _blocked(recipe, raw, matmul.shards))
    return result


def _blocked(recipe: Recipe, raw: aqt_dot_general.DotGeneralRaw, shards: int) -> _Blocked:
    fields = {field: getattr(raw, field) for field in raw.__dataclass_fields__}
    fields["local_aqt"] = aqt_dot_general.LocalAqt(contraction_axis_shard_count=shards)
    return _Blocked(**fields, recipe_name=recipe.name, count=shards)


def tiling_fn(recipe: Recipe) -> Callable[..., tiling.Cfg] | None:
    """Return the function that tiles every contraction axis of both operands."""
    size = tile_size(recipe)
    if size is None:
        return None

    def tile(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> tiling.Cfg:
        sides = []
        for operand, axes in zip((lhs, rhs), dimension_numbers[0], strict=True):
            for axis in axes:
                if operand.shape[axis] % size:
                    raise ValueError(
                        f"tile_size {size} of {recipe.name!r} does not divide contraction axis {axis} "
                        f"of size {operand.shape[axis]}; use a divisor of this size, or -1"
                    )
            tiles = [tiling.AxisTiling(axis=axis, tile_size=size) for axis in axes]
            sides.append(tiling.TensorTiling(contraction_axes=tiles, remaining_axes=[]))
        return tiling.Cfg(*sides)

    return tile
