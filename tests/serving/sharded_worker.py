"""Quantized checkpoints on eight simulated devices, for ``test_checkpoint.py``.

    python -m tests.serving.sharded_worker FOLDER

prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxquant.core.qtensor import QTensor
from jaxquant.serving.checkpoint import load, save
from tests.serving.trees import assert_same, quantized

SPECS = {
    "layers/mlp/kernel/qvalue": P(None, None, "x"),
    "layers/mlp/kernel/scale": P(None, None, "x"),
    "fp8/qvalue": P("x"),
    "odd/qvalue": P("x"),
    "tiles/qvalue": P(None, "x"),
    "tiles/scale": P(None, "x"),
    "embedding": P("x"),
}


def params() -> dict[str, Any]:
    return {
        "layers": {"mlp": {"kernel": quantized("int4", (4, 16, 32), (4, 1, 32))}},
        "fp8": quantized("float8_e4m3fn", (16, 64), (1, 64)),
        "odd": quantized("int4", (8, 7), (1, 7)),
        "tiles": quantized("int8", (16, 24), (2, 24)),
        "embedding": jnp.arange(64, dtype=jnp.bfloat16).reshape(16, 4),
    }


def on_rows(mesh: Mesh) -> Any:
    """Cut the first axis where there is one for each device."""
    return lambda path, shape, dtype: NamedSharding(mesh, P("x") if shape and shape[0] == 8 else P())


def same(found: Any, expected: Any) -> bool:
    assert_same(found, expected)
    return True


def error(call: Any) -> str:
    try:
        call()
    except (ValueError, TypeError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return "none"


def resident(field: str) -> int:
    """Bytes of memory: VmRSS now, VmHWM at most since ``clear_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def clear_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(folder: Path) -> None:
    assert jax.device_count() == 8
    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))
    explicit = Mesh(devices, ("x",), axis_types=(AxisType.Explicit,))
    asked: dict[str, Any] = {}

    def on(mesh: Mesh) -> Any:
        def place(path: str, shape: tuple[int, ...], dtype: str) -> NamedSharding:
            asked[path] = [list(shape), dtype]
            return NamedSharding(mesh, SPECS.get(path, P()))

        return place

    def shardings(tree: dict[str, Any], mesh: Mesh) -> bool:
        kernel = tree["layers"]["mlp"]["kernel"]
        arrays = {"layers/mlp/kernel/qvalue": kernel.qvalue, "layers/mlp/kernel/scale": kernel.scale}
        arrays |= {"fp8/scale": tree["fp8"].scale, "odd/qvalue": tree["odd"].qvalue, "embedding": tree["embedding"]}
        return all(array.sharding == NamedSharding(mesh, SPECS.get(path, P())) for path, array in arrays.items())

    whole = params()
    save(folder / "one", whole, {})
    cut = load(folder / "one", sharding=on(mesh)).params
    laid_out = load(folder / "one", sharding=on(explicit)).params
    save(folder / "eight", cut, {})
    save(folder / "explicit", laid_out, {})
    every = load(folder / "eight", sharding=NamedSharding(mesh, P())).params

    # Parts of three elements lie on the devices; on disk their neighbours share bytes.
    half = {"odd": quantized("int4", (8, 24), (1, 24))}
    threes = NamedSharding(mesh, P(None, "x"))
    placed = QTensor(jax.device_put(half["odd"].qvalue, threes), half["odd"].scale)
    save(folder / "half", {"odd": placed}, {})
    back = load(folder / "half").params

    # Eight devices share the memory of the host: the array itself, in parts, and what reading takes beside it.
    size = 64 * 2**20
    big = {"kernel": QTensor(jnp.ones((8, 1024, size // 8192), jnp.int8), jnp.ones((8, 1, 1)))}
    save(folder / "big", big, {})
    del big
    clear_peak()
    before = resident("VmRSS")
    load(folder / "big", sharding=on_rows(mesh), verify=False)
    grown = resident("VmHWM") - before

    def columns(path: str, shape: tuple[int, ...], dtype: str) -> NamedSharding:
        return NamedSharding(mesh, P(None, "x") if path == "odd/qvalue" else P())

    found = {
        "asked": asked,
        "same": {
            "from one": same(cut, whole),
            "from eight": same(load(folder / "eight").params, whole),
            "explicit": same(load(folder / "explicit").params, whole) and same(laid_out, whole),
            "replicated": same(every, whole),
            "back": same(back, half),
        },
        "kinds": {"from one": shardings(cut, mesh), "explicit": shardings(laid_out, explicit)},
        "shards": {
            "int4": cut["layers"]["mlp"]["kernel"].qvalue.addressable_shards[3].data.shape,
            "float8": cut["fp8"].qvalue.addressable_shards[3].data.shape,
            "odd": cut["odd"].qvalue.addressable_shards[3].data.shape,
            "tiles": cut["tiles"].qvalue.addressable_shards[3].data.shape,
        },
        "errors": {
            "half a byte": error(lambda: load(folder / "half", sharding=columns)),
            "does not divide": error(lambda: load(folder / "one", sharding=columns)),
            "no sharding": error(lambda: load(folder / "one", sharding=lambda p, s, d: "x")),  # pyright: ignore
        },
        "host": {"array": size, "part": size // 8, "chunk": size // 8, "grown": grown},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
