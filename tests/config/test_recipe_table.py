"""The table: exact numbers of every config string, aliases, pairs with backends, options."""

import dataclasses
import re

import jax
import pytest

from jaxquant.config.options import OPERANDS, Options
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.recipes import BACKENDS, RECIPES
from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import FORWARD, DelayedSpec, MatmulSpec, Recipe, Rotation, SparsitySpec
from jaxquant.core.tensor_spec import Micro, TensorSpec

I8, I4, F4 = "int8", "int4", "float4_e2m1fn"
E4, E5, E4Z, E5Z = "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"
AQT, QWIX, NATIVE, ALL = ("aqt", "native"), ("qwix", "native"), ("native",), ("aqt", "qwix", "native")

ROWS = {  # string: (auto, backends)
    "": ("", ()), "int8": ("aqt", ALL), "int4": ("qwix", QWIX), "intmp": ("aqt", AQT), "fp8": ("native", NATIVE),
    "fp8_gpu": ("native", NATIVE), "te_fp8_delayedscaling": ("native", NATIVE), "nanoo_fp8": ("native", NATIVE),
    "fp8_nanoo": ("native", NATIVE), "fp8_full": ("qwix", QWIX), "fp8_e4m3": ("qwix", QWIX), "fp8_e5m2": ("qwix", QWIX),
    "fp4": ("qwix", QWIX), "fp4_e2m1": ("qwix", QWIX), "aqt_fp8": ("aqt", AQT), "aqt_fp8_full": ("aqt", AQT),
    "fp8_current": ("native", NATIVE), "te_fp8_currentscaling": ("native", NATIVE), "int8w": ("native", NATIVE),
    "mxfp4w": ("native", NATIVE), "nvfp4w": ("native", NATIVE), "fp8_blockw": ("native", NATIVE),
    "int4w": ("native", NATIVE), "fp8_block": ("native", NATIVE), "mxfp8": ("native", NATIVE),
    "te_mxfp8": ("native", NATIVE), "mxfp4": ("native", NATIVE), "int8_delayed": ("native", NATIVE),
    "nvfp4": ("native", NATIVE), "te_nvfp4": ("native", NATIVE), "te_nvfp4_no_rht": ("native", NATIVE),
    "quartet2": ("native", NATIVE), "tetrajet_v2": ("native", NATIVE),
    **{f"ggml_{name}": ("native", NATIVE) for name in ("q4_0", "q8_0", "q4_k", "q5_k", "q6_k")},
}  # fmt: skip


def reused(name, spec, grad, accumulator=None, **rest):
    return Recipe(
        name,
        MatmulSpec(spec, spec, accumulator),
        MatmulSpec(grad, FORWARD, accumulator),
        MatmulSpec(FORWARD, grad, accumulator),
        **rest,
    )


def delayed(dtype):
    return TensorSpec(dtype, "per_tensor", scaling="delayed")


def mx(name, dtype):
    spec = TensorSpec(dtype, "per_tile", tile_size=32, scale_dtype="float8_e8m0fnu", scale_rounding="up")
    both = MatmulSpec(spec, spec, "float32")
    return Recipe(name, both, both, both)


def nv(granularity="per_tile", free_size=None, **rest):
    scales = {"scale_dtype": "float8_e4m3fn", "scale_rounding": "nearest", "outer_scale": True, "micro": Micro()}
    return TensorSpec(F4, granularity, tile_size=16, free_size=free_size, **scales | rest)


def weights(name, spec):
    return Recipe(name, MatmulSpec(None, spec), MatmulSpec(None, FORWARD))


def te_nvfp4(name, rotation):
    tile, grad = nv(reciprocal=True), nv(reciprocal=True, rounding="stochastic")
    return Recipe(
        name,
        MatmulSpec(tile, nv("per_block", 16, reciprocal=True), "float32"),
        MatmulSpec(grad, FORWARD, "float32"),
        MatmulSpec(tile, grad, "float32", rotation=rotation),
    )


def requantized(name, size, **rest):
    grad, kept, rotation = nv(**rest), nv(source="forward", **rest), Rotation(size, "fresh")
    return Recipe(
        name,
        MatmulSpec(nv(), nv(), "float32"),
        MatmulSpec(grad, kept, "float32", rotation=rotation),
        MatmulSpec(kept, grad, "float32", rotation=rotation),
    )


