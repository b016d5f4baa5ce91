"""Health of a run: it changes nothing, sees what the step sees, is written once a step, and says what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxquant.audit.health import HealthRow
from jaxquant.audit.statistics import STATISTICS
from jaxquant.core.quant_state import TENSORS
from tests.numerics import TRAIN_SUMMATION_ORDER
from tests.states import nested, recorded
from tests.train.conftest import STEPS, quantized, read_losses, train
from train.checkpoint import write_config
from train.data import make_iterators
from train.health import Health, HealthLog, build_health, find_faults, sampled_sequences, worst
from train.metrics import Metrics
from train.report import health_maps, load_run
from train.sharding import AXES
from train.step import build

FILE = "health.jsonl"
DTYPES = {"input": "float8_e4m3fn", "kernel": "float8_e4m3fn", "output_grad": "float8_e5m2"}


def rows_of(run):
    return [json.loads(line) for line in (run / FILE).read_text().splitlines()]


@pytest.fixture(scope="module")
def measured(tiny, tmp_path_factory):
    run = tmp_path_factory.mktemp("health") / "run"
    train(quantized(tiny, "fp8"), run, health_every=8)
    return run


def test_a_run_writes_a_row_at_every_step_that_is_due(measured):
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


def test_health_changes_no_bit_of_a_run(measured, finished):
    assert read_losses(measured) == read_losses(finished("fp8"))


def test_a_resumed_run_writes_no_step_twice(measured, tiny, tmp_path):
    run = shutil.copytree(measured, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / str(STEPS))  # goes on from 21, and writes the row of 24 again
    with (run / FILE).open("a") as file:
        file.write('{"step": 32, "lay')
    said = train(quantized(tiny, "fp8"), run, health_every=8)
    assert f"resumed {run} at step {STEPS - 3}" in said
    assert rows_of(run) == rows_of(measured)


@pytest.mark.slow
def test_the_whole_batch_has_the_amaxes_that_the_step_records(tiny):
    """Every tensor's amax is that which the training step puts into the amax history; a part of the batch has less."""
    config = dataclasses.replace(quantized(tiny, "fp8"), health_every=1, health_sequences=8)
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)
    batch = jax.tree.map(np.asarray, dict(next(data.train)))
    smaller = dataclasses.replace(program, config=dataclasses.replace(config, health_sequences=0))
    whole, part = build_health(program), build_health(smaller)
    # From the second step on the scales come from the history, and do not depend on what is measured.
    state, _ = program.step(program.init(), batch, jnp.bool_(True))
    tables = [{name: np.asarray(v) for name, v in health.measure(state, batch)[0].items()} for health in (whole, part)]
    after, _ = program.step(state, batch, jnp.bool_(True))
    layers = nested(after.quant_state)
    for place, tensor in enumerate(TENSORS):
        for row, ours, less in zip(whole.rows, tables[0]["amax"][:, place], tables[1]["amax"][:, place], strict=True):
            layer: Any = layers
            for name in row.path.split("/"):
                layer = layer[name]
            (op,) = layer.values()
            history = op[f"{tensor}_amax_history"][row.index]
            low, high = (recorded(ours * (1 + sign * TRAIN_SUMMATION_ORDER)) for sign in (-1, 1))
            assert low <= history[0] <= high, row.name
            assert less <= ours * (1 + TRAIN_SUMMATION_ORDER)
            assert less > ours / 100


@pytest.mark.parametrize(
    ("batch", "micro_batches", "asked", "devices", "shards", "sequences"),
    [
        *((16, 1, 0, 1, 1, 2), (16, 1, 0, 4, 1, 4), (16, 1, 0, 2, 8, 8), (12, 1, 0, 1, 1, 2), (4, 1, 0, 1, 1, 1)),
        *((16, 1, 16, 8, 1, 16), (64, 64, 0, 1, 1, 1), (64, 16, 0, 1, 1, 4), (64, 16, 0, 4, 2, 4)),
        *((64, 8, 0, 1, 1, 8), (64, 2, 0, 1, 1, 8), (64, 64, 32, 1, 1, 32)),
    ],
)
def test_sampled_sequences_divide_the_batch_and_fit_micro_batches_devices_and_shards(
    tiny, batch, micro_batches, asked, devices, shards, sequences
):
    """No more than a micro-batch, unless asked."""
    fields = {"batch_size": batch, "gradient_accumulation_steps": micro_batches, "health_sequences": asked}
    assert sampled_sequences(dataclasses.replace(tiny, **fields), devices, shards) == sequences


def test_devices_of_one_tensor_group_share_their_sequences(tiny):
    """Eight devices in two by two groups of two: four sequences at least, neither two nor eight."""
    mesh: Any = AbstractMesh((2, 2, 2), AXES)
    program = dataclasses.replace(build(dataclasses.replace(tiny, num_layers=1), 320), mesh=mesh)
    assert build_health(program).sequences == 4


