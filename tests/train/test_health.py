"""Health of a run: it changes nothing, measures the tensors of the step, and is written once per step."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from typing import Any

import numpy as np
import pytest

from jaxquant.audit.health import HealthRow
from jaxquant.audit.statistics import STATISTICS
from jaxquant.core.quant_state import TENSORS
from jaxquant.training.health import Health, HealthLog, find_faults, sampled_sequences
from jaxquant.training.metrics import Metrics
from tests.train.conftest import STEPS, quantized, read_losses, train

FILE = "health.jsonl"
DTYPES = {"input": "float8_e4m3fn", "kernel": "float8_e4m3fn", "output_grad": "float8_e5m2"}


def rows_of(run):
    return [json.loads(line) for line in (run / FILE).read_text().splitlines()]


@pytest.fixture(scope="module")
def measured(tiny, tmp_path_factory):
    run = tmp_path_factory.mktemp("health") / "run"
    train(quantized(tiny, "fp8"), run, health_every=8)
    return run


def test_a_run_writes_a_row_at_every_step_that_is_due_and_changes_no_bit(measured, finished):
    assert read_losses(measured) == read_losses(finished("fp8"))
    rows = rows_of(measured)
    assert [row["step"] for row in rows] == [8, 16, 24]
    layers = ("self_attention/query", "self_attention/key", "self_attention/value", "self_attention/out")
    layers += ("mlp/wi_0", "mlp/wi_1", "mlp/wo")
    names = [f"layers/{name}, layer {index}" for index in range(2) for name in layers]
    for row in rows:
        assert row["layers"] == names
        assert row["sequences"] == 1  # an eighth of eight
        for tensor in TENSORS:
            assert set(row[tensor]) == set(STATISTICS)
            assert all(len(values) == len(names) for values in row[tensor].values())
            assert all(value > 0 for value in row[tensor]["amax"])
            assert all(20 < value < 60 for value in row[tensor]["sqnr"])
    lines = [json.loads(line) for line in (measured / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line for line in lines if "health/lowest_sqnr_db" in line}
    assert list(found) == [8, 16, 24]
    assert found[24]["health/lowest_sqnr_db"] == pytest.approx(min(min(rows[-1][t]["sqnr"]) for t in TENSORS), rel=1e-5)


def test_a_resumed_run_writes_no_step_twice(measured, tiny, tmp_path):
    run = shutil.copytree(measured, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / str(STEPS))  # resumes from step 21, and writes the row of step 24 again
    with (run / FILE).open("a") as file:
        file.write('{"step": 32, "lay')
    said = train(quantized(tiny, "fp8"), run, health_every=8)
    assert f"resumed {run} at step {STEPS - 3}" in said
    assert rows_of(run) == rows_of(measured)


def test_sampled_sequences_divide_the_batch_and_fit_micro_batches_devices_and_shards(tiny):
    """By default, at most one micro-batch."""

    def sampled(batch, micro_batches, asked, devices, shards):
        fields = {"batch_size": batch, "gradient_accumulation_steps": micro_batches, "health_sequences": asked}
        return sampled_sequences(dataclasses.replace(tiny, **fields, health_every=5), devices, shards)

    assert [sampled(*each) for each in ((16, 1, 0, 1, 1), (16, 1, 0, 4, 1), (16, 1, 0, 2, 8))] == [2, 4, 8]
    assert [sampled(*each) for each in ((64, 64, 0, 1, 1), (64, 16, 0, 4, 2), (64, 64, 32, 1, 1))] == [1, 4, 32]
    with pytest.raises(ValueError, match=r"^health_sequences 3 must divide .* to one of \[1, 2, 4"):
        sampled(16, 1, 3, 1, 1)
    with pytest.raises(ValueError, match=r"^health_every 5: no part of batch_size 16 fits .*; set health_every to 0$"):
        sampled(16, 1, 0, 1, 3)


def table(**changes: dict[tuple[int, int], float]) -> dict[str, np.ndarray]:
    """Return statistics of two healthy layers, with exceptions {statistic: {(row, tensor): value}}."""
    good = {"amax": 1.0, "scale": 0.01, "saturated": 0.0, "flushed": 0.0, "sqnr": 30.0, "nonfinite": 0.0}
    values = {name: np.full((2, 3), value) for name, value in good.items()}
    for name, places in changes.items():
        for place, value in places.items():
            values[name][place] = value
    return values


ROWS = (HealthRow("layers/wo", (0,), DTYPES), HealthRow("head", (), dict.fromkeys(TENSORS, "int4")))


def test_what_is_wrong_is_named_with_layer_and_tensor():
    assert find_faults(ROWS, table(sqnr={(0, 0): 20.1, (1, 2): 10.1}, saturated={(0, 1): 0.01})) == []
    wrong = table(sqnr={(0, 2): 19.0}, saturated={(0, 0): 0.03}, nonfinite={(1, 1): 0.5}, flushed={(0, 2): 0.4})
    assert [text for _, text in find_faults(ROWS, wrong)] == [
        "head, kernel (int4): 50.00% not finite",
        "layers/wo, layer 0, output_grad (float8_e5m2): SQNR 19.0 dB, 40.0% flushed to zero (warns below 20 dB)",
        "layers/wo, layer 0, input (float8_e4m3fn): 3.0% saturated, SQNR 30.0 dB (warns above 1%)",
    ]


class _Said:
    def __init__(self):
        self.lines, self.rows = [], []

    def say(self, text):
        self.lines.append(text)

    def record_health(self, row, values):
        self.rows.append((row, values))


def test_a_tensor_is_named_once_and_the_rest_is_counted():
    said: Any = _Said()
    log = HealthLog(Health(ROWS, 1, lambda state, batch: {}), said)
    wrong: Any = table(sqnr={(row, place): 1.0 + place for row in range(2) for place in range(3)})
    log.write(5, (wrong, {}))
    assert len(said.lines) == 4
    assert said.lines[0].startswith("health, step 5: layers/wo, layer 0, input (float8_e4m3fn): SQNR 1.0 dB")
    assert said.lines[3] == f"health, step 5: 3 more tensors like these, see {FILE}"
    log.write(10, (wrong, {}))
    assert len(said.lines) == 4
    assert [row["step"] for row, _ in said.rows] == [5, 10]
    assert said.rows[0][1]["lowest_sqnr_db"] == 1.0


def test_an_infinite_number_is_null_in_the_files(tiny, tmp_path):
    """JSON has no infinities. A kernel of ones has infinite SQNR, a broken tensor an infinite amax."""
    places = [(row, place) for row in range(2) for place in range(3)]
    values: Any = table(sqnr=dict.fromkeys(places, math.inf), amax={(1, 0): math.inf}, nonfinite={(1, 0): 0.5})
    with Metrics(tmp_path, dataclasses.replace(tiny, health_every=1), 0) as metrics:
        HealthLog(Health(ROWS, 1, lambda state, batch: {}), metrics).write(1, (values, {}))
        metrics.record_held_out(1, math.nan)
    (row,) = rows_of(tmp_path)
    assert (row["kernel"]["sqnr"], row["input"]["amax"], row["input"]["nonfinite"]) == ([None] * 2, [1, None], [0, 0.5])
    assert "NaN" not in (text := (tmp_path / "metrics.jsonl").read_text())
    assert "Infinity" not in text
