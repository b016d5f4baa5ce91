"""Every example runs as shipped, is short, and learns."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples"

LEARNED = 0.05
"""Upper bound of every example's loss; predicting the mean has a loss between 0.2 and 1.4."""


def load(name: str) -> Any:
    return importlib.import_module(f"examples.{name}")


FILES = sorted(FOLDER.glob("*.py"))


def test_every_example_is_short():
    limits = {"grpo": 140}
    assert [file.name for file in FILES if len(file.read_text().splitlines()) >= limits.get(file.stem, 80)] == []


SAID = {
    "maxtext_handle": "served as trained, bit for bit: True",
    "convert_and_serve": "as trained, bit for bit: True",
    "lora_on_quantized": "the base is unchanged: True",
    "linen_loop": "layers_1/wo",
    "pure_jax": "layers/down",
}


@pytest.mark.parametrize("name", [file.stem for file in FILES if file.stem not in ("audit", "fsdp", "grpo")])
def test_it_runs_as_shipped_and_learns(name: str, capsys: pytest.CaptureFixture[str]):
    assert load(name).main() < LEARNED  # false if the loss is NaN
    assert SAID.get(name, "") in capsys.readouterr().out


@pytest.mark.aot
def test_the_audit_runs_as_shipped(capsys: pytest.CaptureFixture[str]):
    assert load("audit").main().startswith("5 of 5 matmuls")
    out = capsys.readouterr().out
    assert "layers_2" in out
    assert "h200" in out


@pytest.mark.slow
def test_the_sampler_of_grpo_has_the_trainers_log_probabilities(tmp_path: Path):
    grpo, logs = load("grpo"), [tmp_path / "exact.jsonl", tmp_path / "standard.jsonl"]
    for log in logs:
        grpo.main(log, steps=2, numerics=log.stem)
    exact, standard = ([json.loads(line) for line in log.read_text().splitlines()] for log in logs)
    assert [row["tokens_that_differ"] for row in exact] == [0, 0]
    assert all(row["tokens_that_differ"] > 0 for row in standard)
    assert len({row["reward"] for row in exact}) == 2, "the second step has the same texts"
    grpo.plot(logs, tmp_path / "grpo.svg")
    page = (tmp_path / "grpo.svg").read_text("utf-8")
    assert all(f">{log.stem}<" in page for log in logs)


@pytest.mark.slow
def test_fsdp_over_eight_devices_is_as_over_one():
    """Runs in a separate process, because the number of devices is set before JAX starts."""
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run([sys.executable, str(FOLDER / "fsdp.py")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split("largest difference between the losses: ")[1]) < 1e-3
    assert float(re.findall(r"losses .* to (.*);", done.stdout)[-1]) < LEARNED
