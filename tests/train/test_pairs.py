"""Qwix, and AQT with a file of bits, run whole from the command: steps, held-out loss, summary.

So does native in ``test_run.py``. Every pair of string and backend trains in ``tests/test_gallery.py``, is
counted matmul by matmul in ``tests/audit/test_coverage.py``, and is allowed or refused in
``tests/config/test_recipe_table.py``.
"""

from __future__ import annotations

import json
import math

import pytest

from tests.train.conftest import CI_CONFIG, ROOT, read_losses
from train.__main__ import main

WHOLE = [("fp8_full", "qwix"), ("intmp", "aqt")]


@pytest.mark.parametrize(("string", "backend"), WHOLE)
def test_a_pair_of_the_table_trains(string, backend, corpus, tmp_path, finished):
    file = [f"quant_cfg_path={ROOT}/configs/intmp/int8_weight_only.json"] if string == "intmp" else []
    place = ["dataset=text", f"dataset_path={corpus}", f"run_dir={tmp_path}"]
    assert main([str(CI_CONFIG), f"quantization={string}", f"quant_backend={backend}", "steps=2", *place, *file]) == 0
    ours = read_losses(tmp_path)
    assert len(ours) == 2
    assert all(map(math.isfinite, ours.values()))
    assert ours[1] != read_losses(finished(""))[1], "the run is that of the float model"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["backend"] == backend
    quantized = [layer for layer in summary["layers"] if layer["recipe"]]
    assert len(quantized) == 7
    assert {layer["backend"] for layer in quantized} == {backend}
