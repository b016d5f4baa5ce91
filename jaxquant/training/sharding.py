"""Which axis of which parameter lies on which mesh axis: one table for parameters, optimizer and quant state alike."""

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
"""Sequences of a batch are spread over all devices but those of one tensor group, which share them."""

PARAMETER_AXES: dict[tuple[str, str], dict[str, int]] = {
    ("query", "kernel"): {"fsdp": -3, "tensor": -2},
    ("key", "kernel"): {"fsdp": -3, "tensor": -2},
    ("value", "kernel"): {"fsdp": -3, "tensor": -2},
    ("out", "kernel"): {"fsdp": -1, "tensor": -3},
    ("wi_0", "kernel"): {"fsdp": -2, "tensor": -1},
    ("wi_1", "kernel"): {"fsdp": -2, "tensor": -1},
    ("wo", "kernel"): {"fsdp": -1, "tensor": -2},
    ("mlp", "wi_0"): {"fsdp": -2, "tensor": -1},  # of experts
    ("mlp", "wi_1"): {"fsdp": -2, "tensor": -1},
    ("mlp", "wo"): {"fsdp": -1, "tensor": -2},
    ("wq_a", "kernel"): {"fsdp": -2},
    ("wq_b", "kernel"): {"tensor": -2},
    ("wkv_a", "kernel"): {"fsdp": -2},
    ("wkv_b", "kernel"): {"tensor": -2},
    ("token_embedder", "embedding"): {"fsdp": -1},
    ("logits_dense", "kernel"): {"fsdp": -2},
}
"""(module, parameter) -> which of its axes each mesh axis cuts: ``fsdp`` the one of size ``emb_dim``, ``tensor`` the
heads or ``mlp_dim``.

Counted from the end because a scan over layers puts an axis in front. What is not listed (norms, scales and amax
histories, routers) is replicated. A sparsity mask lies as its kernel does.
"""


def make_mesh(config: TrainConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay devices out as (data, fsdp, tensor).

    Args:
      config: sizes of the mesh, and what they have to divide.
      devices: None takes all that are present, those of other processes included; others may be of an absent chip.

    Raises:
      ValueError: the sizes do not make up the number of devices, or do not divide what they cut.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(config, f"mesh_{axis}") for axis in AXES}
    asked = " x ".join(f"mesh_{axis} {size}" for axis, size in sizes.items())
    rest = [axis for axis, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"{asked}: only one of them may be -1, the rest of the devices")
    if rest:
        sizes[rest[0]] = len(devices) // max(math.prod(size for size in sizes.values() if size != -1), 1)
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != len(devices):
        raise ValueError(f"{asked} does not make up the {len(devices)} devices present")
    sequences, shares = config.batch_size // config.gradient_accumulation_steps, sizes["data"] * sizes["fsdp"]
    if sequences % shares:
        raise ValueError(
            f"batch_size / gradient_accumulation_steps is {sequences}, which {shares} devices (mesh_data x mesh_fsdp) "
            "do not divide"
        )
    for axis, names in {"fsdp": ("emb_dim",), "tensor": ("num_query_heads", "num_kv_heads", "mlp_dim")}.items():
        for name in names:
            if getattr(config, name) % sizes[axis]:
                raise ValueError(f"{name} {getattr(config, name)} is not a multiple of mesh_{axis} {sizes[axis]}")
    return Mesh(np.array(devices).reshape(*sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parameter_spec(module: str, parameter: str, ndim: int) -> PartitionSpec:
    """Return the partition spec of a parameter by its module's name and its own."""
    spec: list[str | None] = [None] * ndim
    for mesh_axis, axis in PARAMETER_AXES.get((module, parameter), {}).items():
        spec[axis] = mesh_axis
    return PartitionSpec(*spec)


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Return the sharding of every leaf of a training state.

    A leaf is looked up by the last two names of its path, so that Adam's moments, whose paths end in the parameter's
    path, lie where the parameter lies.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        if is_tables(leaf):
            return Tables(tuple(map(place_table, leaf.tables)))
        names = ["", "", *(str(getattr(key, "key", key)) for key in path)]
        return fitted(parameter_spec(names[-2], names[-1], len(leaf.shape)), leaf)

    def place_table(table: Table) -> Table:
        # Amaxes and scales are on every device, a mask lies as its kernel does: LAYER/OP/sparsity.
        *_, module, _, _ = ("", "", *table.rows[0].split("/"))
        spec = parameter_spec(module, "kernel", table.fields[MASK].ndim - 1) if MASK in table.fields else ()
        fields = {name: fitted((None, *spec) if name == MASK else (), x) for name, x in table.fields.items()}
        return dataclasses.replace(table, fields=fields)

    def fitted(spec: Any, leaf: Any) -> NamedSharding:
        # What is kept of a group of moments is held whole where there are fewer groups than devices.
        each = zip(spec, leaf.shape, strict=False)
        fits = (axis if axis and n % mesh.shape[axis] == 0 else None for axis, n in each)
        return NamedSharding(mesh, PartitionSpec(*fits))

    return jax.tree_util.tree_map_with_path(place, state, is_leaf=is_tables)
