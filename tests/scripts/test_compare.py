"""The comparison of runs: its numbers, its page and its refusals."""

import re

import pytest

from tests.scripts.synthetic import write_run
from train.__main__ import main
from train.report import (
    BYTES,
    HEALTH,
    Run,
    charts,
    comparison_rows,
    find_baseline,
    health_maps,
    load_runs,
    render,
)


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "float", "")
    write_run(tmp_path / "int8", "int8", excess=0.004, time=0.2)
    write_run(tmp_path / "fp8", "fp8", excess=-0.007, time=0.3)
    return tmp_path


def load(folder):
    return load_runs([folder / name for name in ("float", "int8", "fp8")])


def test_gap_and_ratio_are_taken_from_the_unquantized_run(runs):
    rows = comparison_rows(load(runs))
    assert [row["gap"] for row in rows] == ["–", "+0.40%", "-0.70%"]
    assert [row["ratio"] for row in rows] == ["1.00×", "0.80×", "1.20×"]
    assert [row["step time"] for row in rows] == ["250 ms", "200 ms", "300 ms"]
    assert [row["backend"] for row in rows] == ["–", "native", "native"]


def test_gap_is_taken_at_the_same_step(tmp_path):
    float_run, short = load_runs(
        [write_run(tmp_path / "a", ""), write_run(tmp_path / "b", "int8", excess=0.01, steps=200)]
    )
    assert short.gap(float_run) == pytest.approx(1)
    assert Run("c", {}, {1: 2.0}, {250: 1.5}, None, {}).gap(float_run) is None


def test_smoothing_is_an_exponential_mean_without_start_up_bias():
    smooth = Run("a", {}, {1: 4.0, 2: 2.0, 3: float("nan")}, {}, None, {}).smoothed()
    assert smooth == pytest.approx({1: 4.0, 2: (0.9 * 4.0 + 2.0) / 1.9})


def test_two_unquantized_runs_are_refused(tmp_path):
    found = load_runs([write_run(tmp_path / "a", ""), write_run(tmp_path / "b", "")])
    with pytest.raises(ValueError, match="runs a and b are both unquantized; give one to measure gaps from"):
        find_baseline(found)


def test_a_run_quantized_by_rules_alone_is_no_baseline(tmp_path):
    found = load_runs([write_run(tmp_path / "a", "", rules=[{"path": ".*", "recipe": "int8"}])])
    assert find_baseline(found) is None
    assert comparison_rows(found)[0]["quantization"] == "by rules"


def test_without_an_unquantized_run_the_gap_is_left_out_and_said(runs, tmp_path, capsys):
    assert main(["compare", str(runs / "int8"), str(runs / "fp8"), "--out", str(tmp_path / "out/report.html")]) == 0
    assert "No unquantized run was given, so there is no gap and no ratio." in capsys.readouterr().out
    assert not any(about.startswith("Gap") for about in charts(load_runs([runs / "int8", runs / "fp8"])))