TILE = TensorSpec(E4, "per_tile", tile_size=128)
BLOCK = TensorSpec(E4, "per_block", tile_size=128, free_size=128)
AQT_E5 = TensorSpec(E5, "per_tensor", reciprocal=True)
EXPECTED = {
    "nvfp4": te_nvfp4("nvfp4", Rotation(16)),
    "te_nvfp4_no_rht": te_nvfp4("te_nvfp4_no_rht", None),
    "quartet2": requantized("quartet2", 128, micro=Micro(17 / 16 * 0.93, 255.99, eden=128)),
    "tetrajet_v2": requantized("tetrajet_v2", 32, micro=Micro(17 / 16), rounding="stochastic"),
    "mxfp8": mx("mxfp8", E4),
    "mxfp4": mx("mxfp4", F4),
    "fp8_block": Recipe(
        "fp8_block",
        MatmulSpec(TILE, BLOCK, "float32"),
        MatmulSpec(TILE, FORWARD, "float32"),
        MatmulSpec(TILE, TILE, "float32"),
    ),
    "int8": reused(
        "int8", TensorSpec(I8, reciprocal=True), TensorSpec(I8, rounding="stochastic", reciprocal=True), "int32"
    ),
    # What native alone computes is free to be lean: bits of scaling in bfloat16, gradients in the kernel's dtype.
    "int8_delayed": reused(
        "int8_delayed",
        delayed(I8),
        TensorSpec(I8, "per_tensor", rounding="stochastic"),
        "int32",
        delayed=DelayedSpec(),
        arithmetic="lean",
    ),
    "int4": reused("int4", TensorSpec(I4), TensorSpec(I4), "int32"),
    "fp8": reused("fp8", delayed(E4), delayed(E5), delayed=DelayedSpec(), arithmetic="lean"),
    "nanoo_fp8": reused("nanoo_fp8", delayed(E4Z), delayed(E5Z), delayed=DelayedSpec(), arithmetic="lean"),
    "fp8_full": reused("fp8_full", TensorSpec(E4), TensorSpec(E5)),
    "fp8_e4m3": reused("fp8_e4m3", TensorSpec(E4), TensorSpec(E4)),
    "fp8_e5m2": reused("fp8_e5m2", TensorSpec(E5), TensorSpec(E5)),
    "fp4": reused("fp4", TensorSpec(F4), TensorSpec(F4)),
    "aqt_fp8": Recipe(
        "aqt_fp8", MatmulSpec(TensorSpec(E4, reciprocal=True), TensorSpec(E4, reciprocal=True), "bfloat16")
    ),
    "aqt_fp8_full": Recipe(
        "aqt_fp8_full",
        MatmulSpec(*[TensorSpec(E4, "per_tensor", reciprocal=True)] * 2, "bfloat16"),
        MatmulSpec(AQT_E5, AQT_E5, "bfloat16"),
        MatmulSpec(AQT_E5, AQT_E5, "bfloat16"),
    ),
    "fp8_current": reused("fp8_current", TensorSpec(E4, "per_tensor"), TensorSpec(E5, "per_tensor"), arithmetic="lean"),
    "int8w": weights("int8w", TensorSpec(I8)),
    "int4w": weights("int4w", TensorSpec(I4)),
    "mxfp4w": weights("mxfp4w", mx("", F4).fwd.rhs),
    "nvfp4w": weights("nvfp4w", nv(micro=None)),
    "fp8_blockw": weights("fp8_blockw", BLOCK),
    **{
        f"ggml_{name}": weights(f"ggml_{name}", TensorSpec(kind, codec=name))
        for name, kind in {"q4_0": I4, "q8_0": I8, "q4_k": I4, "q5_k": I8, "q6_k": I8}.items()
    },
}
ALIASES = {
    "fp8_gpu": "fp8", "te_fp8_delayedscaling": "fp8", "fp8_nanoo": "nanoo_fp8", "fp4_e2m1": "fp4",
    "te_fp8_currentscaling": "fp8_current", "te_mxfp8": "mxfp8", "te_nvfp4": "nvfp4",
}  # fmt: skip


def config(quantization, **fields):
    if quantization == "intmp":
        fields.setdefault("quant_cfg_path", "configs/intmp/int8_weight_only.json")
    return QuantConfig(quantization=quantization, **fields)


def test_the_strings():
    assert {name: (row.auto, row.backends) for name, row in RECIPES.items()} == ROWS
    assert set(EXPECTED) | set(ALIASES) | {"", "intmp"} == set(RECIPES)
    assert all(row.summary and row.fields <= {f.name for f in dataclasses.fields(Options)} for row in RECIPES.values())
    assert set().union(*(row.fields for row in RECIPES.values())) == {f.name for f in dataclasses.fields(Options)}


@pytest.mark.parametrize("name", EXPECTED)
def test_numbers(name):
    assert RECIPES[name].recipe == EXPECTED[name]
    shards = jax.local_device_count()
    expected = EXPECTED[name]
    if "quantization_local_shard_count" in RECIPES[name].fields:
        expected = dataclasses.replace(expected, drhs=dataclasses.replace(expected.drhs, shards=shards))
    assert config(name).recipe() == expected
    assert hash(config(name).recipe()) == hash(config(name).recipe())


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases(alias, name):
    assert RECIPES[alias] == RECIPES[name]
    assert config(alias).recipe() == config(name).recipe()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in RECIPES if name])
