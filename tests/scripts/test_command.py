"""``python -m jaxquant``: each command says what it should, refuses in a sentence, and its status tells which.

Every command of the repository has a page of help, and its tables fit an output that knows ASCII alone.
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

from jaxquant import RECIPES, terminal
from jaxquant.__main__ import main
from jaxquant.aot.command import print_and_write
from jaxquant.training.__main__ import COMMANDS
from jaxquant.training.__main__ import main as train

ROOT = Path(__file__).parents[2]
CI = ROOT / "configs/models/ci.yml"


def test_strings_and_explain_print_what_the_table_says(capsys):
    assert main(["strings"]) == 0
    assert "fp8, fp8_gpu, te_fp8_delayedscaling" in capsys.readouterr().out
    assert main(["explain", "fp8", "amax_margin=1"]) == 0
    assert "the largest amax of the last 1024 steps, times 2^1;" in capsys.readouterr().out


REFUSED = [
    (["explain", "fp9"], "quantization 'fp9' is not a known recipe; did you mean 'fp8'"),
    (["explain", "fp8", "margin=1"], "QuantConfig has no field 'margin'"),
    (["explain", "fp8", "margin"], "'margin' is not of the form key=value"),
    (["coverage", "absent.yml"], "absent.yml"),
    (["coverage", str(CI), "--program", "jaxquant.training.absent:step"], "No module named 'jaxquant.training.absent'"),
    (["coverage", str(CI), "--program", "jaxquant.training.audit:absent"], ".audit has no function 'absent'"),
]


def test_what_cannot_be_is_a_sentence(capsys):
    for words, message in REFUSED:
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert (out, err.startswith("error: "), message in err, err.count("\n")) == ("", True, True, 1)


INTERRUPTED = {
    "jaxquant.training.conversion.convert_run": ["convert", "a", "--out", "b"],
    "jaxquant.training.cli.open_served": ["serve", "a", "--prompt", "b"],
    "jaxquant.training.serving.contenders": ["evaluate", "a"],
    "jaxquant.training.__main__.read_config": ["a.yml"],
}


@pytest.mark.parametrize("place", INTERRUPTED)
def test_neither_ctrl_c_nor_a_closed_output_is_a_traceback(place, monkeypatch, capsys):
    def ended_by(error):
        monkeypatch.setattr(place, lambda *_, **__: (_ for _ in ()).throw(error))
        return train(INTERRUPTED[place])

    assert ended_by(KeyboardInterrupt) == terminal.INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # no file that could be closed for the tests after this
    assert ended_by(BrokenPipeError) == 1


def program(path, words, devices):
    """A step that trains in float, whatever its configuration says."""
    w = jax.ShapeDtypeStruct((8, 8), "float32")
    loss = lambda p, x: jnp.tanh(x @ p["first"]["w"] @ p["last"]["w"]).sum()  # noqa: E731
    return jax.jit(jax.grad(loss)), ({"first": {"w": w}, "last": {"w": w}}, w)


def test_coverage_that_is_not_as_asked_is_status_1(capsys):
    words = ["coverage", str(CI), "quantization=fp8", "--program", "tests.scripts.test_command:program"]
    assert main(words) == 0
    assert main([*words, "--check"]) == 1
    assert "error: strict: first fwd: float8_e4m3fn" in capsys.readouterr().err


SCRIPTS = sorted(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py"))
MODULES = ("train", "jaxquant.training", "jaxquant.bench", "jaxquant")


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
    asked = [[command, "--help"] for command in [*SCRIPTS, *MODULES]] + [["train", name, "--help"] for name in COMMANDS]
    refused = {"grain": ["jaxquant.bench", "steps"], "filelock": ["train", str(CI)]}
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRAS, json.dumps([*asked, *refused.values()])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    fix = "is not installed; run pip install -e '.[train]' in the checkout of jaxquant\n"
    expected = [[words[0], 0, ""] for words in asked]
    expected += [[words[0], 2, f"error: {library} {fix}"] for library, words in refused.items()]
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
