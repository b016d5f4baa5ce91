"""Which axis of which parameter lies on which mesh axis: one table for parameters and optimizer state alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.config import TrainConfig

BATCH = PartitionSpec(("data", "fsdp"))
"""Sequences of a batch are spread over all devices."""

EMBEDDING_AXIS: dict[tuple[str, str], int] = {
    ("query", "kernel"): -3,
    ("key", "kernel"): -3,
    ("value", "kernel"): -3,
    ("out", "kernel"): -1,
    ("wi_0", "kernel"): -2,
    ("wi_1", "kernel"): -2,
    ("wo", "kernel"): -1,
    ("token_embedder", "embedding"): -1,
    ("logits_dense", "kernel"): -2,
}
"""(module, parameter) -> its axis of size ``emb_dim``, counted from the end; FSDP cuts that one.

Counted from the end because a scan over layers puts an axis in front. What is not listed (norms) is replicated.
"""


def make_mesh(config: TrainConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay devices out as (data, fsdp): those given (of a chip that is not here, for an audit), else those present.

    Raises:
      ValueError: the two sizes do not make up the number of devices, or do not divide the batch or ``emb_dim``.
    """
    devices = jax.devices() if devices is None else list(devices)
    data, fsdp = config.mesh_data, config.mesh_fsdp
    asked = f"mesh_data {data} x mesh_fsdp {fsdp}"
    if data == -1 and fsdp == -1:
        raise ValueError(f"{asked}: only one of them may be -1, the rest of the devices")
    if data == -1:
        data = len(devices) // max(fsdp, 1)
    if fsdp == -1:
        fsdp = len(devices) // max(data, 1)
    if data < 1 or fsdp < 1 or data * fsdp != len(devices):
        raise ValueError(f"{asked} does not make up the {len(devices)} devices present")
    sequences = config.batch_size // config.gradient_accumulation_steps
    if sequences % len(devices):
        raise ValueError(
            f"batch_size / gradient_accumulation_steps is {sequences}, which {len(devices)} devices do not divide"
        )
    if config.emb_dim % fsdp:
        raise ValueError(f"emb_dim {config.emb_dim} is not a multiple of mesh_fsdp {fsdp}")
    return Mesh(np.array(devices).reshape(data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Give every leaf of a training state its sharding.

    A leaf is looked up by the last two names of its path, so that Adam's moments, whose paths end in the parameter's
    path, lie where the parameter lies.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        axis = EMBEDDING_AXIS.get(tuple(str(getattr(key, "key", key)) for key in path[-2:]))  # pyright: ignore
        if axis is None:
            return NamedSharding(mesh, PartitionSpec())
        spec: list[str | None] = [None] * len(leaf.shape)
        spec[axis] = "fsdp"
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(place, state)