def test_pairs(name, backend):
    auto, backends = ROWS[name]
    if backend in backends:
        assert config(name, quant_backend=backend).resolved_backend == backend
    else:
        message = re.escape(f"quantization {name!r} does not run on quant_backend {backend!r}; use ")
        with pytest.raises(ValueError, match=message) as caught:
            config(name, quant_backend=backend)
        assert all(repr(other) in str(caught.value) for other in backends)
    assert config(name).resolved_backend == auto
    if "qwix" in backends:
        assert config(name, use_qwix_quantization=True).resolved_backend == "qwix"


@pytest.mark.parametrize("name", ["fp8", "te_fp8_delayedscaling"])
def test_fp8_on_qwix_names_the_recipe_that_it_is(name):
    for fields in ({"quant_backend": "qwix"}, {"use_qwix_quantization": True}):
        with pytest.raises(ValueError, match="use 'fp8_e4m3', which is the recipe that MaxText runs for 'fp8' on Qwix"):
            config(name, **fields)


@pytest.mark.parametrize("name", ["fp8_gpu", "fp8_nanoo", "nanoo_fp8"])
def test_native_twins_of_maxtext_qwix_mode(name):
    with pytest.raises(
        ValueError, match=f"quantization '{name}' does not run with use_qwix_quantization true.*'native'"
    ):
        config(name, use_qwix_quantization=True)


@pytest.mark.parametrize(("name", "near"), [("int88", "int8"), ("fp8_ful", "fp8_full"), ("nvfp", "nvfp4")])
def test_unknown_string(name, near):
    with pytest.raises(ValueError, match=f"quantization '{name}' is not a known recipe; did you mean .*'{near}'"):
        config(name)
    with pytest.raises(ValueError, match=r"'zzz' is not a known recipe; known ones are int8, int4"):
        config("zzz")


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "fp4", "fp4_e2m1"])
def test_shard_count(name):
    assert config(name, quantization_local_shard_count=4).recipe().drhs.shards == 4
    assert config(name, quantization_local_shard_count=-1).recipe().drhs.shards == jax.local_device_count()
    without = config(name, quantization_local_shard_count=0).recipe()
    assert without.drhs == MatmulSpec()
    assert (without.fwd, without.dlhs) == (config(name).recipe().fwd, config(name).recipe().dlhs)


def test_calibrations_reach_their_operands():
    recipe = config(
        "fp8_full",
        weight_quantization_calibration_method="fixed,-224,224",
        act_quantization_calibration_method="absmax,0.5",
        bwd_quantization_calibration_method="RMS, 4",
    ).recipe()
    weight = TensorSpec(E4, "per_tensor", Calibration("fixed", 1.0, -224.0, 224.0))
    assert recipe.fwd == MatmulSpec(TensorSpec(E4, calibration=Calibration("absmax", 0.5)), weight)
    grad = TensorSpec(E5, calibration=Calibration("rms", 4.0))
    assert (recipe.dlhs, recipe.drhs) == (MatmulSpec(grad, FORWARD), MatmulSpec(FORWARD, grad))


def test_sparsity():
    assert config("fp8_full").recipe().sparsity is None
    fields = {"weight_sparsity_n": 2, "weight_sparsity_m": 4}
    assert config("fp8_full", **fields).recipe().sparsity == SparsitySpec(2, 4, start_step=50, update_step=10)


@pytest.mark.parametrize("name", ["fp8", "fp8_gpu", "nanoo_fp8", "te_fp8_delayedscaling"])
def test_delayed_options(name):
    recipe = config(name, amax_history_length=16, amax_margin=1, amax_init="flax").recipe()
    assert recipe.delayed == DelayedSpec(16, 1, "flax")


def test_bounds_land_on_their_operands_in_aqts_order():
    recipe = config("aqt_fp8_full", constant_bound_config="1,2,3,4,5,6").recipe()
    bounds = {place: spec.calibration.maximum for place, spec in recipe.specs.items()}
    # AQT's fifth, drhs_lhs, is the output gradient, which is our drhs.rhs.
    assert bounds == dict(fwd_lhs=1, fwd_rhs=2, dlhs_lhs=3, dlhs_rhs=4, drhs_lhs=6, drhs_rhs=5)
    assert all(str(spec.calibration).startswith("fixed,") for spec in recipe.specs.values())
    assert {spec.granularity for spec in recipe.specs.values()} == {"per_tensor"}


@pytest.mark.parametrize("index", range(6))
def test_per_tensor_flags(index):
    recipe = config("aqt_fp8_full", per_tensor_scales=[place != index for place in range(6)]).recipe()
    ours = {"drhs_lhs": "drhs_rhs", "drhs_rhs": "drhs_lhs"}.get(OPERANDS[index], OPERANDS[index])
    assert [place for place, spec in recipe.specs.items() if spec.granularity == "per_channel"] == [ours]
    assert all(spec.reciprocal for spec in recipe.specs.values())
