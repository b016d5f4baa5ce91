"""``python -m jaxquant``: each command says what it should, refuses in a sentence, and its status tells which."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxquant.__main__ import main

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
        (["explain", "nvfp4"], "quantization 'nvfp4' is a block-scaled recipe, which is not implemented yet"),
        (["explain", "fp8", "margin=1"], "QuantConfig has no field 'margin'"),
        (["explain", "fp8", "margin"], "'margin' is not of the form key=value"),
        (["coverage", "absent.yml"], "absent.yml"),
        (["coverage", str(CI), "quantization=fp9"], "quantization 'fp9' is not a known recipe"),
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


def test_it_answers_to_its_name():
    done = subprocess.run(
        [sys.executable, "-m", "jaxquant", "--help"], capture_output=True, text=True, cwd=CI.parents[2]
    )
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("strings", "explain", "coverage", "audit"))


def test_audit_is_handed_over(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", "--help"])
    assert stopped.value.code == 0
    assert "python -m jaxquant.audit" in capsys.readouterr().out
