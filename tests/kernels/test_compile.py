"""Every case of the kernels compiles for TPUs that are not attached."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxquant.aot.topology import environment
from jaxquant.kernels.block_quantize import cases as block_cases
from jaxquant.kernels.fp8_einsum import cases as einsum_cases
from jaxquant.kernels.quantize import cases as quantize_cases

ROOT = Path(__file__).parents[2]


@pytest.mark.aot
def test_every_case_compiles_for_every_tpu():
    command = [sys.executable, "-m", "tests.kernels.compile_worker", "v5e", "v6e", "v7x"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * (sum(len(each.CASES) for each in (quantize_cases, block_cases, einsum_cases)) + 2)
    assert [line for line in lines if not line.endswith(" compiled")] == []
