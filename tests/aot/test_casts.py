"""Compilers round what is cast: XLA for GPUs drops a cast to a narrower float that is cast back, unless it is held."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant.aot.topology import environment
from jaxquant.core.rounding import prevent_excess_precision

ROOT = Path(__file__).parents[2]
STRINGS = ("fp8_block", "mxfp4", "fp4", "fp8_e5m2", "nvfp4w")
"""Whose matmuls take values of narrow floats in wider ones, or in another one, all rounded to nearest."""


@pytest.mark.aot
def test_every_cast_of_a_layer_and_of_an_update_is_in_the_program_of_an_absent_h200():
    command = [sys.executable, "-m", "tests.aot.cast_worker", *STRINGS]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again, found = json.loads(done.stdout.splitlines()[-1])
    assert again == 2
    assert list(found) == list(STRINGS)
    for string, (asked, compiled) in found.items():
        if string == "fp4":
            del asked["f8e4m3fn"]  # which holds the numbers of e2m1, and rounds none
        assert asked, string
        assert all(compiled.get(name, 0) >= count for name, count in asked.items()), (string, asked, compiled)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_holding_changes_no_number(name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    codes = np.arange(16 if "4_" in name else 256, dtype=np.uint8).view(dtype)
    held = np.asarray(jax.jit(prevent_excess_precision)(jnp.asarray(codes)))
    assert held.dtype == dtype
    np.testing.assert_array_equal(held.view(np.uint8), codes.view(np.uint8))
