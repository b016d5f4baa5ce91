"""Every pair of config string and backend: the ones of the table train, every other one is refused by name.

A pair trains if its step, traced from the command's own configuration, multiplies in that string's recipe on that
backend, and no layer fell back to float. Each kind of backend and file runs whole: steps, held-out loss, summary.
Strings of one row of the table are one string (``tests/config/test_recipe_table.py``); what each recipe computes is
checked by running in ``tests/inject/test_linen.py`` (native), ``tests/backends/test_bands.py`` and ``tests/twins``.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jaxquant.audit.coverage import of_trace
from jaxquant.config.recipes import BACKENDS, RECIPES
from tests.train.conftest import CI_CONFIG, ROOT, read_losses
from train.__main__ import main, read_config
from train.step import build, check_step

PAIRS = [(string, backend) for string, row in RECIPES.items() for backend in row.backends]
FIRST = {id(row): string for string, row in reversed(RECIPES.items())}
TRACED = [(string, backend) for string, backend in PAIRS if FIRST[id(RECIPES[string])] == string]
WHOLE = [("fp8", "native"), ("int8", "aqt"), ("fp8_full", "qwix"), ("intmp", "native"), ("int4w", "native")]
OTHERS = [(string, backend) for string in RECIPES if string for backend in BACKENDS if (string, backend) not in PAIRS]


def words(string, backend, corpus, run_dir):
    file = [f"quant_cfg_path={ROOT}/configs/intmp/int8_weight_only.json"] if string == "intmp" else []
    place = ["dataset=text", f"dataset_path={corpus}", f"run_dir={run_dir}"]
    return [str(CI_CONFIG), f"quantization={string}", f"quant_backend={backend}", "steps=2", *place, *file]


@pytest.mark.parametrize(("string", "backend"), TRACED)
def test_the_step_of_a_pair_of_the_table_is_in_its_recipe(string, backend, corpus, tmp_path):
    path, *overrides = words(string, backend, corpus, tmp_path)
    program = build(read_config(path, overrides), 320)
    tokens = np.zeros((8, 32), np.int32)
    batch = dict.fromkeys(("inputs", "targets", "segment_ids", "positions"), tokens)
    layers = program.model.layers
    quantized = [layer for layer in layers if layer.recipe]
    assert len(quantized) == 7
    assert {layer.backend for layer in quantized} == {backend}
    coverage = of_trace(check_step(program, batch), layers=layers)
    coverage.check()  # every matmul that the recipe means to quantize is, forward and backward
    # Of weights alone the kernel's rounding is all there is. Tiles are multiplied dequantized, which the reason tells.
    recipe = RECIPES[string].recipe
    is_low = [row.is_low or row.reason.startswith("tiles of") for row in coverage.rows]
    assert any(is_low) == (string != "intmp" and recipe.fwd.lhs is not None)


@pytest.fixture(scope="module")
def float_losses(corpus, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("float")
    assert main(words("", "auto", corpus, run_dir)) == 0
    return read_losses(run_dir)


@pytest.mark.parametrize(("string", "backend"), WHOLE)
def test_a_pair_of_the_table_trains(string, backend, corpus, tmp_path, float_losses):
    assert main(words(string, backend, corpus, tmp_path)) == 0
    ours = read_losses(tmp_path)
    assert len(ours) == 2
    assert all(map(math.isfinite, ours.values()))
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
