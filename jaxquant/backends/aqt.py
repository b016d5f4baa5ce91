"""AQT: translate a recipe to an AQT v2 config, and wrap AQT's Linen modules. The only place that imports AQT.

What AQT does in its own way, under every recipe:

- It multiplies by the reciprocal of the scale, so ``TensorSpec.reciprocal`` False differs in the last bit of a qvalue.
- Scales have the dtype of the tensor (bfloat16 in a bfloat16 model), and an all-zero channel has the scale 1/bound.
- The result is cast to the dtype of the operands.
- Off a TPU or GPU it runs int4×int4 as int8×int8 with the same values.

``FORWARD`` operands are honoured in every case, blocks of the weight gradient included: AQT's ``use_fwd_quant`` hands
the forward's qvalues to the backward matmul as floats and quantizes them again, and a constant calibration at the
element's own bound makes that second scale exactly 1, so the second rounding changes nothing. (MaxText's int8 leaves
``use_fwd_quant`` off and quantizes the residual anew; a recipe says that with an operand of its own.)

AQT is no longer developed. Tested with the series in ``SERIES``; everything imported is public there.
"""

# AQT decorates its dataclasses with a functools.partial, behind which a type checker sees no fields.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from jaxquant.backends._versions import require
from jaxquant.backends._weights import is_swapped
from jaxquant.core.dtypes import element
from jaxquant.core.recipe import FORWARD, MatmulSpec, Operand, Recipe, TensorSpec

SERIES = "0.9."
require("aqtp", SERIES)

from aqt.jax.v2 import aqt_dot_general, aqt_quantizer, calibration, config, stochastic_rounding  # noqa: E402
from aqt.jax.v2 import tiled_dot_general as tiling  # noqa: E402
from aqt.jax.v2 import utils as aqt_utils  # noqa: E402
from aqt.jax.v2.flax import aqt_flax  # noqa: E402
from aqt.jax.v2.numerics import fp8_numerics, int_numerics  # noqa: E402

STREAM = "quant"
_MODES = {
    "train": aqt_utils.QuantMode.TRAIN,
    "convert": aqt_utils.QuantMode.CONVERT,
    "serve": aqt_utils.QuantMode.SERVE,
}
_FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


@aqt_utils.flax_slots_kw_only_dataclass
class _Int(int_numerics.IntSymmetric):
    """AQT's symmetric integer, with an error that says which random stream is missing."""

    def vjp_fwd(self, x, context):
        if self.noise_fn is not None and context.key is None:
            raise ValueError(
                f"the recipe rounds stochastically and the model was applied without the random stream {STREAM!r}; "
                f"pass rngs={{{STREAM!r}: key}} to apply, and list it in split_rngs of nn.scan"
            )
        return int_numerics.IntSymmetric.vjp_fwd(self, x, context)


@aqt_utils.flax_slots_kw_only_dataclass
class _ClippingFp8(fp8_numerics.Fp8Numerics):
    """AQT's fp8, with no gradient for values outside the calibrated range; AQT's own has that for integers only."""

    def vjp_bwd(self, res, grad):
        (x,) = res
        bound = element(jnp.dtype(self.dtype).name).bound
        return (grad * (jnp.abs(x) <= bound).astype(grad.dtype), None)


@aqt_utils.flax_slots_kw_only_dataclass
class _Blocked(aqt_dot_general.DotGeneralRaw):
    """AQT's matmul in blocks of the first contraction axis, with an error for a count that does not divide."""

    recipe_name: str = aqt_utils.static_field(default="")
    count: int = aqt_utils.static_field(default=1)

    def __call__(self, lhs, rhs, lhs_qt, rhs_qt, dimension_numbers):
        axes = dimension_numbers[0][0]
        if axes and lhs.shape[axes[0]] % self.count:
            raise ValueError(
                f"quantization_local_shard_count {self.count} of {self.recipe_name!r} does not divide the first "
                f"contraction axis of the weight gradient, which has size {lhs.shape[axes[0]]}; use a divisor of it, "
                "1 or 0"
            )
        return aqt_dot_general.DotGeneralRaw.__call__(self, lhs, rhs, lhs_qt, rhs_qt, dimension_numbers)


