"""The command ``jaxquant``: output, errors and exit codes of its commands.

Every command has a page of help, and its tables can be printed in ASCII.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxquant
from jaxquant import RECIPES, terminal
from jaxquant.aot.command import print_and_write
from jaxquant.cli import main, program

ROOT = Path(__file__).parents[2]
CI = ROOT / "configs/models/ci.yml"


def test_strings_and_explain_print_what_the_table_says(capsys):
    assert main(["strings"]) == 0
    assert "fp8, fp8_gpu, te_fp8_delayedscaling" in capsys.readouterr().out
    assert main(["explain", "fp8", "amax_margin=1"]) == 0
    assert "the largest amax of the last 1024 steps, times 2^1;" in capsys.readouterr().out


REFUSED = [
    (["train", "quickstart", "stepz=3"], "TrainConfig has no field 'stepz'; did you mean 'steps'"),
    (["trian"], "No such command 'trian'"),
    (["audit", "quickstart", "--target", "h300"], "Invalid value for '--target': 'h300' is not one of 'h100', 'h200'"),
    (["serve", "a"], "Pass --prompt or --prompts-file, but not both; see 'jaxquant serve --help'"),
    (["explain", "fp9"], "quantization 'fp9' is not a known recipe; did you mean 'fp8'"),
    (["explain", "fp8", "margin=1"], "QuantConfig has no field 'margin'"),
    (["explain", "fp8", "margin"], "'margin' must have the form key=value, such as steps=20"),
    (["coverage", "absent.yml"], "absent.yml"),
    (["coverage", str(CI), "--program", "jaxquant.training.absent:step"], "No module named 'jaxquant.training.absent'"),
    (["coverage", str(CI), "--program", "jaxquant.training.audit:absent"], "audit' has no function 'absent'; pass"),
]


def test_help_and_version_do_not_import_jax():
    code = (
        "import sys; from jaxquant.cli import main; print(main(['--help']), main(['--version']), 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert {f"jaxquant {jaxquant.__version__}", "0 0 False"} <= {*done.stdout.splitlines()}, done.stderr


def test_every_command_has_a_line_of_help_that_fits_and_its_exit_codes():
    for command in [*program.commands.values(), *BENCH.commands.values()]:
        assert (command is BENCH) or "Exit codes: 0 " in str(command.help), command.name
        assert not command.get_short_help_str(54).endswith("..."), command.name


def test_what_cannot_be_is_a_sentence(capsys):
    for words, message in REFUSED:
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert (out, err.startswith("error: "), message in err, err.count("\n")) == ("", True, True, 1)


INTERRUPTED = {
    "jaxquant.training.conversion.convert_run": ["convert", "a", "--out", "b"],
    "jaxquant.training.commands.open_served": ["serve", "a", "--prompt", "b"],
    "jaxquant.training.serving.open_contenders": ["evaluate", "a"],
    "jaxquant.training.start.read_config": ["train", "a.yml"],
}


@pytest.mark.parametrize("place", INTERRUPTED)
def test_neither_ctrl_c_nor_a_closed_output_is_a_traceback(place, monkeypatch, capsys):
    def ended_by(error):
        monkeypatch.setattr(place, lambda *_, **__: (_ for _ in ()).throw(error))
        return main(INTERRUPTED[place])

    assert ended_by(KeyboardInterrupt) == terminal.INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # not a file, which a command could close for later tests
    assert ended_by(BrokenPipeError) == 1


def float_step(path, words, devices):
    """Build a step that trains in float and ignores the configured quantization."""
    w = jax.ShapeDtypeStruct((8, 8), "float32")
    loss = lambda p, x: jnp.tanh(x @ p["first"]["w"] @ p["last"]["w"]).sum()  # noqa: E731
    return jax.jit(jax.grad(loss)), ({"first": {"w": w}, "last": {"w": w}}, w)


def test_coverage_that_is_not_as_asked_is_status_1(capsys):
    words = ["coverage", str(CI), "quantization=fp8", "--program", "tests.scripts.test_command:float_step"]
    assert main(words) == 0
    assert main([*words, "--check"]) == 1
    assert "error: strict: first fwd: float8_e4m3fn" in capsys.readouterr().err


SCRIPTS = ("scripts/lines.py", "scripts/prose.py")
BENCH = program.commands["bench"]


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
    named = [*([name] for name in program.commands), *(["bench", name] for name in BENCH.commands)]
    asked = [*([name] for name in [*SCRIPTS, "train", "jaxquant"]), *(["jaxquant", *words] for words in named)]
    words = [[*each, "--help"] for each in asked] + [["jaxquant", "train", str(CI)]]
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRAS, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    fix = "is not installed; run pip install -e '.[train]' in a checkout of jaxquant\n"
    expected = [[each[0], 0, ""] for each in asked] + [["jaxquant", 2, f"error: filelock {fix}"]]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected, done.stderr


def test_an_output_of_ascii_alone_takes_every_table(monkeypatch, tmp_path):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["strings"]) == 0
    print("naïve – ✓")
    assert all(main(["explain", string]) == 0 for string in RECIPES)
    assert main(["coverage", str(CI), "--check", "quantization=fp8"]) == 0
    print()
    assert print_and_write("| a × b |\n| --- |\n| ≤ 8 |", "{}", str(tmp_path), "audit") == 0
    assert (tmp_path / "audit.md").read_text(encoding="utf-8").startswith("| a × b |")
    sys.stdout.flush()
    text = raw.getvalue().decode("ascii")
    shown = ("int8 x int8", "layers/mlp/wo", "e4m3 x e5m2", "42 of 57 matmuls in at most 8 bits")
    assert [part for part in (r"na\xefve \u2013 \u2713", *shown, r"\u2264 8") if part not in text] == []
