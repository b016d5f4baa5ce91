"""Qwix: translation of a recipe to the keyword arguments of a Qwix rule, without the library. ``qwix`` uses them."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from jaxquant.backends.honours import FieldValue, Gap, Honours, any_value, check_honoured, only, refuse
from jaxquant.core.calibration import Calibration
from jaxquant.core.dtypes import element
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, TensorSpec

_ALL_AXES = tuple(range(16))
_refuse = functools.partial(refuse, "Qwix")


# -- supported fields --------------------------------------------------------------------------------------------------


def _granularity(field: FieldValue) -> Gap | None:
    return Gap("tiles along every contraction axis") if field.value == "per_tile" else only("per_tensor")(field)


def _calibration(field: FieldValue) -> Gap | None:
    method = field.spec.calibration
    if method.method == "fixed" and field.spec.granularity != "per_tensor":
        return Gap("a fixed range per channel")
    if not method.is_symmetric and (not field.place.startswith("fwd") or _has_quantized_backward(field.recipe)):
        return Gap(f"calibration {method} with a quantized backward matmul")
    return only("minmax", "rms", "fixed")(field)


def _scaling(field: FieldValue) -> Gap | None:
    return Gap("delayed scaling") if field.value == "delayed" else Gap()


def _rounding(field: FieldValue) -> Gap | None:
    if not field.is_gradient:
        return Gap("stochastic rounding except of gradients")
    if element(field.spec.dtype).kind == "float":
        return Gap(f"stochastic rounding to {field.spec.dtype}")
    return only("stochastic")(field)


def _accumulator(field: FieldValue) -> Gap | None:
    specs = [field.recipe.resolve(field.place, side) for side in ("lhs", "rhs")]  # pyright: ignore[reportArgumentType]
    integers = all(spec is not None and element(spec.dtype).kind == "int" for spec in specs)
    if field.value == "int32" and integers:
        return None
    return Gap(f"accumulator {field.value}", place=f"{field.place}_lhs")


def _shards(field: FieldValue) -> Gap | None:
    return None if field.place == "drhs" else Gap("shards outside the weight gradient", place=f"{field.place}_lhs")


_FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
HONOURS: Honours = {
    Recipe: {
        "name": any_value,
        # Qwix's mask ignores the schedule, and its groups of weights lie along the output axis.
        "sparsity": lambda field: Gap("scheduled N:M sparsity along the contraction axis", place="fwd_rhs"),
    },
    MatmulSpec: {"lhs": only(FORWARD), "rhs": only(FORWARD), "accumulator": _accumulator, "shards": _shards},
    TensorSpec: {
        "dtype": only("int8", "int4", "float4_e2m1fn", *_FP8),
        "granularity": _granularity,
        "scaling": _scaling,
        "rounding": _rounding,
        "reciprocal": any_value,
        "keeps_grid": any_value,
    },
    Calibration: {"method": _calibration, "factor": any_value, "minimum": any_value, "maximum": any_value},
}
"""Supported values of each single field. ``to_qwix`` rejects unsupported combinations."""
FOUR_BITS = frozenset({"int4", "float4_e2m1fn"})
"""Element types that XLA for CPUs can multiply only after a reshape of an operand."""


def _has_quantized_backward(recipe: Recipe) -> bool:
    return any((recipe.dlhs.lhs, recipe.dlhs.rhs, recipe.drhs.lhs, recipe.drhs.rhs))


def _dtype(spec: TensorSpec | None) -> Any:
    return None if spec is None else getattr(jnp, spec.dtype)


def to_qwix(recipe: Recipe) -> dict[str, Any]:
    """Translate a recipe to keyword arguments of ``qwix.QtRule``.

    Args:
      recipe: recipe to translate.

    Raises:
      NotImplementedError: Qwix does not support or would ignore a field of an operand; the error names an alternative.

    Source: ``QtRule`` and the fields of its ``additional_qt_config``.
    """
    check_honoured("Qwix", HONOURS, recipe)
    if recipe.fwd.rhs is None:
        raise _refuse(recipe, "fwd_rhs", "a float weight")
    act, weight = recipe.fwd.lhs, recipe.fwd.rhs
    assert isinstance(weight, TensorSpec)
    assert act is None or isinstance(act, TensorSpec)
    rule: dict[str, Any] = {"weight_qtype": _dtype(weight), "weight_calibration_method": str(weight.calibration)}
    # QtRule has one switch for the scales of all operands; additional_qt_config has one switch for each operand.
    extra: dict[str, Any] = {"rhs_disable_channelwise_axes": weight.granularity == "per_tensor"}
    if act is not None:
        rule |= {"act_qtype": _dtype(act), "act_calibration_method": str(act.calibration)}
        extra["lhs_disable_channelwise_axes"] = act.granularity == "per_tensor"
    if not _has_quantized_backward(recipe):
        return rule | {"additional_qt_config": extra}

    residuals = {"dlhs": recipe.dlhs.rhs, "drhs": recipe.drhs.lhs}
    reuses = {name: spec == FORWARD for name, spec in residuals.items()}
    if len(set(reuses.values())) != 1:
        place = "drhs_lhs" if reuses["dlhs"] else "dlhs_rhs"
        raise _refuse(recipe, place, "reuse of a forward tensor in only one of dlhs and drhs")
    grads = {"dlhs": recipe.dlhs.lhs, "drhs": recipe.drhs.rhs}
    for name, grad in grads.items():
        if not isinstance(grad, TensorSpec) and residuals[name] is not None:
            raise _refuse(
                recipe, f"{name}_{'lhs' if name == 'dlhs' else 'rhs'}", "a float gradient times a quantized tensor"
            )
    first = next(grad for grad in grads.values() if isinstance(grad, TensorSpec))
    rule["bwd_qtype"] = _dtype(first)
    extra["use_original_residuals"] = not reuses["dlhs"]
    for name, grad in grads.items():
        for operand, spec in (("grad", grad), ("residual", residuals[name])):
            if isinstance(spec, TensorSpec):
                extra |= {
                    f"{name}_{operand}_qtype": _dtype(spec),
                    f"{name}_{operand}_calibration_method": str(spec.calibration),
                    f"{name}_{operand}_disable_channelwise_axes": spec.granularity == "per_tensor",
                }
        if not isinstance(grad, TensorSpec):
            extra[f"{name}_grad_qtype"] = None
    if recipe.drhs.shards > 1:
        rule["bwd_weight_grad_tile_size"] = _TileShare(recipe.drhs.shards, recipe.name)
    if recipe.is_stochastic:
        # One noise element for each element of the gradient; by default Qwix draws one for each row.
        rule |= {"bwd_stochastic_rounding": "uniform", "channelwise_noise_axes": _ALL_AXES}
        for name, grad in grads.items():
            if isinstance(grad, TensorSpec) and grad.rounding == "nearest":
                extra[f"{name}_stochastic_rounding_noise_fn"] = None
    return rule | {"additional_qt_config": extra}


class _TileShare(float):
    """The share ``1 / count`` of an axis that a tile covers; raises if ``count`` does not divide the axis.

    Qwix rounds the tile size that it computes from the share, and would split 8 rows into 4 blocks for a count of 5.
    """

    def __new__(cls, count: int, recipe_name: str) -> _TileShare:
        share = super().__new__(cls, 1 / count)
        share.count, share.recipe_name = count, recipe_name
        return share

    count: int
    recipe_name: str

    def __rmul__(self, size: Any) -> float:
        if size % self.count:
            raise ValueError(
                f"quantization_local_shard_count {self.count} of {self.recipe_name!r} does not divide the last "
                f"contraction axis of the weight gradient, of size {size}; use a divisor of {size}, or 1"
            )
        return size / self.count
