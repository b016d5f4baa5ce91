"""Table of config strings: pairs with backends, and the operands that options change."""

import re
from pathlib import Path

import pytest

from jaxquant.config.backends import BACKENDS
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.recipes import RECIPES
from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import FORWARD, MatmulSpec
from jaxquant.core.tensor_spec import TensorSpec

E4, E5 = "float8_e4m3fn", "float8_e5m2"
ROOT = Path(__file__).parents[2]


def config(quantization, **fields):
    if quantization == "intmp":
        fields.setdefault("quant_cfg_path", f"{ROOT}/configs/intmp/int8_weight_only.json")
    return QuantConfig(quantization=quantization, **fields)


def test_every_string_runs_on_its_backends_and_is_refused_on_others():
    for name in filter(None, RECIPES):
        backends = RECIPES[name].backends
        for backend in BACKENDS:
            if backend in backends:
                assert config(name, quant_backend=backend).resolved_backend == backend
            else:
                message = re.escape(f"quantization {name!r} does not run on quant_backend {backend!r}; use ")
                with pytest.raises(ValueError, match=message):
                    config(name, quant_backend=backend)
        assert config(name).resolved_backend == RECIPES[name].auto == backends[0]


UNKNOWN = {
    "int88": "did you mean 'int8'",
    "FP8": r"did you mean 'fp8'\? run 'jaxquant strings' to list all recipes$",
    "none": "write null .* for float$",
    "zzz": "run 'jaxquant strings' to list all recipes$",
}


def test_unknown_string():
    for name, told in UNKNOWN.items():
        with pytest.raises(ValueError, match=f"quantization '{name}' is not a known recipe; {told}"):
            config(name)
    with pytest.raises(ValueError, match="use 'fp8_e4m3', as MaxText does for 'fp8' on Qwix, or "):
        config("fp8", use_qwix_quantization=True)


def test_shard_count():
    plain = config("int8").recipe()
    assert config("int8", quantization_local_shard_count=4).recipe().drhs.shards == 4
    assert config("int8", quantization_local_shard_count=-1).recipe().drhs.shards == -1
    without = config("int8", quantization_local_shard_count=0).recipe()
    assert (without.fwd, without.dlhs, without.drhs) == (plain.fwd, plain.dlhs, MatmulSpec())


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
    # AQT's fifth operand, drhs_lhs, is the output gradient: drhs.rhs in jaxquant.
    assert bounds == dict(fwd_lhs=1, fwd_rhs=2, dlhs_lhs=3, dlhs_rhs=4, drhs_lhs=6, drhs_rhs=5)
    assert all(str(spec.calibration).startswith("fixed,") for spec in recipe.specs.values())
    assert {spec.granularity for spec in recipe.specs.values()} == {"per_tensor"}
