"""Training steps on eight simulated devices, for ``test_mesh.py``.

    python -m tests.train.mesh_worker DUMP '{"NAME": {CONFIG}, ...}'

prints {NAME: {rows, differing, gathers, reductions}} as JSON: loss and gradient norm of each step, the leaves of the
state's replicated part that two devices hold differently, and the collectives that the partitioner put in, as (type,
shape) of their results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 50
# The CPU's collectives end a process that waits for another device for 40 s, as on a machine with other work.
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_cpu_collective_timeout_seconds=600"
COLLECTIVE = re.compile(r"= (\w+)\[([\d,]*)\]\S* (all-gather|all-reduce|reduce-scatter|all-to-all)\(")


def collectives(dump: Path) -> dict[str, list[tuple[str, list[int]]]]:
    """Read what the partitioner put in, before the CPU's compiler widens types that it has no arithmetic for."""
    file = max(dump.glob("*jit_step.*after_spmd-partitioning*.txt"))
    found: dict[str, list[tuple[str, list[int]]]] = {"all-gather": [], "other": []}
    for dtype, shape, kind in COLLECTIVE.findall(file.read_text()):
        sizes = [int(size) for size in shape.split(",") if size]
        found[kind if kind in found else "other"].append((dtype, sizes))
    return found


def differing(state: Any) -> list[str]:
    """Name the leaves that do not have one value where two devices hold the same part."""
    import jax

    bad = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        parts: dict[str, np.ndarray] = {}
        for part in leaf.addressable_shards:
            value = np.asarray(part.data)
            if parts.setdefault(str(part.index), value).tobytes() != value.tobytes():
                bad.append(jax.tree_util.keystr(path))
    return bad


def train(config: Any, steps: int = STEPS) -> tuple[list[tuple[float, float]], Any]:
    """Loss and gradient norm of each step, and the last state."""
    from train.data import make_iterators
    from train.step import build

    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)
    state, healthy, rows = program.init(), np.bool_(True), []
    for _ in range(steps):
        state, metrics = program.step(state, next(data.train), healthy)
        healthy = metrics["healthy"]
        rows.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return rows, state


def main(dump: str, configs: str) -> None:
    os.environ["XLA_FLAGS"] = (
        f"{PATIENT} --xla_force_host_platform_device_count=8 --xla_dump_to={dump} --xla_dump_hlo_pass_re=spmd "
        "--xla_dump_hlo_module_re=jit_step"
    )
    import jax

    from jaxquant.config.loader import build
    from train.config import TrainConfig

    assert jax.device_count() == 8
    results = {}
    for name, fields in json.loads(configs).items():
        shutil.rmtree(dump, ignore_errors=True)
        rows, state = train(build(TrainConfig, fields))
        found = collectives(Path(dump))
        results[name] = {
            "rows": rows,
            "differing": differing(state),
            "gathers": found["all-gather"],
            "others": found["other"],
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