def _refuse(recipe: Recipe, place: str, what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"recipe {recipe.name!r} operand {place}: AQT has no {what}; {instead}")


def _numerics(recipe: Recipe, place: str, spec: TensorSpec) -> Any:
    """Give AQT's grid of an element type."""
    if spec.dtype in _FP8:
        if spec.rounding == "stochastic":
            raise _refuse(recipe, place, "stochastic rounding of subnormal fp8 numbers", "use quant_backend 'native'")
        name = _FP8[spec.dtype]
        kind = _ClippingFp8 if spec.calibration.clips else fp8_numerics.Fp8Numerics
        return kind(dtype=fp8_numerics.fp8_map[name], exponent_bits=int(name[1]), mantissa_bits=int(name[3]))
    if element(spec.dtype).kind != "int":
        raise _refuse(recipe, place, f"element type {spec.dtype}", "use quant_backend 'native' or 'qwix'")
    return _Int(
        bits=element(spec.dtype).bits,
        preserve_zero=True,
        preserve_max_val=False,
        clip=True,
        clip_gradient=spec.calibration.clips,
        round=True,
        noise_fn=stochastic_rounding.JaxUniform() if spec.rounding == "stochastic" else None,
        dtype=getattr(jnp, spec.dtype),
    )


def _calibrator(recipe: Recipe, place: str, spec: TensorSpec) -> Callable[..., Any]:
    """Give AQT's calibration of a spec."""
    method = spec.calibration
    if spec.scaling == "delayed":
        raise _refuse(recipe, place, "delayed scaling that trains as a state", "use quant_backend 'native'")
    if method.method == "absmax":
        factor = None if method.factor == 1.0 else method.factor
        return functools.partial(calibration.AbsMaxCalibration, clipping_scale=factor)
    if method.method == "fixed" and method.is_symmetric:
        return functools.partial(calibration.ConstantCalibration, bound=method.maximum)
    raise _refuse(
        recipe, place, f"calibration {method}", "use absmax, a symmetric fixed range, or another quant_backend"
    )


def _quantizer(recipe: Recipe, place: str, spec: TensorSpec) -> aqt_quantizer.Quantizer:
    return aqt_quantizer.Quantizer(
        numerics=_numerics(recipe, place, spec),
        calib_shared_axes="per_tensor" if spec.granularity == "per_tensor" else None,
        scale_stop_grad=True,
        calibration=_calibrator(recipe, place, spec),
        context=aqt_utils.Context(key=None, train_step=None),
    )


def _reused(recipe: Recipe, place: str, spec: Operand, other: Operand) -> aqt_quantizer.Quantizer:
    """Keep the forward's qvalues through AQT's second quantization: a scale of exactly 1, or none beside a float."""
    if not isinstance(spec, TensorSpec) or spec.granularity == "per_tile":
        raise _refuse(recipe, place, "reuse of a forward operand that is float or tiled", "give it a spec of its own")
    if other is None:
        return aqt_quantizer.quantizer_make(None, initialize_calibration=False)
    whole = _quantizer(recipe, place, TensorSpec(spec.dtype))
    whole.calibration = functools.partial(calibration.ConstantCalibration, bound=element(spec.dtype).bound)
    return whole


def _accumulator(recipe: Recipe, place: str, asked: str | None, dtypes: Sequence[str | None]) -> Any:
    """Give the dtype that AQT asks of the matmul.

    None with two quantized operands means the result's dtype; AQT casts to that right after the matmul, so asking for
    float32 (int32 between integers, which is exact) gives the same numbers.
    """
    kinds = [None if dtype is None else element(dtype).kind for dtype in dtypes]
    if asked == "int32" and kinds != ["int", "int"]:
        raise _refuse(recipe, place, f"int32 accumulation of {dtypes[0]} by {dtypes[1]}", "use a float accumulator")
    if asked is None and None not in kinds:
        asked = "int32" if kinds == ["int", "int"] else "float32"
    return None if asked is None else getattr(jnp, asked)


