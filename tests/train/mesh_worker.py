"""Training steps on eight simulated devices, for ``test_mesh.py``.

    python -m tests.train.mesh_worker DUMP '{"NAME": [CONFIG ON THE MESH, CONFIG ON ONE DEVICE], ...}'

prints {NAME: {single, steps, differing, gathers, others}} as JSON. A configuration is trained on one device; the mesh
also computes each step, from the same state.

- single: loss of each step on one device.
- steps: quantity -> difference between the mesh and the one device in each step (``compare``).
- differing: leaves of which two devices hold different values of the same part, after any step.
- gathers, others: collectives that the partitioner inserted, as (type, shape) of their results.
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

STEPS = 12
# CPU collectives end a process that waits for another device for 40 s, which happens on a busy machine.
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_cpu_collective_timeout_seconds=600"
COLLECTIVE = re.compile(r"= (\w+)\[([\d,]*)\]\S* (all-gather|all-reduce|reduce-scatter|all-to-all)\(")


def collectives(dump: Path) -> dict[str, list[tuple[str, list[int]]]]:
    """Return the collectives that the partitioner inserted, before the CPU compiler widens unsupported dtypes."""
    file = max(dump.glob("*jit_step.*after_spmd-partitioning*.txt"))
    found: dict[str, list[tuple[str, list[int]]]] = {"all-gather": [], "other": []}
    for dtype, shape, kind in COLLECTIVE.findall(file.read_text()):
        sizes = [int(size) for size in shape.split(",") if size]
        found[kind if kind in found else "other"].append((dtype, sizes))
    return found


def differing(state: Any) -> list[str]:
    """Return the names of leaves of which two devices hold different values of the same part."""
    import jax

    bad = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        parts: dict[str, np.ndarray] = {}
        for part in leaf.addressable_shards:
            value = np.asarray(part.data)
            if parts.setdefault(str(part.index), value).tobytes() != value.tobytes():
                bad.append(jax.tree_util.keystr(path))
    return bad


def compare(found: Any, metrics: Any, single: Any, single_metrics: Any, before: Any, decay: float) -> dict[str, float]:
    """Return the relative differences between one step's results and the results of one device.

    Quantities: ``loss`` and ``grad_norm`` (signed); ``gradient PATH``, the norm of the difference of a parameter's
    clipped gradient, from Adam's first moment; ``amax PATH``, the same of the newest entries of the amax histories of
    inputs and output gradients; ``rest``, the number of other quant state values that differ in any bit.
    """
    import jax

    from tests.states import nested

    def by_path(state: Any) -> dict[str, np.ndarray]:
        state = state._replace(quant_state=nested(state.quant_state))
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}

    distances = {name: metrics[name] / single_metrics[name] - 1 for name in ("loss", "grad_norm")} | {"rest": 0.0}
    owns, olds = by_path(single), by_path(before)
    for path, new in by_path(found).items():
        own = owns[path]
        if ".mu" in path:
            gradient = own - decay * olds[path]
            distances[f"gradient {path}"] = float(np.linalg.norm(new - own) / np.linalg.norm(gradient))
        elif path.startswith(".quant_state"):
            if path.endswith(("input_amax_history']", "output_grad_amax_history']")):
                distances[f"amax {path}"] = float(np.abs(new[..., 0] / own[..., 0] - 1).max())
                new, own = new[..., 1:], own[..., 1:]
            distances["rest"] += float((new != own).sum())
    return distances


def measure(config: Any, single_config: Any, dump: Path) -> dict[str, Any]:
    """Train on one device, and repeat each step on the mesh."""
    import jax

    from jaxquant.training.data import make_iterators
    from jaxquant.training.step import build

    data = make_iterators(config, config.batch_size)
    mesh = build(config, data.vocab_size)
    one = build(single_config, data.vocab_size, jax.devices()[:1])
    bad: set[str] = set()

    def step(program: Any, state: Any, batch: Any) -> tuple[Any, dict[str, float]]:
        placed = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state))
        after, metrics = program.step(placed, batch, np.bool_(True))
        if program is mesh:
            bad.update(differing(after))
        return jax.tree.map(np.array, after), {name: float(value) for name, value in metrics.items()}

    state = jax.tree.map(np.array, one.init())
    single, steps = [], []
    for _ in range(STEPS):
        batch = next(data.train)
        (after, metrics), found = step(one, state, batch), step(mesh, state, batch)
        steps.append(compare(*found, after, metrics, state, config.adam_b1))
        single.append(metrics["loss"])
        state = after
    found = collectives(dump)
    return {
        "single": single,
        "steps": {name: [each[name] for each in steps] for name in steps[0]},
        "differing": sorted(bad),
        "gathers": found["all-gather"],
        "others": found["other"],
    }


def main(dump: str, configs: str) -> None:
    dumps = f"--xla_dump_to={dump} --xla_dump_hlo_pass_re=spmd --xla_dump_hlo_module_re=jit_step"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} {PATIENT} --xla_force_host_platform_device_count=8 {dumps}"
    )
    import jax

    from jaxquant.core.typed import build
    from jaxquant.training.config import TrainConfig

    assert jax.device_count() == 8
    results = {}
    for name, (fields, single_fields) in json.loads(configs).items():
        shutil.rmtree(dump, ignore_errors=True)
        results[name] = measure(build(TrainConfig, fields), build(TrainConfig, single_fields), Path(dump))
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
