"""Two processes of two devices save one quantized checkpoint and load it again, for ``test_checkpoint.py``.

    python -m tests.serving.processes_worker FOLDER PORT PROCESS

exits 0 where both find their parts bit for bit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxquant.core.qtensor import QTensor
from jaxquant.serving.checkpoint import load, save
from tests.serving.trees import quantized, raw_bytes


def spread(array: Any, sharding: Sharding) -> jax.Array:
    """Make an array over all processes of one that each of them has."""
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def main(directory: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    rows, columns, whole = (NamedSharding(mesh, spec) for spec in (P("x"), P(None, "x"), P()))
    made = {
        "rows": (quantized("int4", (8, 6), (1, 6)), rows, whole),
        "columns": (quantized("float8_e4m3fn", (8, 16), (1, 16)), columns, columns),
        "threes": (quantized("int4", (8, 12), (1, 12)), columns, whole),
    }
    params: dict[str, Any] = {
        name: QTensor(spread(tensor.qvalue, lies), spread(tensor.scale, scale))
        for name, (tensor, lies, scale) in made.items()
    }
    params["host"] = np.arange(4, dtype=np.float32)
    save(directory, params, {})

    def place(path: str, shape: tuple[int, ...], dtype: str) -> Sharding:
        return {"rows/qvalue": rows, "columns/qvalue": columns, "columns/scale": columns}.get(path, whole)

    found = load(directory, sharding=place).params
    expected = {name: tensor for name, (tensor, *_) in made.items()} | {"host": params["host"]}
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        for shard in one.addressable_shards:
            assert raw_bytes(shard.data) == raw_bytes(jnp.asarray(np.asarray(other)[shard.index]))
    assert found["rows"].qvalue.sharding == rows
    assert found["columns"].scale.sharding == columns


if __name__ == "__main__":
    jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[3]))
    main(Path(sys.argv[1]))