@pytest.mark.parametrize(
    ("fields", "shards", "message"),
    [
        (
            {"health_sequences": 3},
            1,
            r"health_sequences 3 must divide batch_size 16 and be a multiple of 1 \(.*\); "
            r"set health_sequences to one of \[1, 2, 4, 8, 16\], or health_every to 0$",
        ),
        (
            {"health_every": 5},
            3,
            r"health_every 5: no part of batch_size 16 fits into one of 1 micro-batches and is a multiple of 3 \(.*\); "
            r"set health_every to 0$",
        ),
    ],
)
def test_sampled_sequences_that_do_not_fit_are_refused(tiny, fields: dict[str, int], shards: int, message: str):
    config = dataclasses.replace(tiny, **{"batch_size": 16, "health_sequences": 0} | fields)
    with pytest.raises(ValueError, match=message):
        sampled_sequences(config, 1, shards)


def table(**changes: dict[tuple[int, int], float]) -> dict[str, np.ndarray]:
    """Statistics of two layers in good health, but for what is said: {statistic: {(row, tensor): value}}."""
    good = {"amax": 1.0, "scale": 0.01, "saturated": 0.0, "flushed": 0.0, "sqnr": 30.0, "nonfinite": 0.0}
    values = {name: np.full((2, 3), value) for name, value in good.items()}
    for name, places in changes.items():
        for place, value in places.items():
            values[name][place] = value
    return values


ROWS = (HealthRow("layers/wo", (0,), DTYPES), HealthRow("head", (), dict.fromkeys(TENSORS, "int4")))


def test_what_is_wrong_is_named_with_layer_and_tensor():
    assert find_faults(ROWS, table(sqnr={(0, 0): 20.1, (1, 2): 10.1}, saturated={(0, 1): 0.01})) == []
    wrong = table(
        sqnr={(0, 2): 19.0, (1, 0): 9.0}, saturated={(0, 0): 0.03}, nonfinite={(1, 1): 0.5}, flushed={(0, 2): 0.4}
    )
    assert [text for _, text in find_faults(ROWS, wrong)] == [
        "head, kernel (int4): 50.00% not finite",
        "head, input (int4): SQNR 9.0 dB, 0.0% flushed to zero (warns below 10 dB)",
        "layers/wo, layer 0, output_grad (float8_e5m2): SQNR 19.0 dB, 40.0% flushed to zero (warns below 20 dB)",
        "layers/wo, layer 0, input (float8_e4m3fn): 3.0% saturated, SQNR 30.0 dB (warns above 1%)",
    ]


class _Said:
    def __init__(self):
        self.lines, self.rows = [], []

    def say(self, text):
        self.lines.append(text)

    def health(self, row, values):
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
    assert said.rows[0][1] == {
        "lowest_sqnr_db": 1.0,
        "largest_saturated": 0,
        "largest_flushed": 0,
        "largest_nonfinite": 0,
    }


def test_a_float_run_has_amaxes_and_nothing_to_warn_of():
    unknown = dict.fromkeys(((row, place) for row in range(2) for place in range(3)), math.nan)
    values: Any = table(scale=unknown, saturated=unknown, flushed=unknown, sqnr=unknown)
    said: Any = _Said()
    rows = tuple(dataclasses.replace(row, dtypes=dict.fromkeys(TENSORS)) for row in ROWS)
    HealthLog(Health(rows, 1, lambda state, batch: {}), said).write(1, (values, {}))
    ((line, _),) = said.rows
    assert line["kernel"]["amax"] == [1.0, 1.0]
    assert line["kernel"]["sqnr"] == [None, None]
    assert said.lines == []
    assert worst(values, {}) == {"largest_nonfinite": 0}


def test_an_infinite_number_is_null_in_the_files_and_the_page_reads_them(tiny, tmp_path):
    """A kernel of ones has no rounding error at all, and a broken tensor an infinite amax."""
    places = [(row, place) for row in range(2) for place in range(3)]
    values: Any = table(sqnr=dict.fromkeys(places, math.inf), amax={(1, 0): math.inf}, nonfinite={(1, 0): 0.5})
    config = dataclasses.replace(tiny, run_dir=str(tmp_path), health_every=1)
    with Metrics(tmp_path, config, 0) as metrics:
        HealthLog(Health(ROWS, 1, lambda state, batch: {}), metrics).write(1, (values, {}))
        metrics.held_out(1, math.nan)
        metrics.step(1, {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 1.0})
    lines = [strict(line) for name in (FILE, "metrics.jsonl") for line in (tmp_path / name).read_text().splitlines()]
    assert lines[0]["kernel"]["sqnr"] == [None, None]
    assert lines[0]["input"]["amax"] == [1.0, None]
    assert lines[0]["input"]["nonfinite"] == [0.0, 0.5]
    assert lines[1]["health/lowest_sqnr_db"] is None
    write_config(tmp_path, config)
    run = load_run(tmp_path, "run")
    assert run.train == {1: 2.0}
    assert math.isnan(run.held_out[1])
    drawn = {about.partition(",")[0]: figure for about, figure in health_maps(run).items()}
    np.testing.assert_array_equal(drawn["Amax"].data[0].z, [[0.0], [np.nan]])
    assert "SQNR" not in drawn


def strict(line: str) -> Any:
    """Parse JSON as jq and JSON.parse do, without Infinity and NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON: {line[:200]}")

    return json.loads(line, parse_constant=refuse)
