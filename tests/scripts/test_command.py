"""``python -m jaxquant``: each command says what it should, refuses in a sentence, and its status tells which.

Every command of the repository has a page of help, and its tables fit an output that knows ASCII alone.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from jaxquant import RECIPES, terminal
from jaxquant.__main__ import main
from jaxquant.aot.command import print_and_write

ROOT = Path(__file__).parents[2]
CI = Path(__file__).parents[2] / "configs/models/ci.yml"


def test_strings_and_explain_print_what_the_table_says(capsys):
    assert main(["strings"]) == 0
    assert "fp8, fp8_gpu, te_fp8_delayedscaling" in capsys.readouterr().out
    assert main(["explain", "fp8", "amax_margin=1"]) == 0
    assert "the largest amax of the last 1024 steps, times 2^1;" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explain", "fp9"], "quantization 'fp9' is not a known recipe; did you mean 'fp8'"),
        (["explain", "fp8", "margin=1"], "QuantConfig has no field 'margin'"),
        (["explain", "fp8", "margin"], "'margin' is not of the form key=value"),
        (["coverage", "absent.yml"], "absent.yml"),
        (["coverage", str(CI), "--program", "train.absent:step"], "No module named 'train.absent'"),
        (["coverage", str(CI), "--program", "train.audit:absent"], "train.audit has no function 'absent'"),
    ],
)
def test_what_cannot_be_is_a_sentence(words, message, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_coverage_of_a_configuration(capsys):
    assert main(["coverage", str(CI), "--check", "quantization=fp8"]) == 0
    out = capsys.readouterr().out
    assert "layers/mlp/wo" in out
    assert out.splitlines()[-1].startswith("42 of 57 matmuls in at most 8 bits")
    assert main(["coverage", str(CI), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"].startswith("0 of 57 matmuls in at most 8 bits")


def test_coverage_that_is_not_as_asked_is_status_1(capsys, monkeypatch):
    """A program that trains in float though its configuration says fp8."""
    from train import audit

    program = audit.program
    monkeypatch.setattr(audit, "program", lambda path, words, devices: program(path, [], devices))
    assert main(["coverage", str(CI), "quantization=fp8"]) == 0
    assert main(["coverage", str(CI), "quantization=fp8", "--check"]) == 1
    assert "strict: layers/self_attention/query fwd: float8_e4m3fn" in capsys.readouterr().err


SCRIPTS = sorted(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py"))
MODULES = ("train", "benchmarks", "jaxquant")


WITHOUT_EXTRAS = """
import contextlib, io, json, runpy, sys
sys.modules |= dict.fromkeys(["filelock", "gguf", "grain", "plotly", "pyarrow", "tensorboardX", "tokenizers"])
sys.path.insert(0, "scripts")
for name, *words in json.loads(sys.argv[1]):
    sys.argv, error = [name, *words], io.StringIO()
    run, place = (runpy.run_path, name) if "/" in name else (runpy.run_module, name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            run(place, run_name="__main__")
        except SystemExit as stopped:
            print(json.dumps([name, stopped.code, error.getvalue()]), file=sys.__stdout__)
"""


def test_without_the_extras_every_command_has_help_and_names_what_to_install():
    asked = [[command, "--help"] for command in [*SCRIPTS, *MODULES]]
    refused = {"grain": ["benchmarks", "steps"], "filelock": ["train", str(CI)]}
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRAS, json.dumps([*asked, *refused.values()])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    fix = "is not installed; run pip install -e '.[train]' in the checkout of jaxquant\n"
    expected = [[name, 0, ""] for name, _ in asked]
    expected += [[words[0], 2, f"error: {library} {fix}"] for library, words in refused.items()]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected, done.stderr


def test_an_output_of_ascii_alone_takes_every_table(monkeypatch, tmp_path):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["strings"]) == 0
    assert all(main(["explain", string]) == 0 for string in RECIPES)
    assert main(["coverage", str(CI), "quantization=fp8_current"]) == 0
    assert print_and_write("| a × b |\n| --- |\n| ≤ 8 |", "{}", str(tmp_path), "audit") == 0
    assert (tmp_path / "audit.md").read_text(encoding="utf-8").startswith("| a × b |")
    sys.stdout.flush()
    text = raw.getvalue().decode("ascii")
    assert "int8 x int8" in text
    assert "e4m3 x e5m2" in text
    assert r"\u2264 8" in text


@pytest.mark.parametrize("columns", ["", "60", "1000"])
def test_a_table_of_figures_keeps_every_word(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    table = Table()
    cells = {
        "run": "runs/quickstart-int8-aqt-of-a-long-name",
        "backend": "native",
        "bytes": "123,456",
        "note": "as [it] is",
    }
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*cells.values())
    terminal.show(table)
    out = capsys.readouterr().out
    assert all(word in out for cell in cells.values() for word in (*cell.split("/")[-1].split(), *cells))
    assert ("runs/quick" in out) == (columns != "60")
