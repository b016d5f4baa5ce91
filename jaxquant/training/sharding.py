"""Partition specs of parameters, optimizer state and quant state, from one table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxquant.core.quant_state import MASK
from jaxquant.state.table import Table, Tables, is_tables
from jaxquant.training.config import TrainConfig

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))
"""Partition spec of a batch: sequences are sharded over data and fsdp, and replicated over tensor."""

PARAMETER_AXES: dict[tuple[str, str], dict[str, int]] = {
    ("query", "kernel"): {"fsdp": -3, "tensor": -2},
    ("key", "kernel"): {"fsdp": -3, "tensor": -2},
    ("value", "kernel"): {"fsdp": -3, "tensor": -2},
    ("out", "kernel"): {"fsdp": -1, "tensor": -3},
    ("wi_0", "kernel"): {"fsdp": -2, "tensor": -1},
    ("wi_1", "kernel"): {"fsdp": -2, "tensor": -1},
    ("wo", "kernel"): {"fsdp": -1, "tensor": -2},
    ("mlp", "wi_0"): {"fsdp": -2, "tensor": -1},  # experts
    ("mlp", "wi_1"): {"fsdp": -2, "tensor": -1},
    ("mlp", "wo"): {"fsdp": -1, "tensor": -2},
    ("wq_a", "kernel"): {"fsdp": -2},
    ("wq_b", "kernel"): {"tensor": -2},
    ("wkv_a", "kernel"): {"fsdp": -2},
    ("wkv_b", "kernel"): {"tensor": -2},
    ("token_embedder", "embedding"): {"fsdp": -1},
    ("logits_dense", "kernel"): {"fsdp": -2},
}
"""(module, parameter) -> mesh axis -> sharded axis of the parameter.

``fsdp`` shards the axis of size ``emb_dim``, ``tensor`` the axis of heads or of ``mlp_dim``. Axes are counted from the
end, because a scan over layers adds a leading axis. All other parameters (norms, scales and amax histories, routers)
are replicated. A sparsity mask is sharded like its kernel.
"""


def make_mesh(config: TrainConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange devices as (data, fsdp, tensor).

    Args:
      config: configuration with the sizes of the mesh and of the sharded axes.
      devices: devices of the mesh, possibly abstract devices of another chip; None selects all devices of all
        processes.

    Raises:
      ValueError: the product of the sizes is not the number of devices, or a size does not divide the axis that it
        shards.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(config, f"mesh_{axis}") for axis in AXES}
    mesh_text = " x ".join(f"mesh_{axis} {size}" for axis, size in sizes.items())
    rest = [axis for axis, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"{mesh_text}: only one size may be -1 (all remaining devices)")
    if rest:
        sizes[rest[0]] = len(devices) // max(math.prod(size for size in sizes.values() if size != -1), 1)
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != len(devices):
        raise ValueError(f"{mesh_text} does not match the {len(devices)} devices; change these sizes")
    sequences, shares = config.batch_size // config.gradient_accumulation_steps, sizes["data"] * sizes["fsdp"]
    if sequences % shares:
        raise ValueError(
            f"batch_size / gradient_accumulation_steps is {sequences}, which is not a multiple of the {shares} devices "
            "along mesh_data x mesh_fsdp; change batch_size or the mesh"
        )
    for axis, names in {"fsdp": ("emb_dim",), "tensor": ("num_query_heads", "num_kv_heads", "mlp_dim")}.items():
        for name in names:
            if getattr(config, name) % sizes[axis]:
                raise ValueError(f"{name} {getattr(config, name)} is not a multiple of mesh_{axis} {sizes[axis]}")
    return Mesh(np.array(devices).reshape(*sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parameter_spec(module: str, parameter: str, ndim: int) -> PartitionSpec:
    """Return the partition spec of a parameter, from the names of its module and of the parameter."""
    spec: list[str | None] = [None] * ndim
    for mesh_axis, axis in PARAMETER_AXES.get((module, parameter), {}).items():
        spec[axis] = mesh_axis
    return PartitionSpec(*spec)


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Return the sharding of every leaf of a training state.

    A leaf is looked up by the last two names of its path, so Adam's moments, whose paths end in the parameter's path,
    are sharded like the parameter.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        if is_tables(leaf):
            return Tables(tuple(map(place_table, leaf.tables)))
        names = ["", "", *(str(getattr(key, "key", key)) for key in path)]
        return fitted(parameter_spec(names[-2], names[-1], len(leaf.shape)), leaf)

    def place_table(table: Table) -> Table:
        # Amaxes and scales are replicated; a mask (LAYER/OP/sparsity) is sharded like its kernel.
        *_, module, _, _ = ("", "", *table.rows[0].split("/"))
        spec = parameter_spec(module, "kernel", table.fields[MASK].ndim - 1) if MASK in table.fields else ()
        fields = {name: fitted((None, *spec) if name == MASK else (), x) for name, x in table.fields.items()}
        return dataclasses.replace(table, fields=fields)

    def fitted(spec: Any, leaf: Any) -> NamedSharding:
        # An axis that the devices do not divide is replicated, such as the axis of a few groups of moments.
        each = zip(spec, leaf.shape, strict=False)
        fits = (axis if axis and n % mesh.shape[axis] == 0 else None for axis, n in each)
        return NamedSharding(mesh, PartitionSpec(*fits))

    return jax.tree_util.tree_map_with_path(place, state, is_leaf=is_tables)
