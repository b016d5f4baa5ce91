"""Quantized checkpoints on several simulated devices, in one or two processes, for ``test_checkpoint.py``.

    python -m tests.serving.sharded_worker FOLDER                 eight devices
    python -m tests.serving.sharded_worker FOLDER PORT PROCESS    two devices in each of two processes

exits with status 0 if every device has its part, bit for bit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    devices = 2 if sys.argv[2:] else 8
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxquant.core.qtensor import QTensor
from jaxquant.serving.checkpoint import load, save
from tests import numerics
from tests.serving.trees import assert_same, quantized, raw_bytes

SPECS = {
    "layers/mlp/kernel/qvalue": P(None, None, "x"),
    "layers/mlp/kernel/scale": P(None, None, "x"),
    "fp8/qvalue": P("x"),
    "odd/qvalue": P("x"),
    "threes/qvalue": P(None, "x"),
    "tiles/qvalue": P(None, "x"),
    "tiles/scale": P(None, "x"),
    "embedding": P("x"),
}


def params() -> dict[str, Any]:
    """Return a tree with, among others, parts that begin or end inside a byte of the file."""
    return {
        "layers": {"mlp": {"kernel": quantized("int4", (4, 16, 32), (4, 1, 32))}},
        "fp8": quantized("float8_e4m3fn", (16, 64), (1, 64)),
        "odd": quantized("int4", (8, 7), (1, 7)),
        "threes": quantized("int4", (8, 3 * jax.device_count()), (1, 1)),
        "tiles": quantized("int8", (16, 24), (2, 24)),
        "embedding": jnp.arange(64, dtype=jnp.bfloat16).reshape(16, 4),
    }


def placed(tree: Any, mesh: Mesh, specs: dict[str, P]) -> Any:
    """Place a tree, which every process has, on the devices of all processes."""

    def place(path: Any, array: Any) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        whole, sharding = np.asarray(array), NamedSharding(mesh, specs.get(name, P()))
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree_util.tree_map_with_path(place, tree)


def resident(field: str) -> int:
    """Return bytes of memory: VmRSS is the current value, VmHWM the maximum since it was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def check_memory(folder: Path, mesh: Mesh) -> None:
    """Check that the host holds only a few 8 MiB parts of a 64 MiB array in addition to the devices' copy."""
    size = 64 * 2**20
    big = {"kernel": QTensor(jnp.ones((8, 1024, size // 8192), jnp.int8), jnp.ones((8, 1, 1)))}
    save(folder / "big", big, {})
    del big
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    rows = lambda path, shape, dtype: NamedSharding(mesh, P("x") if shape and shape[0] == 8 else P())  # noqa: E731
    load(folder / "big", sharding=rows, verify=False)
    assert resident("VmHWM") - before < size + numerics.reading_bytes(size // 8, size // 8)


def main(folder: Path) -> None:
    devices, wanted = np.array(jax.devices()), SPECS | {"threes/qvalue": P()}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(devices, ("x",), axis_types=(kind,))
        save(folder / kind.name, placed(params(), mesh, SPECS), {})
        place = lambda path, shape, dtype, mesh=mesh: NamedSharding(mesh, wanted.get(path, P()))  # noqa: E731
        found, expected = load(folder / kind.name, sharding=place).params, placed(params(), mesh, wanted)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert one.sharding == other.sharding
            for shard, part in zip(one.addressable_shards, other.addressable_shards, strict=True):
                assert raw_bytes(shard.data) == raw_bytes(part.data)
    if jax.process_count() > 1:
        return
    assert_same(load(folder / "Explicit").params, params())
    for path, error, message in (
        ("threes/qvalue", ValueError, "threes/qvalue splits axis 1 of size 24 into shards of 3 elements of"),
        ("odd/qvalue", ValueError, r"the sharding of odd/qvalue is not valid for shape \(8, 7\)"),
        ("fp8/qvalue", TypeError, "sharding must return a jax.sharding.Sharding, got str for"),
    ):
        cuts: dict[str, Any] = {path: "x" if error is TypeError else NamedSharding(mesh, P(None, "x"))}
        with pytest.raises(error, match=message):
            load(folder / "Auto", sharding=lambda path, s, d, cuts=cuts: cuts.get(path, NamedSharding(mesh, P())))
    check_memory(folder, mesh)


if __name__ == "__main__":
    if sys.argv[2:]:
        jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[3]))
    main(Path(sys.argv[1]))
