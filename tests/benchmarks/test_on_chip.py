"""What is compared on a chip: a CPU compared with itself, and with one that computes something else."""

import contextlib
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import on_chip
from benchmarks.compare_libraries import ENTRIES
from benchmarks.on_chip import difference, measure_strings, measure_yardstick, priced
from benchmarks.schemes import Scheme
from benchmarks.timing import TURN, undisturbed


def test_a_step_is_timed_with_histories_and_beside_the_price_of_its_chip(monkeypatch):
    wanted = [entry for entry in ENTRIES if entry.name in ("bf16", "jaxquant fp8", "jaxquant fp8, float32 kernel")]
    monkeypatch.setattr(
        on_chip, "priced", lambda kind: {"jaxquant fp8": {"matmuls": "6 f8", "us": 7, "× bf16": "2.00"}}
    )
    bf16, fp8, direct = measure_yardstick(1, (16, 32, 32), wanted)
    assert (bf16["step"], bf16["× bf16"], bf16["predicted us"]) == ("bf16", 1, "–")
    assert (fp8["predicted matmuls"], fp8["predicted us"], fp8["predicted × bf16"]) == ("6 f8", 7, "2.00")
    assert fp8["us"] > 0
    assert direct["step"] == "jaxquant fp8, float32 kernel"


def test_a_timed_step_is_one_after_the_first():
    entry = next(entry for entry in ENTRIES if entry.name == "jaxquant fp8")
    _, (_, state, _, _) = on_chip.begun(entry, (16, 32, 32))
    histories = [leaf for path, leaf in jax.tree.leaves_with_path(state) if "amax_history" in str(path[-1])]
    assert histories
    assert all(float(history.max()) > 0 for history in histories)


def test_the_price_is_that_of_the_same_chip():
    assert priced("NVIDIA H200")["bf16"]["us"] > 0
    assert priced("NVIDIA B200")["bf16"]["us"] < priced("NVIDIA H200")["bf16"]["us"]
    assert priced("cpu") == {}


def test_the_difference_is_relative_and_a_nan_is_infinite():
    a, b = np.array([3.0, 4.0]), np.array([3.0, 4.5])
    assert difference([a, a], [a, b]) == pytest.approx(0.5 / np.linalg.norm(b))
    assert difference([np.zeros(2)], [np.zeros(2)]) == 0
    assert difference([np.array([np.nan])], [np.ones(1)]) == float("inf")


@pytest.mark.parametrize(("factors", "note"), [((1.02, 1.0), ""), ((1.0, 1.02), "WRONG: not what a CPU computes")])
def test_a_device_that_computes_something_else_as_written_is_wrong(monkeypatch, factors, note):
    def pool(platform, workers):
        asked.append(platform)
        scales = factors if len(asked) == 1 else (1.0,)

        def run(function, given):
            results = (function(one)[0] for one in given)
            return [
                ([[leaf * scale for leaf in form] for form, scale in zip(forms, scales, strict=True)], "3 f32")
                for forms in results
            ]

        return contextlib.nullcontext(SimpleNamespace(map=run))

    asked = []
    monkeypatch.setattr(on_chip, "_pool", pool)
    rows = measure_strings([Scheme("fp8_block", "native")])
    assert [row["quantization"] for row in rows] == ["none", "fp8_block"]
    assert [row["note"] for row in rows] == [note, note]
    for row in rows:
        assert (row["difference"], row["as written"]) == pytest.approx([factor - 1 for factor in factors], abs=1e-6)
    assert asked == [jax.default_backend(), "cpu"]


def test_what_does_not_run_says_why():
    text, program = on_chip.outputs(Scheme("fp4", "aqt"))
    assert "fp4" in text
    assert program == "–"


def test_a_bench_times_when_it_is_its_turn(tmp_path, monkeypatch):
    monkeypatch.setenv(TURN, str(tmp_path / "one"))
    timed = []

    def bench():
        with undisturbed():
            timed.append(True)

    thread = threading.Thread(target=bench)
    thread.start()
    while thread.is_alive() and not (tmp_path / "one.ready").exists():
        pass
    assert not timed
    (tmp_path / "one.go").touch()
    thread.join(10)
    assert timed
