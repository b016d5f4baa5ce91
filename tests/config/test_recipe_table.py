"""The table: exact numbers of every config string, aliases, pairs with backends, options."""

import dataclasses
import re

import pytest

from jaxquant.config.backends import BACKENDS
from jaxquant.config.options import OPERANDS, Options
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.recipes import RECIPES
from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import FORWARD, MatmulSpec
from jaxquant.core.tensor_spec import TensorSpec

E4, E5 = "float8_e4m3fn", "float8_e5m2"

ALIASES = {
    "fp8_gpu": "fp8", "te_fp8_delayedscaling": "fp8", "fp8_nanoo": "nanoo_fp8", "fp4_e2m1": "fp4",
    "te_fp8_currentscaling": "fp8_current", "te_mxfp8": "mxfp8", "te_nvfp4": "nvfp4",
}  # fmt: skip


def config(quantization, **fields):
    if quantization == "intmp":
        fields.setdefault("quant_cfg_path", "configs/intmp/int8_weight_only.json")
    return QuantConfig(quantization=quantization, **fields)


def test_the_strings():
    assert RECIPES[""].auto == ""
    assert all(row.summary and row.fields <= {f.name for f in dataclasses.fields(Options)} for row in RECIPES.values())
    assert set().union(*(row.fields for row in RECIPES.values())) == {f.name for f in dataclasses.fields(Options)}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases(alias, name):
    assert RECIPES[alias] == RECIPES[name]
    assert config(alias).recipe() == config(name).recipe()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in RECIPES if name])
def test_pairs(name, backend):
    backends = RECIPES[name].backends
    if backend in backends:
        assert config(name, quant_backend=backend).resolved_backend == backend
    else:
        message = re.escape(f"quantization {name!r} does not run on quant_backend {backend!r}; use ")
        with pytest.raises(ValueError, match=message) as caught:
            config(name, quant_backend=backend)
        assert all(repr(other) in str(caught.value) for other in backends)
    assert config(name).resolved_backend == RECIPES[name].auto == backends[0]
    if "qwix" in backends:
        assert config(name, use_qwix_quantization=True).resolved_backend == "qwix"


@pytest.mark.parametrize("name", ["fp8", "te_fp8_delayedscaling"])
def test_fp8_on_qwix_names_the_recipe_that_it_is(name):
    for fields in ({"quant_backend": "qwix"}, {"use_qwix_quantization": True}):
        with pytest.raises(ValueError, match="use 'fp8_e4m3', which is the recipe that MaxText runs for 'fp8' on Qwix"):
            config(name, **fields)


UNKNOWN = {
    "int88": "did you mean 'int8'",
    "fp8_ful": "did you mean 'fp8_full'",
    "nvfp": "did you mean 'nvfp4'",
    "float8": "did you mean .*'fp8'",
    "int8_dynamic": "did you mean 'int8_delayed' or 'int8'",
    "FP8": r"did you mean 'fp8'\? 'python -m jaxquant strings' lists all$",
    "none": "write null .* for float$",
    "zzz": "'python -m jaxquant strings' lists all$",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_string(name):
    with pytest.raises(ValueError, match=f"quantization '{name}' is not a known recipe; {UNKNOWN[name]}"):
        config(name)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "fp4", "fp4_e2m1"])
def test_shard_count(name):
    assert config(name, quantization_local_shard_count=4).recipe().drhs.shards == 4
    assert config(name, quantization_local_shard_count=-1).recipe().drhs.shards == -1
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
