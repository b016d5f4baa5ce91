"""Contractions under ``jax.shard_map`` and explicit sharding: eight devices compute the same as one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.sharding_cases import SENT, cases

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZED = False


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the errors of each case, from a process that simulates eight devices."""
    path = tmp_path_factory.mktemp("sharding") / "cases.json"
    words = [sys.executable, "-m", "tests.ops.sharding_cases", str(path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*cases(), *SENT])
def test_a_mesh_computes_what_one_device_does_and_sends_8_bits(found: dict[str, str], name: str):
    assert not found[name], found[name]
