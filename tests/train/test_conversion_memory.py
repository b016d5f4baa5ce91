"""Conversion in less memory than the float parameters take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxquant import serving
from jaxquant.core.paths import tree_bytes
from jaxquant.core.typed import build
from tests.train.conftest import ROOT
from train.checkpoint import Checkpoints, write_config
from train.config import TrainConfig
from train.conversion import open_parameters
from train.step import build as build_program

LIMIT_KIB = 720_000
STACK_KIB = 1024
"""Of a thread. The limit counts what a stack reserves, by default 8 MiB for each of the libraries' forty threads."""
READ_ALL = """
import sys
from train.conversion import open_parameters
stored = open_parameters(sys.argv[1])
kept = {path: stored.read(path) for path in stored.stores}
print(sum(array.nbytes for array in kept.values()))
"""

# 201 million parameters
MODEL = {"emb_dim": 1024, "mlp_dim": 4096, "num_layers": 12, "num_query_heads": 16, "num_kv_heads": 16, "head_dim": 64}


def _write_untrained(run: Path) -> None:
    """Write a run's folder with a checkpoint of its first state, optimizer included."""
    rest = {"sequence_length": 128, "batch_size": 1, "dtype": "bfloat16", "run_dir": str(run)}
    config: TrainConfig = build(TrainConfig, MODEL | rest)
    write_config(run, config)
    with Checkpoints(run, config) as checkpoints:
        checkpoints.save(0, build_program(config, 320).init(), {})
        checkpoints.wait()


def _limited(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with no more than LIMIT_KIB of data: heap, stacks and anonymous mappings, the interpreter's too."""
    command = ["bash", "-c", f'ulimit -s {STACK_KIB} -d {LIMIT_KIB}; exec "$0" "$@"', sys.executable, *words]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_checkpoint_above_the_limit_is_converted_under_it(tmp_path: Path):
    """The limit is below the float parameters, which are a third of what the checkpoint holds."""
    run, out = tmp_path / "run", tmp_path / "out"
    _write_untrained(run)
    floats = tree_bytes(open_parameters(run).shapes)
    assert floats > 1024 * LIMIT_KIB
    assert _limited("-c", READ_ALL, str(run)).returncode != 0, "the limit does not bite"

    done = _limited("-m", "train", "convert", str(run), "--out", str(out), "quantization=int8w")
    assert done.returncode == 0, done.stderr[-2000:]
    leaves = {leaf.path: leaf for leaf in serving.read_manifest(out).leaves}
    assert {leaf.dtype for leaf in leaves.values() if leaf.role == "quantized"} == {"int8"}
    assert sum(leaf.role == "quantized" for leaf in leaves.values()) == 7