def test_the_table_and_the_page_are_written(runs, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main(["compare", *(str(runs / name) for name in ("float", "int8", "fp8")), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for cell in ("held-out loss", "+0.40%", "0.80×", str(out)):
        assert cell in printed
    page = out.read_text()
    for word in ("Held-out loss", "1 x cpu"):
        assert word in page


def test_the_page_needs_nothing_else(runs):
    page = render(load(runs))
    own = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.S)
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*>", own)
    assert "src=" not in "".join(re.findall(r"<script[^>]*>", page))
    assert page.count("Plotly.newPlot") >= 7
    assert len(page) > 1_000_000


def test_charts_hold_every_run(runs):
    found = {about.partition(":")[0]: figure for about, figure in charts(load(runs)).items()}
    titles = [about.partition(":")[0] for about in BYTES.values()]
    assert list(found)[:4] == ["Training loss", "Held-out loss", "Gap to the unquantized run", "Step time"]
    assert list(found)[4:] == titles
    assert [*found["Step time"].data[0].y] == ["float", "int8", "fp8"]
    last = [trace.y[-1] for trace in found["Gap to the unquantized run"].data if trace.mode == "lines+markers"]
    assert last == pytest.approx([0.4, -0.7])
    assert [*found[titles[-1]].data[0].x] == pytest.approx([31e6, 9.5e6, 9.5e6])


def test_health_is_drawn_where_it_was_measured(tmp_path):
    folders = [write_run(tmp_path / name, name.strip("0"), steps=100, health_every=20) for name in ("0", "fp8")]
    plain, fp8, none = load_runs([*folders, write_run(tmp_path / "int8", "int8", steps=100)])
    assert health_maps(none) == {}
    assert [about.partition(",")[0] for about in health_maps(plain)] == ["Amax"]
    found = {about.partition(",")[0]: figure for about, figure in health_maps(fp8).items()}
    assert [*found] == [title.partition(",")[0] for name, (title, *_) in HEALTH.items() if name != "nonfinite"]
    for figure in found.values():
        assert len(figure.data) == 3
        for heat in figure.data:
            assert [*heat.x] == ["20", "40", "60", "80", "100"]
            assert [*heat.y][:2] == ["layers/self_attention/query, layer 0", "layers/self_attention/out, layer 0"]
    assert [*found["SQNR"].data[0].z[-1]] == [29, 28, 27, 26, 25]
    assert [*found["Saturated"].data[2].text[-1]] == [0.02, 0.04, 0.06, 0.08, 0.1]
    assert "of 2 sequences a batch" in render([plain, fp8])


def test_names_are_escaped(tmp_path):
    page = render(load_runs([write_run(tmp_path / "<b><!--X--></script>", "int8")]))
    body = page[page.index("<body>") :]
    assert "<b>" not in body


def test_runs_of_other_settings_are_named(runs, tmp_path, capsys):
    write_run(tmp_path / "other", "int8", learning_rate=0.1)
    main(["compare", str(runs / "float"), str(tmp_path / "other"), "--out", str(tmp_path / "r.html")])
    assert "The runs differ in more than quantization: learning_rate." in capsys.readouterr().out


def test_an_unfinished_run_is_shown_as_such(runs, tmp_path):
    write_run(tmp_path / "cut", "int8", steps=120, finished=False)
    rows = comparison_rows(load_runs([runs / "float", tmp_path / "cut"]))
    assert rows[1]["steps"] == "120 (unfinished)"
    assert rows[1]["step time"] == "250 ms"
    assert "bytes are known at the end of a run" in render(load_runs([tmp_path / "cut"]))


def test_equal_folder_names_are_told_apart_by_path(tmp_path):
    found = load_runs([write_run(tmp_path / "a/run", ""), write_run(tmp_path / "b/run", "int8")])
    assert [run.name for run in found] == [str(tmp_path / "a/run"), str(tmp_path / "b/run")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "has no metrics.jsonl; give a folder that `python -m train` w"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "has no training step; let the run make at least one"),
        (
            lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo'),
            'metrics.jsonl, line 2 is not a metrics line: \'{"step": 2, "lo\'; resume the run, or delete that line',
        ),
        (lambda run: (run / "config.yml").unlink(), "has no config.yml"),
        (lambda run: (run / "health.jsonl").write_text('{"step": 5}\n'), "health.jsonl, line 1 is not a health line"),
        (lambda run: (run / "summary.json").write_text("{"), "summary.json is not what was written"),
    ],
)
def test_a_damaged_run_is_an_error_that_names_the_file(runs, tmp_path, capsys, change, message):
    change(runs / "int8")
    out = tmp_path / "report.html"
    assert main(["compare", str(runs / "float"), str(runs / "int8"), "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_missing_or_repeated_folder_is_an_error(runs, capsys):
    assert main(["compare", str(runs / "nowhere")]) == 2
    assert f"error: run folder {runs / 'nowhere'} does not exist" in capsys.readouterr().err
    assert main(["compare", str(runs / "int8"), str(runs / "int8")]) == 2
    assert "name one folder twice" in capsys.readouterr().err