def _dot_int8(lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    """Multiply int8 by int4 as int8: given mixed integers, JAX would widen both to int32."""
    return jax.lax.dot_general(lhs.astype(jnp.int8), rhs.astype(jnp.int8), *args, **kwargs)


def _tile(recipe: Recipe) -> int | None:
    """Give the tile size of the forward matmul, which AQT tiles on both sides."""
    specs = {side: spec for side in ("lhs", "rhs") if isinstance(spec := getattr(recipe.fwd, side), TensorSpec)}
    sizes = {spec.tile_size for spec in specs.values()}
    if len(sizes) > 1:
        raise _refuse(recipe, "fwd_lhs", "tile size that differs from that of fwd_rhs", "use one tile size for both")
    return sizes.pop() if sizes else None


def to_aqt(recipe: Recipe) -> aqt_dot_general.DotGeneral:
    """Translate a recipe to an AQT config.

    AQT writes both gradients with the output gradient as lhs, so our ``drhs.lhs`` (the activation) is its ``drhs.rhs``.
    The tile size is not part of the config; ``dot_general_cls`` passes it as a tiling function.

    Args:
      recipe: the numbers.

    Raises:
      NotImplementedError: AQT cannot do what an operand asks; names the recipe, the operand and what would do.

    Source: ``aqt.jax.v2.config.config_v4``, without the settings that it resets.
    """
    if recipe.delayed is not None or recipe.sparsity is not None:
        what = "delayed scaling that trains as a state" if recipe.delayed is not None else "N:M sparsity"
        raise _refuse(recipe, "fwd_rhs", what, "use quant_backend 'native'")
    tile_size = _tile(recipe)
    result = config.default_unquantized_config()
    for name, raw, places in (
        ("fwd", result.fwd, ("lhs", "rhs")),
        ("dlhs", result.dlhs, ("lhs", "rhs")),
        ("drhs", result.drhs, ("rhs", "lhs")),
    ):
        matmul: MatmulSpec = getattr(recipe, name)
        operands = [getattr(matmul, side) for side in places]
        if name != "fwd" and tile_size is not None and any(operands):
            raise _refuse(recipe, f"{name}_{places[0]}", "quantized backward of a tiled forward", "use 'native'")
        dtypes: list[str | None] = []
        for ours, theirs, spec in zip(places, ("lhs", "rhs"), operands, strict=True):
            place, other = f"{name}_{ours}", operands[1 if theirs == "lhs" else 0]
            source = recipe.fwd.rhs if name == "dlhs" else recipe.fwd.lhs
            if spec == FORWARD:
                if theirs == "lhs" or name == "fwd":
                    raise _refuse(recipe, place, "forward tensor to reuse there", "give it a spec of its own")
                setattr(raw.dg_quantizer, theirs, _reused(recipe, place, source, other))
                raw.rhs.use_fwd_quant = True
                spec = None if other is None else source
            elif isinstance(spec, TensorSpec):
                if spec.granularity == "per_tensor" and matmul.shards != 1:
                    raise _refuse(recipe, place, "per-tensor scale within shards", "use per_channel or one shard")
                setattr(raw.dg_quantizer, theirs, _quantizer(recipe, place, spec))
            dtypes.append(spec.dtype if isinstance(spec, TensorSpec) else None)
        raw.dg_accumulator_dtype = _accumulator(recipe, f"{name}_lhs", matmul.accumulator, dtypes)
        if set(dtypes) == {"int8", "int4"}:
            raw.dot_general = _dot_int8
        if matmul.shards != 1 and any(operands):
            setattr(result, name, _blocked(recipe, name, raw, matmul.shards))
    return result


def _blocked(recipe: Recipe, name: str, raw: aqt_dot_general.DotGeneralRaw, shards: int) -> _Blocked:
    if name == "fwd":
        raise _refuse(recipe, "fwd_lhs", "shards in the forward matmul", "use tile_size")
    fields = {field: getattr(raw, field) for field in raw.__dataclass_fields__}
    fields["local_aqt"] = aqt_dot_general.LocalAqt(contraction_axis_shard_count=shards)
    return _Blocked(**fields, recipe_name=recipe.name, count=shards)


def tiling_fn(recipe: Recipe) -> Callable[..., tiling.Cfg] | None:
    """Give the function that tiles every contraction axis of both operands."""
    size = _tile(recipe)
    if size is None:
        return None

    def tile(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> tiling.Cfg:
        sides = []
        for operand, axes in zip((lhs, rhs), dimension_numbers[0], strict=True):
            for axis in axes:
                if operand.shape[axis] % size:
                    raise ValueError(
                        f"tile_size {size} of {recipe.name!r} does not divide contraction axis {axis} "
                        f"of size {operand.shape[axis]}; use a divisor of it or -1"
                    )
            tiles = [tiling.AxisTiling(axis=axis, tile_size=size) for axis in axes]
            sides.append(tiling.TensorTiling(contraction_axes=tiles, remaining_axes=[]))
        return tiling.Cfg(*sides)

    return tile


def _axis_names(
    value: jax.Array,
    tile_map: dict[Any, list[int]] | None,
    unsharded: Sequence[int],
    *,
    mesh_axes: tuple[str | None, ...],
    replicate_scale: bool,
) -> nn.LogicallyPartitioned:
    """Name the axes of a stored qvalue or scale after those of the kernel.

    A tiled axis keeps its name on the part inside the tile. A scale has no name on the axes that it is shared along,
    and none at all when ``replicate_scale`` is set; only scales have such axes.
    """
    names: list[str | None] = [None] * value.ndim
    for axis, name in enumerate(mesh_axes):
        names[tile_map[axis][-1] if tile_map else axis] = name
    for axis in range(value.ndim):
        if axis in unsharded or (unsharded and replicate_scale):
            names[axis] = None
    return nn.LogicallyPartitioned(value, tuple(names))


def refuse_options(dtype: Any, precision: Any, preferred_element_type: Any) -> None:
    """Refuse the options of a matmul that AQT would ignore."""
    if precision not in (None, jax.lax.Precision.DEFAULT):
        raise NotImplementedError(f"precision {precision} has no meaning in an AQT matmul; leave it at None")
    if preferred_element_type is not None and jnp.dtype(preferred_element_type) != dtype:
        raise NotImplementedError(
            f"preferred_element_type {jnp.dtype(preferred_element_type).name} of a {dtype} matmul is not "
            "honoured by AQT; use quant_backend 'native'"
        )


class AqtDotGeneral(aqt_flax.AqtDotGeneral):
    """AQT's module, drawing from the random stream ``quant`` alone and refusing what it would ignore."""

    def make_rng(self, name: str = STREAM) -> jax.Array | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Draw a key, or None where the stream is absent: Linen would fall back to the stream "params"."""
        return super().make_rng(name) if self.has_rng(name) else None

    def make_aqt_dg(self, *args: Any, **kwargs: Any) -> Callable[..., jax.Array]:
        """Build AQT's matmul for two shapes."""
        inner = super().make_aqt_dg(*args, **kwargs)
        self._check_frozen()

        def matmul(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
            refuse_options(lhs.dtype, precision, preferred_element_type)
            return inner(jnp.asarray(lhs), jnp.asarray(rhs), dimension_numbers)

        return matmul

    def _check_frozen(self) -> None:
        """Refuse to serve a kernel that another recipe converted."""
        for side in ("lhs", "rhs"):
            stored = self.variables.get(self.quant_collection, {}).get(getattr(self, f"{side}_var_name"), {})
            if getattr(self, f"{side}_quant_mode") != aqt_utils.QuantMode.SERVE or "frozen" not in stored:
                continue
            has = nn.meta.unbox(stored["frozen"]).qvalue.dtype
            wanted = getattr(self.cfg.fwd.dg_quantizer, side).numerics.get_dtype()  # pyright: ignore[reportOptionalMemberAccess]
            if has != wanted:
                raise ValueError(
                    f"layer {'/'.join(self.path[:-1])!r} has a kernel converted to {has.name} and its recipe takes "
                    f"{jnp.dtype(wanted).name}; serve with the recipe that it was converted with"
                )


class AqtEinsum(nn.Module):
    """A quantized einsum of an activation and a weight, whichever way jax.numpy orders them for the matmul.

    Attributes:
      recipe, mesh_axes, quant_mode, replicate_scale: as in ``dot_general_cls``.
    """

    recipe: Recipe
    mesh_axes: tuple[str | None, ...] = ()
    quant_mode: str = "train"
    replicate_scale: bool = False

    @nn.compact
    def __call__(
        self,
        equation: str,
        lhs: jax.Array,
        rhs: jax.Array,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        """Contract activation ``lhs`` and weight ``rhs`` as the equation says."""
        lhs, rhs = promote_dtype(lhs, rhs)
        refuse_options(lhs.dtype, precision, preferred_element_type)
        make = _module(
            self.recipe, self.mesh_axes, self.quant_mode, self.replicate_scale, _is_swapped(equation, lhs, rhs)
        )
        return jnp.asarray(aqt_dot_general.einsum(equation, lhs, rhs, dg=make()))  # pyright: ignore[reportArgumentType]


def _is_swapped(equation: str, lhs: jax.Array, rhs: jax.Array) -> bool:
    return is_swapped(functools.partial(aqt_dot_general.einsum, equation), equation, lhs, rhs)


def _module(
    recipe: Recipe, mesh_axes: tuple[str | None, ...], quant_mode: str, replicate_scale: bool, swap: bool = False
) -> Callable[[], nn.Module]:
    if quant_mode not in _MODES:
        raise ValueError(f"quant_mode {quant_mode!r} is not one of {', '.join(_MODES)}")
    translated = to_aqt(recipe)
    wrapper = None
    if mesh_axes and quant_mode != "convert":
        wrapper = functools.partial(_axis_names, mesh_axes=tuple(mesh_axes), replicate_scale=replicate_scale)
    weight = {
        "quant_mode": _MODES[quant_mode],
        "var_name": "qrhs",
        "freeze_mode": aqt_flax.FreezerMode.CALIBRATION_AND_VALUE,
        "axis_metadata_wrapper": wrapper,
    }
    activation = {"var_name": "qlhs", "freeze_mode": aqt_flax.FreezerMode.NONE}
    if swap:
        swap_sides(translated)
    sides = {"lhs": weight, "rhs": activation} if swap else {"lhs": activation, "rhs": weight}
    return functools.partial(
        AqtDotGeneral,
        translated,
        prng_name=STREAM,
        tiling_fn=tiling_fn(recipe),
        use_legacy_freezer=False,
        **{f"{side}_{key}": value for side, settings in sides.items() for key, value in settings.items()},
    )


def swap_sides(translated: aqt_dot_general.DotGeneral) -> None:
    """Exchange the operands of an AQT config, for a matmul that has the weight on its left."""
    translated.fwd.lhs, translated.fwd.rhs = translated.fwd.rhs, translated.fwd.lhs
    translated.fwd.dg_quantizer.swap_lhs_and_rhs()
    translated.dlhs, translated.drhs = translated.drhs, translated.dlhs


def dot_general_cls(
    recipe: Recipe,
    *,
    mesh_axes: tuple[str | None, ...] = (),
    quant_mode: str = "train",
    replicate_scale: bool = False,
) -> Callable[[], nn.Module]:
    """Make the ``dot_general_cls`` of a Linen layer.

    Args:
      recipe: the numbers.
      mesh_axes: logical axis names of the kernel; in serve mode the stored qvalue and scale are named after them.
      quant_mode: "train", "convert" (write the quantized kernel to the collection "aqt") or "serve" (read it).
      replicate_scale: leave every axis of stored scales unnamed, so that they are replicated.

    Raises:
      NotImplementedError: AQT cannot do what the recipe asks.
    """
    return _module(recipe, tuple(mesh_axes), quant_mode, replicate_scale)


def einsum_cls(
    recipe: Recipe,
    *,
    mesh_axes: tuple[str | None, ...] = (),
    quant_mode: str = "train",
    replicate_scale: bool = False,
) -> Callable[[], nn.Module]:
    """Make a quantized einsum module, called as ``module(equation, activation, weight)``; see ``dot_general_cls``."""
    to_aqt(recipe)
    return functools.partial(AqtEinsum, recipe, tuple(mesh_axes), quant_mode, replicate_scale)
