"""Comparison of runs: its numbers, its page and its errors, on folders without a training run."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from jaxquant.cli import main
from jaxquant.training import report

PATHS = ("self_attention/query", "self_attention/out", "mlp/wi_0")


def health(step: int) -> dict[str, Any]:
    """Return a line of health.jsonl: two layers of each path, the last of which becomes worse in each step."""
    names = [f"layers/{path}, layer {layer}" for layer in range(2) for path in PATHS]
    good = len(names) - 1
    tensor = {"amax": [1.0 + step] * len(names), "nonfinite": [0.0] * len(names)}
    tensor |= {"scale": [0.01] * good + [0.02], "saturated": [0.0] * good + [step / 1000]}
    tensor |= {"flushed": [0.0] * good + [0.5], "sqnr": [31.5] * good + [30 - step / 20]}
    tensors = dict.fromkeys(("input", "kernel", "output_grad"), tensor)
    return {"step": step, "sequences": 2, "layers": names} | tensors


def write_run(
    folder: Path, quantization: str, excess: float = 0.0, time: float = 0.25, steps: int = 300, **config: Any
) -> Path:
    """Write a run whose losses lie ``excess`` (relative) above those of the unquantized one."""
    noise = random.Random(0)
    folder.mkdir(parents=True)
    fields = {"quantization": quantization, "steps": steps, "run_dir": str(folder), "learning_rate": 0.004} | config
    (folder / "config.yml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items()))
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = (1.6 + 3.9 * math.exp(-step / 40)) * (1 + excess)
        measured = {"loss": loss + noise.gauss(0, 0.05), "grad_norm": 1.0, "learning_rate": 0.001}
        lines.append({"step": step, **measured, "step_time_s": time, "tokens_per_s": 2048 / time})
        if step % 100 == 0:
            lines.append({"step": step, "held_out_loss": loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "steps": steps, "quantization": quantization, "backend": "native" if quantization else "",
        "held_out_loss": lines[-1].get("held_out_loss"), "step_time_s": time, "tokens_per_s": 2048 / time,
        "parameter_bytes": 1_700_000, "quant_state_bytes": 86_016 if quantization == "fp8" else 0,
        "saved_activation_bytes": 9_500_000 if quantization else 31_000_000,
        "versions": {"jax": "0.10.2"}, "devices": "1 x cpu", "data": "stdlib: 1,000 files",
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


NAMES = ("float", "int8", "fp8")


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "float", "")
    write_run(tmp_path / "int8", "int8", excess=0.004, time=0.2)
    write_run(tmp_path / "fp8", "fp8", excess=-0.007, time=0.3)
    return tmp_path


def load(folder, *names):
    return report.load_runs([folder / name for name in names or NAMES])


def test_gap_and_ratio_are_taken_from_the_unquantized_run_at_the_same_step(runs):
    rows = report.comparison_rows(load(runs))
    assert [row["gap"] for row in rows] == ["–", "+0.40%", "-0.70%"]
    assert [row["ratio"] for row in rows] == ["1.00×", "0.80×", "1.20×"]
    assert [row["backend"] for row in rows] == ["–", "native", "native"]
    float_run, short = report.load_runs([runs / "float", write_run(runs / "b", "int8", excess=0.01, steps=200)])
    assert short.gap(float_run) == pytest.approx(1)
    assert report.Run("c", {}, {1: 2.0}, {250: 1.5}, None, {}).gap(float_run) is None
    smooth = report.Run("a", {}, {1: 4.0, 2: 2.0, 3: float("nan")}, {}, None, {}).smoothed()  # without start bias
    assert smooth == pytest.approx({1: 4.0, 2: (0.9 * 4.0 + 2.0) / 1.9})


def test_what_is_a_baseline(runs):
    with pytest.raises(ValueError, match="runs a and float are both unquantized; pass only one, as the baseline"):
        report.find_baseline(report.load_runs([write_run(runs / "a", ""), runs / "float"]))
    found = report.load_runs([write_run(runs / "rules", "", rules=[{"path": ".*", "recipe": "int8"}])])
    assert report.find_baseline(found) is None
    assert report.comparison_rows(found)[0]["quantization"] == "by rules"


def test_the_table_and_the_page_are_written(runs, capsys):
    out = runs / "out/report.html"
    assert main(["compare", *(str(runs / name) for name in NAMES), "--out", str(out)]) == 0
    printed, page = capsys.readouterr().out, out.read_text()
    assert all(cell in printed for cell in ("held-out loss", "+0.40%", "0.80×", str(out)))
    assert "Held-out loss" in page
    # The page loads no other files.
    own = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.S)
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*>", own)
    assert "src=" not in "".join(re.findall(r"<script[^>]*>", page))
    assert page.count("Plotly.newPlot") >= 7
    write_run(runs / "other", "int8", learning_rate=0.1)
    main(["compare", str(runs / "other"), str(runs / "fp8"), "--out", str(out)])
    printed = capsys.readouterr().out
    assert "There is no unquantized run, so there are no gaps and ratios." in printed
    assert "The runs differ in more than quantization: learning_rate." in printed
    assert not any(about.startswith("Gap") for about in report.charts(load(runs, "int8", "fp8")))


def test_charts_hold_every_run(runs):
    found = {about.partition(":")[0]: figure for about, figure in report.charts(load(runs)).items()}
    titles = [about.partition(":")[0] for about in report.BYTES.values()]
    assert list(found) == ["Training loss", "Held-out loss", "Gap to the unquantized run", "Step time", *titles]
    assert [*found["Step time"].data[0].y] == ["float", "int8", "fp8"]
    last = [trace.y[-1] for trace in found["Gap to the unquantized run"].data if trace.mode == "lines+markers"]
    assert last == pytest.approx([0.4, -0.7])
    assert [*found[titles[-1]].data[0].x] == pytest.approx([31e6, 9.5e6, 9.5e6])


def test_health_is_drawn_where_it_was_measured(runs):
    (runs / "fp8/health.jsonl").write_text("".join(json.dumps(health(step)) + "\n" for step in range(20, 101, 20)))
    fp8, none = load(runs, "fp8", "int8")
    assert report.health_maps(none) == {}
    found = {about.partition(",")[0]: figure for about, figure in report.health_maps(fp8).items()}
    assert [*found] == [title.partition(",")[0] for name, (title, *_) in report.HEALTH.items() if name != "nonfinite"]
    for figure in found.values():
        assert [[*heat.x] for heat in figure.data] == [["20", "40", "60", "80", "100"]] * 3
        assert [*figure.data[0].y][:2] == ["layers/self_attention/query, layer 0", "layers/self_attention/out, layer 0"]
    assert [*found["SQNR"].data[0].z[-1]] == [29, 28, 27, 26, 25]
    assert [*found["Saturated"].data[2].text[-1]] == [0.02, 0.04, 0.06, 0.08, 0.1]


def test_runs_are_named_as_they_are(runs):
    page = report.render(report.load_runs([write_run(runs / "<b><!--X--></script>", "int8")]))
    assert "<b>" not in page[page.index("<body>") :]
    (write_run(runs / "cut", "int8", steps=120) / "summary.json").unlink()
    row = report.comparison_rows(load(runs, "float", "cut"))[1]
    assert (row["steps"], row["step time"]) == ("120 (unfinished)", "250 ms")
    found = report.load_runs([write_run(runs / "a/run", ""), write_run(runs / "b/run", "int8")])
    assert [run.name for run in found] == [str(runs / "a/run"), str(runs / "b/run")]


LINES = '{"step": 1, "loss": 2.0}\n{"step": 2, "lo'
DAMAGE = [
    ("metrics.jsonl", None, "has no metrics.jsonl; pass a folder that `jaxquant train` w"),
    ("metrics.jsonl", "", "has no training step; let the run finish at least one"),
    ("metrics.jsonl", LINES, 'line 2 is not a metrics line: \'{"step": 2, "lo\'; resume the run, or delete that line'),
    ("config.yml", None, "has no config.yml"),
    ("health.jsonl", '{"step": 5}\n', "health.jsonl, line 1 is not a health line"),
    ("summary.json", "{", "summary.json is damaged"),
]


def test_a_damaged_missing_or_repeated_run_is_an_error_that_names_it(runs, capsys):
    out = runs / "report.html"

    def told(*names: str) -> str:
        assert main(["compare", *(str(runs / name) for name in names), "--out", str(out)]) == 2
        return capsys.readouterr().err

    for number, (name, text, message) in enumerate(DAMAGE):
        file = write_run(runs / str(number), "int8") / name
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        assert message in told("float", str(number))
    assert f"error: run folder {runs / 'nowhere'} does not exist" in told("nowhere")
    assert "have a folder twice" in told("int8", "int8")
    assert not out.exists()
