"""Every pair of config string and backend: the ones of the table train, every other one is refused by name."""

from __future__ import annotations

import json
import math

import pytest

from jaxquant.config.recipes import BACKENDS, RECIPES, REFUSED
from tests.train.conftest import CI_CONFIG, ROOT
from train.__main__ import main

PAIRS = [(string, backend) for string, row in RECIPES.items() for backend in row.backends]
OTHERS = [(string, backend) for string in RECIPES if string for backend in BACKENDS if (string, backend) not in PAIRS]


def words(string, backend, corpus, run_dir):
    file = [f"quant_cfg_path={ROOT}/configs/intmp/int8_weight_only.json"] if string == "intmp" else []
    place = ["dataset=text", f"dataset_path={corpus}", f"run_dir={run_dir}"]
    return [str(CI_CONFIG), f"quantization={string}", f"quant_backend={backend}", "steps=2", *place, *file]


def losses(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def float_losses(corpus, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("float")
    assert main(words("", "auto", corpus, run_dir)) == 0
    return losses(run_dir)


@pytest.mark.parametrize(("string", "backend"), PAIRS)
def test_a_pair_of_the_table_trains(string, backend, corpus, tmp_path, float_losses):
    assert main(words(string, backend, corpus, tmp_path)) == 0
    ours = losses(tmp_path)
    assert len(ours) == 2
    assert all(map(math.isfinite, ours))
    assert ours != float_losses, "the run is that of the float model"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["backend"] == backend
    quantized = [layer for layer in summary["layers"] if layer["recipe"]]
    assert len(quantized) == 7
    assert {layer["backend"] for layer in quantized} == {backend}


@pytest.mark.parametrize(("string", "backend"), OTHERS)
def test_any_other_pair_is_refused_by_name(string, backend, corpus, tmp_path, capsys):
    assert main(words(string, backend, corpus, tmp_path / "run")) == 2
    message = capsys.readouterr().err
    assert repr(string) in message
    assert repr(backend) in message
    assert any(repr(other) in message for other in RECIPES[string].backends)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("string", REFUSED)
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_block_scaled_strings_say_that_they_come_later(string, backend, corpus, tmp_path, capsys):
    assert main(words(string, backend, corpus, tmp_path)) == 2
    message = capsys.readouterr().err
    assert repr(string) in message
    assert "not implemented yet" in message
