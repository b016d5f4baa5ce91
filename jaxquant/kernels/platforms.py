"""Where a kernel runs: on TPUs, Hopper and other GPUs, interpreted on CPUs, never where a compiler may cut operands."""

from __future__ import annotations

import importlib
import re
from typing import Any

import jax

from jaxquant.core.sharding import device_kind_of, explicit_sharding, is_whole, platform_of, varying_axes

Array = jax.Array
_KINDS = {r"\bG?H(20|100|200|800)\b": (9, 0), r"\bG?B[123]00\b": (10, 0)}
"""CUDA compute capability of the kinds of devices that programs are compiled for without one."""

MOST_BLOCKS = 65535
"""Of CUDA, along any axis of a grid but its first, which is the last of Pallas's."""


def cut_refusal(*operands: Array) -> str | None:
    """Return why operands may be cut by a compiler, which cannot look into a kernel; None where none can be.

    It is decided while tracing, from the types: of operands without a mesh where there is one device, and of operands
    inside ``jax.shard_map`` along all axes of its mesh.

    Args:
      operands: of a kernel.
    """
    if any(explicit_sharding(x) is not None for x in operands):
        return "an operand lies on a mesh with explicit axes, outside of jax.shard_map"
    if all(is_whole(x) for x in operands):
        return None
    return "an operand may be sharded automatically: there are several devices, and it is not inside jax.shard_map"


def capability_of(*arrays: Array) -> tuple[int, int]:
    """Return the CUDA compute capability of the device that computes arrays, which may be absent; (0, 0) of others.

    Args:
      arrays: whose types may name the device.
    """
    kind, here = device_kind_of(*arrays), jax.devices()[0]
    known = next((number for pattern, number in _KINDS.items() if re.search(pattern, kind)), None)
    own = str(getattr(here, "compute_capability", "")) if here.device_kind == kind else ""
    major, dot, minor = own.partition(".")
    return known or ((int(major), int(minor)) if dot else (0, 0))


def module(op: str, kind: str) -> Any:
    """Import the module with an op's kernel; Pallas is not imported before.

    Args:
      op: name of its folder.
      kind: "tpu" or "gpu".
    """
    return importlib.import_module(f"jaxquant.kernels.{op}.{kind}")


def interpretable(*operands: Array) -> bool:
    """Check whether CPUs can interpret a kernel of operands: not inside ``jax.shard_map``.

    Pallas's interpreter does not type what varies along the axes of a mesh. The reference runs there instead.

    Args:
      operands: of the kernel.
    """
    return not any(varying_axes(x) for x in operands)


def platform_refusal(op: str, x: Array) -> str | None:
    """Return why a kernel does not run on the platform of an operand, None where that depends on no more than it.

    Args:
      op: name of its folder.
      x: operand, whose mesh may be of devices that are not here.
    """
    platform = platform_of(x)
    return None if platform in ("cpu", "tpu", "gpu") else f"{op} has no kernel for platform {platform!r}"
