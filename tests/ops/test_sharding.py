"""Contractions under ``jax.shard_map`` and explicit sharding: what eight devices compute is what one does."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import numerics
from tests.ops.sharding_cases import SENT, cases

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZED = False


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Everything that the cases computed, in a process that simulates eight devices."""
    path = tmp_path_factory.mktemp("sharding") / "cases.npz"
    words = [sys.executable, "-m", "tests.ops.sharding_cases", str(path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return np.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(cases()))
def test_a_mesh_computes_what_one_device_does(found: Any, name: str):
    assert f"{name}|error" not in found, str(found[f"{name}|error"])
    whats = [key.split("|")[1] for key in found if key.startswith(f"{name}|") and key.endswith("|mesh")]
    assert {"out"} < set(whats)
    for what in whats:
        mesh, one = found[f"{name}|{what}|mesh"], found[f"{name}|{what}|one"]
        if what.startswith("state"):
            np.testing.assert_array_equal(mesh, one, err_msg=what)
            assert found[f"{name}|{what}|same"], f"{what} differs between devices"
            continue
        bound = numerics.sharded_contraction_bound(name, what) * np.linalg.norm(one)
        assert np.linalg.norm(mesh - one) <= bound, what


@pytest.mark.slow
@pytest.mark.parametrize("name", SENT)
def test_devices_send_8_bits_or_the_gradients_dtype(found: Any, name: str):
    sent = [each for call in found[f"{name}|sent"] for each in re.findall(r"([a-z]+)(\d+)\w*\[(.*)\]", call)]
    assert sent
    for kind, bits, shape in sent:
        is_small = math.prod(int(n) for n in shape.split(",") if n) <= 8  # digests of random keys
        is_partial = kind == "s" and name.split()[-1] in ("tensor", "both") and shape.endswith("8,128")  # docs: meshes
        assert int(bits) <= (32 if kind == "f" or is_small or is_partial else 8), (kind, bits, shape)
