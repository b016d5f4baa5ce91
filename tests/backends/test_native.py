"""The native backend: real low-precision operands in the lowered step, exactly where the recipe says."""

from __future__ import annotations

from collections import Counter

import jax
import pytest

import jaxquant
from jaxquant import QuantConfig, state
from jaxquant.config.recipes import RECIPES
from tests.backends.test_translation import LINEAR, SCORES, Model, X, source
from tests.lowering import dot_operand_types

# Tiles that cut its contractions are multiplied dequantized: audit/test_coverage.py counts those, in a wider model.
NATIVE = [
    string
    for string, row in RECIPES.items()
    if "native" in row.backends
    and not (row.recipe and row.recipe.fwd.rhs and (row.recipe.fwd.rhs.tile_size or 128) < 128)
]
INTMP = {"intmp": {"quant_cfg_path": "configs/intmp/int8_weight_only.json"}}


def operand_types(recipe, name):
    """A matmul with one float operand is a float matmul, on what the other dequantizes to; e2m1 is held by e4m3."""
    pair = sorted((source(recipe, name, "lhs"), source(recipe, name, "rhs")))
    return ("f32", "f32") if "f32" in pair else tuple(each.replace("f4E2M1FN", "f8E4M3FN") for each in pair)


@pytest.mark.parametrize("string", NATIVE)
def test_lowered_operands_are_those_of_the_recipe(string):
    config = QuantConfig(quantization=string, quant_backend="native", **INTMP.get(string, {}))
    recipe = config.recipe()
    model = jaxquant.maybe_quantize_model(Model(), config, X)
    params, quant = state.split(jax.eval_shape(model.init, jax.random.key(0), X))

    def loss(params, quant, x):
        return (model.apply(state.merge(params, quant), x) ** 2).mean()

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(params, quant, X).as_text()
    found = Counter(tuple(sorted((lhs, rhs))) for lhs, rhs, _ in dot_operand_types(text))
    expected = Counter(operand_types(recipe, name) for name in ("fwd", "dlhs", "drhs"))
    expected = Counter({pair: count * len(LINEAR) for pair, count in expected.items()})
    assert found == expected + Counter({("f32", "f32"): 3 * (SCORES + 1)})


@pytest.mark.parametrize(("lhs", "rhs"), [(8, 8), (4, 8), (8, 4), (None, 4)])
def test_lowered_operands_of_mixed_precision(lhs, rhs, tmp_path):
    file = tmp_path / "mixed.json"
    file.write_text(f'{{"__default__": {{"w_bits": {rhs}, "a_bits": {lhs or "null"}, "tile_size": -1}}}}')
    config = QuantConfig(quantization="intmp", quant_backend="native", quant_cfg_path=str(file))
    model = jaxquant.maybe_quantize_model(Model(), config, X)
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    dots = dot_operand_types(jax.jit(model.apply).lower(params, X).as_text())
    low = [pair for *pair, _ in dots if "f32" not in pair]
    # Where the two widths differ, both run as int8: there is no mixed integer matmul.
    width = "i4" if (lhs, rhs) == (4, 4) else "i8"
    assert low == ([] if lhs is None else [[width, width]] * len(LINEAR))
