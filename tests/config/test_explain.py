"""What is said of a recipe is read from it: every string can be explained, and no field can change unsaid."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxquant
from jaxquant.config import explain
from jaxquant.config.recipes import RECIPES
from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import FORWARD, DelayedSpec, MatmulSpec, Recipe, Rotation, SparsitySpec
from jaxquant.core.tensor_spec import Micro, TensorSpec

TILED = TensorSpec("float8_e4m3fn", "per_tile", tile_size=32)
FINE = dataclasses.replace(TILED, scale_dtype="float8_e4m3fn", scale_rounding="nearest")
MICROS = (Micro(headroom=17 / 16), Micro(four_over_six=True), Micro(eden=128), Micro(scale_bound=256.0))
CHANGES = [
    (TensorSpec("int8"), {"dtype": "int4"}),
    (TensorSpec("int8"), {"granularity": "per_tensor"}),
    (TensorSpec("int8"), {"rounding": "stochastic"}),
    (TensorSpec("int8"), {"reciprocal": True}),
    (TensorSpec("int8"), {"keeps_grid": True}),
    (TensorSpec("int8"), {"amax_bound": 3.0}),
    (TensorSpec("int4"), {"codec": "q4_0"}),
    (TensorSpec("int8"), {"scale_rounding": "up"}),
    (TensorSpec("int8"), {"scaling": "static"}),
    (TensorSpec("int8", "per_tensor"), {"scaling": "delayed"}),
    (TILED, {"tile_size": 16}),
    (TILED, {"tiling": "each_axis"}),
    (TILED, {"scale_dtype": "float8_e8m0fnu", "scale_rounding": "up"}),
    (dataclasses.replace(TILED, scale_dtype="float8_e8m0fnu", scale_rounding="up"), {"scale_rounding": "nearest"}),
    (FINE, {"outer_scale": True}),
    *((dataclasses.replace(FINE, outer_scale=True, micro=Micro()), {"micro": micro}) for micro in MICROS),
    (FINE, {"source": "forward"}),
    (TensorSpec("int8", "per_block", tile_size=32, free_size=32), {"free_size": 64}),
    *((TensorSpec("int8"), {"calibration": Calibration(*words)}) for words in (("absmax", 0.9), ("minmax",))),
    (TensorSpec("int8", calibration=Calibration("rms", 3.0)), {"calibration": Calibration("rms", 4.0)}),
    (TensorSpec("int8", calibration=Calibration("fixed", 1.0, -2.0, 2.0)), {"calibration": Calibration("absmax")}),
]


@pytest.mark.parametrize(("spec", "change"), CHANGES, ids=[str(change) for _, change in CHANGES])
def test_a_changed_operand_is_described_otherwise(spec: TensorSpec, change: dict):
    assert explain.describe_operand(spec) != explain.describe_operand(dataclasses.replace(spec, **change))


def test_every_field_of_an_operand_is_among_the_changes():
    assert {name for _, change in CHANGES for name in change} == {f.name for f in dataclasses.fields(TensorSpec)}


@pytest.mark.parametrize(
    ("describe", "before", "changes"),
    [
        (
            explain.describe_matmul,
            MatmulSpec(TILED, TILED),
            {"accumulator": "int32", "shards": 2, "rotation": Rotation(16), "arithmetic": "lean"},
        ),
        (explain.describe_delayed, DelayedSpec(), {"amax_history_length": 5, "margin": 1, "amax_init": "flax"}),
        (explain.describe_sparsity, SparsitySpec(1, 3, 5, 7), {"n": 2, "m": 4, "start_step": 6, "update_step": 8}),
    ],
)
def test_a_changed_part_is_described_otherwise(describe, before, changes):
    known = {"lhs", "rhs"} if isinstance(before, MatmulSpec) else set()
    assert changes.keys() | known == {field.name for field in dataclasses.fields(before)}
    for name, value in changes.items():
        assert describe(dataclasses.replace(before, **{name: value})) != describe(before)


@pytest.mark.parametrize("string", RECIPES)
def test_every_string_is_explained_by_its_recipe(string: str):
    text = explain.explain(string)
    row = RECIPES[string]
    assert row.summary in text
    assert all(name in text for name in [*explain.names_of(row), *row.backends, *row.fields])
    for spec in row.recipe.specs.values() if row.recipe else ():
        if isinstance(spec, TensorSpec):
            assert explain.describe_operand(spec) in text
    assert string == "intmp" or "quant_cfg_path" not in text
    assert (explain.LEAN in text) == bool(row.recipe and row.recipe.is_lean)


def test_what_is_reused_is_said_with_its_scales():
    per_channel, per_tensor = TensorSpec("int8"), TensorSpec("int8", "per_tensor")
    assert "multiplied into the other operand" in explain.describe_operand(FORWARD, per_channel)
    assert explain.describe_operand(FORWARD, per_tensor) == "as quantized for the forward matmul"
    assert explain.describe_operand(FORWARD, Recipe("x", MatmulSpec()).resolve("dlhs", "rhs")) == (
        "float, as in the forward matmul"
    )


def test_options_change_what_is_said():
    text = explain.explain("fp8_full", {"act_quantization_calibration_method": "fixed,224"})
    assert "input: float8_e4m3fn, one scale for the tensor, from the fixed range -224 to 224" in text
    with pytest.raises(ValueError, match="amax_margin 1 is not read by quantization 'int8'"):
        explain.explain("int8", {"amax_margin": 1})


def test_the_list_has_every_string_once():
    lines = explain.strings().splitlines()[1:]
    listed = [name.strip() for line in lines for name in line.split("  ")[0].split(", ")]
    assert sorted(listed) == sorted(name or '""' for name in RECIPES)
    (line,) = [line for line in lines if line.startswith("aqt_fp8 ")]
    assert line.split("  ")[0] == "aqt_fp8"
    assert [cell.strip() for cell in line.split("  ") if cell.strip()] == [
        "aqt_fp8", "e4m3fn × e4m3fn", "float", "float", "aqt", "native"
    ]  # fmt: skip


def test_what_is_not_quantized_is_not_said_to_be():
    """Weights alone: nothing is quantized after their scales, and a tensor format has no scale of an element type."""
    assert "the other operand before that is quantized" not in explain.explain("int4w")
    text = explain.explain("ggml_q4_k")
    assert "multiplied into the other operand" not in text
    assert "a scale is the statistic" not in text


def test_one_string_is_explained_at_a_time():
    with pytest.raises(ValueError, match="quantization 'int8' is not an option of 'fp8'"):
        explain.explain("fp8", {"quantization": "int8"})


@pytest.mark.parametrize("given", [(3,), (None,), ("fp8", 3), ("fp8", ["amax_margin"])])
def test_what_is_no_string_and_no_mapping_is_a_type_error_in_words(given):
    with pytest.raises(TypeError, match=r"^(quantization must be a string|options of 'fp8' must be a mapping), got "):
        explain.explain(*given)


def spoiled(string: str) -> set[str]:
    """Return the tensors in which one NaN makes results NaN that do not depend on it in float."""
    x, w, g = jax.random.normal(jax.random.key(0), (3, 256, 256))
    config = {"quantization": string, "quant_backend": "native"}  # XLA:CPU's maximum, which AQT takes, can lose a NaN
    product = jaxquant.quantize(lambda params, x: x @ params["w"], config)
    state = product.init({"w": w}, x)

    @jax.jit
    def step(x, w, g):
        out, pull = jax.vjp(lambda x, state: product({"w": w}, state, x), x, state)
        return out, pull(g)[0]

    bad = jnp.zeros((256, 256)).at[3, 0].set(jnp.nan)
    found = {
        "input": step(x + bad, w, g)[0][4:],
        "weight": step(x, w + bad, g)[0][:, 128:],  # fp8_block's are 128 by 128
        "output gradient": step(x, w, g + bad)[1][4:],
    }
    return {tensor for tensor, values in found.items() if jnp.isnan(values).any()}


@pytest.mark.parametrize(
    "string", [name for name, row in RECIPES.items() if row.recipe and name == explain.names_of(row)[0]]
)
def test_where_one_nan_spoils_a_tensor_is_said(string: str):
    whole = explain.whole_tensors(RECIPES[string].recipe)
    assert set(whole) == spoiled(string)
    assert ("A NaN in one row makes all of" in explain.explain(string)) == bool(whole)
