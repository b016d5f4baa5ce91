"""XLA for an H200 that is not attached, with default flags: selected kernels, layout of 8-bit matmuls, and every cast.

8-bit matmuls use cuBLASLt, in the layout for which it is fast. XLA for GPUs removes a cast to a narrower float if the
value is cast back, unless the op prevents it.
"""

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
PICKED = {
    "int8": {"jaxquant_fp8_einsum": 6},
    "mxfp8": {"dot": 6, "jaxquant block_quantize": 6},
    "fp8_block": {"jaxquant_block_matmul": 6, "jaxquant block_quantize": 6},
    # Input, weights and output gradient are in memory; the activation between the layers is cast in its producer.
    "fp8": {"__cublas$lt$matmul$f8": 6, "jaxquant quantize": 4},
}
INT8 = {1: ("int8/xla", "int4/xla"), 8: ("int8", "int4")}  # no kernel is selected for sharded operands
FP8 = {1: ("fp8", "fp8_full"), 8: ("fp8",)}
STRINGS = {1: ("bf16", *PICKED, "fp8_block/xla", *INT8[1], "fp8_full"), 8: ("bf16", *INT8[8], *FP8[8])}
CASTS = ("fp8_block", "mxfp4", "fp4", "nvfp4w")
"""Strings whose matmuls store values of narrow floats in another dtype, all rounded to nearest."""


@pytest.fixture(scope="module")
def compiled():
    """Compile all steps in one process and return the worker's results."""
    command = [sys.executable, "-m", "tests.aot.h200_worker"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.aot
def test_kernels_that_pay_are_picked_unless_xla_is_asked_for(compiled):
    found = {string: calls for string, (_, _, calls) in compiled[0]["1"].items()}
    assert {string: found[string] for string in PICKED} == PICKED
    assert found["int8/xla"] == found["fp8_block/xla"] == {"dot": 6}


@pytest.mark.aot
@pytest.mark.parametrize("devices", [1, 8])
def test_every_matmul_has_its_contraction_last_and_fp8_is_never_tritons(compiled, devices):
    found = compiled[0][str(devices)]
    matmuls, plain, _ = found["bf16"]
    assert [(*dtypes, call) for *dtypes, call, _ in matmuls] == [("bf16", "bf16", "dot")] * 6  # Triton's default
    for string in INT8[devices]:
        assert [dtypes for *dtypes, _, _ in found[string][0]] == [["s8", "s8"]] * 6, string
    for string in FP8[devices]:
        assert [call for *_, call, _ in found[string][0]] == ["__cublas$lt$matmul$f8"] * 6, string
    for string in (*INT8[devices], *FP8[devices]):
        matmuls, sent, _ = found[string]
        assert all(is_last for *_, is_last in matmuls), (string, matmuls)
        # int4 is gathered as int8, once for the forward and once for the backward pass: the bytes of bf16.
        assert sent == plain or string.startswith("int4"), (string, sent)


@pytest.mark.aot
def test_every_cast_of_a_layer_and_of_an_update_is_in_the_program(compiled):
    _, found, again = compiled
    assert again == 2
    for string, (asked, kept) in found.items():
        if string == "fp4":
            del asked["f8e4m3fn"]  # e4m3 represents all values of e2m1 exactly
        assert asked, string
        assert all(kept.get(name, 0) >= count for name, count in asked.items()), (string, asked, kept)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_holding_changes_no_number(name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    codes = np.arange(16 if "4_" in name else 256, dtype=np.uint8).view(dtype)
    held = np.asarray(jax.jit(prevent_excess_precision)(jnp.asarray(codes)))
    assert held.dtype == dtype
    np.testing.assert_array_equal(held.view(np.uint8), codes.view(np.uint8))
