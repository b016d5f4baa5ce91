"""Refit on eight simulated devices; exits with status 0 if tensors have the bits of one device, and their shardings."""

from __future__ import annotations

import os
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxquant
from jaxquant import export
from tests.serving.trees import assert_same

MODEL, X = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(128)]), jnp.ones((1, 256))
NAMES: Any = {"layers_*/kernel": "blk.{}.weight", "layers_*/bias": "blk.{}.bias"}


def tensors(variables: Any, format: str = "ct_int8") -> dict[str, Any]:
    """Return the tensors of an engine from the variables of the model."""
    params = jaxquant.convert(MODEL, variables, {"quantization": "int8"}, X)["params"]
    return export.named_tensors(export.named_source(params, NAMES, {}), format, dtype="float32")


def main() -> None:
    devices, variables = np.array(jax.devices()), MODEL.init(jax.random.key(0), X)
    assert len(devices) == 8
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh, engine = Mesh(devices.reshape(4, 2), ("d", "t"), axis_types=(kind, kind)), Mesh(devices[::-1], ("x",))
        place = lambda leaf, mesh=mesh: NamedSharding(mesh, P("d", "t") if leaf.ndim == 2 else P("t"))  # noqa: E731
        given = jax.device_put(variables, jax.tree.map(place, variables))
        for format in ("ct_int8", "fp8_block"):
            refit = jax.jit(tensors, static_argnums=1)
            expected, found = refit(variables, format), refit(given, format)
            assert found["blk.0.weight"].sharding.is_equivalent_to(NamedSharding(mesh, P("t", "d")), 2)
            assert_same(found, expected)
            moved = jax.device_put(found, NamedSharding(engine, P()))
            assert moved["blk.0.weight"].sharding.mesh == engine
            assert_same(moved, expected)


if __name__ == "__main__":
    main()
