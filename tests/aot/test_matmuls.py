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


@pytest.mark.aot
@pytest.mark.parametrize("devices", [1, 8])
def test_every_matmul_has_its_contraction_last_and_fp8_is_never_tritons(devices):
    command = [sys.executable, "-m", "tests.aot.matmul_worker", str(devices), "bf16", *INT8, *FP8]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    matmuls, plain = found["bf16"]
    assert [(*dtypes, call) for *dtypes, call, _ in matmuls] == [("bf16", "bf16", "dot")] * 6  # Triton's, as by default
    for string in INT8:
        assert [dtypes for *dtypes, _, _ in found[string][0]] == [["s8", "s8"]] * 6, string
    for string in FP8:
        assert [call for *_, call, _ in found[string][0]] == ["__cublas$lt$matmul$f8"] * 6, string
    for string in INT8 + FP8:
        matmuls, sent = found[string]
        assert all(is_last for *_, is_last in matmuls), (string, matmuls)
        # int4 is gathered as int8, once for the forward and once for the backward pass: the bytes of bf16.
        assert sent == plain or string == "int4", (string, sent)
