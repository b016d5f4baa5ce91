"""Native recipes for the tests of ops: all recipes of the table, and recipes with options."""

from __future__ import annotations

import dataclasses

from jaxquant.config import recipes
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.calibration import parse_calibration
from jaxquant.core.recipe import DelayedSpec, MatmulSpec, Recipe, TensorSpec


def recipe(name: object, **options: object) -> Recipe:
    """Return the recipe of a config."""
    found = QuantConfig.from_any({"quantization": name, **options}).recipe()
    assert found is not None
    return found


def change(recipe: Recipe, **values: object) -> Recipe:
    """Return the recipe with fields replaced in the spec of every operand that has one."""

    def matmul(spec: MatmulSpec) -> MatmulSpec:
        sides = {side: getattr(spec, side) for side in ("lhs", "rhs")}
        new = {side: dataclasses.replace(s, **values) for side, s in sides.items() if isinstance(s, TensorSpec)}
        return dataclasses.replace(spec, **new)

    return dataclasses.replace(recipe, fwd=matmul(recipe.fwd), dlhs=matmul(recipe.dlhs), drhs=matmul(recipe.drhs))


def nearest(recipe: Recipe) -> Recipe:
    """Return the recipe without stochastic rounding, so that one device and eight compute the same numbers."""
    return change(recipe, rounding="nearest")


_TABLE = {row.recipe.name: row.recipe for row in recipes.RECIPES.values() if row.recipe is not None}
_INT8 = _TABLE["int8"]

RECIPES: dict[str, Recipe] = {name: nearest(recipe) for name, recipe in _TABLE.items()} | {
    "fp8 as flax": dataclasses.replace(_TABLE["fp8"], delayed=DelayedSpec(amax_init="flax")),
    "int8 stochastic": _INT8,
    "int8 tiles": nearest(change(_INT8, granularity="per_tile", tile_size=8)),
    "int8 shards": nearest(dataclasses.replace(_INT8, drhs=dataclasses.replace(_INT8.drhs, shards=4))),
    "int8 asymmetric": nearest(change(_INT8, calibration=parse_calibration("minmax"))),
    "fp8_full clipping": change(_TABLE["fp8_full"], calibration=parse_calibration("rms,4")),
    "fp8_current clipping": change(_TABLE["fp8_current"], calibration=parse_calibration("absmax,0.5")),
}
