"""XLA for an absent H200, at default flags, gives 8-bit matmuls to cuBLASLt, in the layout that it is fast in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxquant.aot.topology import environment

ROOT = Path(__file__).parents[2]
INT8 = ("int8", "int8_delayed", "int4")
FP8 = ("fp8", "fp8_current", "fp8_full")


def compiled(devices, *strings):
    command = [sys.executable, "-m", "tests.aot.matmul_worker", str(devices), *strings]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.aot
def test_kernels_that_pay_on_an_absent_h200_are_picked_unless_xla_is_asked_for():
    picked = {"int8": {"jaxquant_fp8_einsum": 6}, "mxfp8": {"dot": 6, "jaxquant block_quantize": 6}}
    picked |= {"fp8_block": {"jaxquant_block_matmul": 6, "jaxquant block_quantize": 6}}
    # Input, weights and output gradient lie in memory; the activation in between is cast where it is computed.
    picked |= {"fp8": {"__cublas$lt$matmul$f8": 6, "jaxquant quantize": 4}}
    found = compiled(1, *picked, "int8/xla", "fp8_block/xla")
    assert {string: found[string][2] for string in picked} == picked
    assert found["int8/xla"][2] == found["fp8_block/xla"][2] == {"dot": 6}


@pytest.mark.aot
@pytest.mark.parametrize("devices", [1, 8])
def test_every_matmul_has_its_contraction_last_and_fp8_is_never_tritons(devices):
    xlas = INT8 if devices > 1 else [f"{string}/xla" for string in INT8]  # no kernel is picked where operands are cut
    found = compiled(devices, "bf16", *xlas, *FP8)
    matmuls, plain, _ = found["bf16"]
    assert [(*dtypes, call) for *dtypes, call, _ in matmuls] == [("bf16", "bf16", "dot")] * 6  # Triton's, as by default
    for string in xlas:
        assert [dtypes for *dtypes, _, _ in found[string][0]] == [["s8", "s8"]] * 6, string
    for string in FP8:
        assert [call for *_, call, _ in found[string][0]] == ["__cublas$lt$matmul$f8"] * 6, string
    for string in (*xlas, *FP8):
        matmuls, sent, _ = found[string]
        assert all(is_last for *_, is_last in matmuls), (string, matmuls)
        # int4 is gathered as int8, once for the forward and once for the backward pass: the bytes of bf16.
        assert sent == plain or string.startswith("int4"), (string, sent)
