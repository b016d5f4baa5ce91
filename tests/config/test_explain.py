"""Explanations come from the recipe: every string can be explained, and every field changes the text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxquant
from jaxquant.config import explain
from jaxquant.config.recipes import RECIPES
from jaxquant.core.tensor_spec import TensorSpec


def test_every_string_is_explained_by_its_recipe():
    for string, row in RECIPES.items():
        text = explain.explain(string)
        assert row.summary in text
        assert all(name in text for name in [*explain.names_of(row), *row.backends, *row.fields])
        for spec in row.recipe.specs.values() if row.recipe else ():
            if isinstance(spec, TensorSpec):
                assert explain.describe_operand(spec) in text
        assert (explain.LEAN_ARITHMETIC in text) == bool(row.recipe and row.recipe.is_lean)


def test_options_change_what_is_said():
    text = explain.explain("fp8_full", {"act_quantization_calibration_method": "fixed,224"})
    assert "input: float8_e4m3fn, one scale for the tensor, from the fixed range -224 to 224" in text
    with pytest.raises(ValueError, match="amax_margin 1 is not read by quantization 'int8'"):
        explain.explain("int8", {"amax_margin": 1})


def spoiled(string: str) -> set[str]:
    """Return the tensors in which one NaN makes further results NaN, which do not depend on it in float."""
    x, w, g = jax.random.normal(jax.random.key(0), (3, 256, 256))
    config = {"quantization": string, "quant_backend": "native"}  # AQT uses XLA:CPU's maximum, which can lose a NaN
    product = jaxquant.quantize(lambda params, x: x @ params["w"], config)
    state = product.init({"w": w}, x)

    @jax.jit
    def step(x, w, g):
        out, pull = jax.vjp(lambda x, state: product({"w": w}, state, x), x, state)
        return out, pull(g)[0]

    bad = jnp.zeros((256, 256)).at[3, 0].set(jnp.nan)
    found = {
        "input": step(x + bad, w, g)[0][4:],
        "weight": step(x, w + bad, g)[0][:, 128:],  # blocks of fp8_block are 128 by 128
        "output gradient": step(x, w, g + bad)[1][4:],
    }
    return {tensor for tensor, values in found.items() if jnp.isnan(values).any()}


OPTIMIZED = False


@pytest.mark.parametrize("string", ["int8", "fp8", "fp8_full", "nvfp4", "int8w"])  # strings of different kinds
def test_where_one_nan_spoils_a_tensor_is_said(string: str):
    whole = explain.poisoned_tensors(RECIPES[string].recipe)
    assert set(whole) == spoiled(string)
    assert ("One NaN makes every element NaN in" in explain.explain(string)) == bool(whole)
