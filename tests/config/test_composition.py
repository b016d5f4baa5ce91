"""Compositions as users write them: mappings and text, wherever a config string is accepted, and errors."""

from __future__ import annotations

import json
import re
import types

import pytest
import yaml

from jaxquant.config import options
from jaxquant.config.explain import explain
from jaxquant.config.loader import load_yaml, parse_overrides
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.recipes import RECIPES, lookup
from jaxquant.config.rules import Rule
from jaxquant.core.typed import build, to_mapping
from jaxquant.training.config import TrainConfig
from jaxquant.training.start import read_config

MAPPING = {"fwd": "fp8_current", "dlhs": "quartet2", "drhs": None}
TEXT = "{fwd: fp8_current, dlhs: quartet2, drhs: null}"
ACTIVATION, _, GRADIENT, _ = options.CALIBRATION


def of(quantization, **fields) -> QuantConfig:
    return QuantConfig.from_any({"quantization": quantization, **fields})


def test_a_mapping_and_its_text_are_one_config():
    for written in (MAPPING, TEXT, "{fwd: fp8_current, dlhs: quartet2}", ' {"dlhs":"quartet2","fwd":"fp8_current"}'):
        config = of(written)
        assert config.quantization == TEXT
        assert config == QuantConfig(quantization=written) == QuantConfig.from_any(TEXT)
        assert config == QuantConfig.from_any(types.SimpleNamespace(quantization=written))
        assert (config.resolved_backend, config.recipe().name) == ("native", TEXT)


def test_it_is_read_back_from_yaml_and_json():
    config = of(MAPPING, rules=[{"path": "a", "recipe": MAPPING}, {"path": "b", "recipe": None}])
    plain = to_mapping(config)
    assert QuantConfig.from_any(json.loads(json.dumps(plain))) == config
    assert QuantConfig.from_any(yaml.safe_load(yaml.safe_dump(plain))) == config
    assert config.rules == (Rule("a", TEXT), Rule("b", None))


def test_a_training_config_and_its_command_line(tmp_path):
    file = tmp_path / "small.yml"
    file.write_text("quantization: {fwd: fp8_current, dlhs: quartet2}\nrules:\n- {path: a/.*, recipe: {fwd: int8w}}\n")
    assert QuantConfig.from_any(load_yaml(file)) == of(MAPPING, rules=[Rule("a/.*", "{fwd: int8w}")])
    config = read_config(str(file), ["quantization={fwd: fp8, drhs: mxfp8}"])
    assert config.quantization == "{fwd: fp8, dlhs: null, drhs: mxfp8}"
    assert config.run_dir == "runs/small-fwd-fp8-dlhs-null-drhs-mxfp8-native"
    assert build(TrainConfig, to_mapping(config)) == config
    assert parse_overrides([f"quantization={TEXT}"])["quantization"] == MAPPING


REFUSED = [
    ({"fwd": "fp8", "dlsh": "fp8"}, "quantization has no field 'dlsh'; did you mean 'dlhs'"),
    ({"dlhs": "fp8"}, "quantization needs field 'fwd'"),
    ({"fwd": "fp9"}, "quantization.fwd 'fp9' is not a known recipe; did you mean 'fp8'"),
    ({"fwd": "fp8", "drhs": "{fwd: int8}"}, "quantization.drhs must be str, got {'fwd': 'int8'}"),
    ({"fwd": None, "dlhs": ""}, "quantization {fwd: null, dlhs: null, drhs: null} leaves fwd, dlhs and drhs in float"),
    ({"fwd": "fp8", "dlhs": "intmp"}, "quantization.dlhs cannot be 'intmp'; use another config string"),
    ("{fwd: fp8", "quantization line 1: expected ',' or '}'"),
]


def test_what_is_no_composition():
    for quantization, message in REFUSED:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            of(quantization)


def test_backends():
    with pytest.raises(
        ValueError, match=f"'{TEXT}' does not run on quant_backend 'aqt'; use quant_backend 'auto' or 'nat"
    ):
        of(MAPPING, quant_backend="aqt")
    with pytest.raises(ValueError, match="does not run on use_qwix_quantization true"):
        of(MAPPING, use_qwix_quantization=True)
    for name in ("int8", "fp8_current", "aqt_fp8"):
        assert lookup(f"{{fwd: {name}, dlhs: {name}, drhs: {name}}}").backends == RECIPES[name].backends


def test_options_of_a_row_that_gives_another_matmul_than_they_change_are_refused():
    for reading, name, value in (
        ({"fwd": "int8", "dlhs": "int8"}, "quantization_local_shard_count", 2),
        (MAPPING, "amax_margin", 1),
        ({"fwd": "fp8_current", "dlhs": "quartet2", "drhs": "quartet2"}, "four_over_six", True),
        ({"fwd": "fp8_current", "dlhs": "fp8_full", "drhs": "fp8_current"}, ACTIVATION, "absmax,0.5"),
        ({"fwd": "fp8_full"}, GRADIENT, "absmax,0.5"),
    ):
        assert name not in explain(reading)
        with pytest.raises(ValueError, match=f"{name} .* is not read by quantization"):
            of(reading, **{name: value})


def test_explained():
    text = explain(MAPPING)
    assert text == explain(TEXT)
    assert "Kept for the backward pass: the input in float, the weight in float." in text
    assert "four_over_six" in explain(MAPPING | {"fwd": "nvfp4"}, {"four_over_six": True})
    own = explain({"fwd": "fp8_current", "drhs": "mxfp8"})
    assert "the input as the weight's gradient reads it, the weight in float" in own
