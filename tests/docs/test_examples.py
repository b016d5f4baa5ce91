"""Every example runs, with few steps and small shapes, is short, and ends with a finite loss."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
OPTIMIZED = False

TINY: dict[str, dict[str, Any]] = {
    "linen_loop": {"steps": 2, "width": 16},
    "nnx_loop": {"steps": 2, "width": 16},
    "pure_jax": {"steps": 2, "width": 16},
    "maxtext_handle": {"steps": 2},
    "lora_on_quantized": {"steps": 2, "width": 16},
    "convert_and_serve": {"steps": 3, "width": 16},
    "audit": {"targets": (), "width": 128},
    "fsdp": {"steps": 2, "width": 16},
}


def load(name: str) -> Any:
    spec = util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_here_and_short():
    files = sorted(FOLDER.glob("*.py"))
    assert [file.stem for file in files] == sorted(TINY)
    assert [file.name for file in files if len(file.read_text().splitlines()) >= 80] == []


SAID = {
    "maxtext_handle": "served as trained, bit for bit: True",
    "convert_and_serve": "as trained, bit for bit: True",
    "lora_on_quantized": "the base is as it was: True",
    "linen_loop": "layers_1/wo",
    "pure_jax": "layers/down",
    "audit": "layers_2",
}


@pytest.mark.parametrize("name", [name for name in TINY if name != "fsdp"])
def test_it_runs(name: str, capsys: pytest.CaptureFixture[str]):
    found = load(name).main(**TINY[name])
    assert found.startswith("5 of 5 matmuls") if name == "audit" else math.isfinite(found)
    assert SAID.get(name, "") in capsys.readouterr().out


def test_fsdp_over_eight_devices_is_as_over_one():
    """In a process of its own: the number of devices is chosen before JAX starts."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['main'](steps=2, width=16)"
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    words = [sys.executable, "-c", code, str(FOLDER / "fsdp.py")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    difference = float(done.stdout.split("largest difference of a loss: ")[1])
    assert difference < 1e-3
