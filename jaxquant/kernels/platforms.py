"""Where kernels run: TPUs, Hopper and other GPUs, interpreted on CPUs, but never on operands that XLA may shard."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from jaxquant.core.scales import compile_impl
from jaxquant.core.sharding import device_kind_of, explicit_sharding, is_whole, may_shard, platform_of, varying_axes

Array = jax.Array
_KINDS = {r"\bG?H(20|100|200|800)\b": (9, 0), r"\bG?B[123]00\b": (10, 0)}
"""CUDA compute capability by device kind, for programs that are compiled for an absent device."""

MOST_BLOCKS = 65535
"""Limit of CUDA along each grid axis except its first axis, which is the last axis of a Pallas grid."""


def sharding_refusal(*operands: Array, waits: bool = False) -> str | None:
    """Return the reason why a kernel cannot run because a compiler may shard its operands, or None if it will not.

    The types decide while tracing: operands without a mesh are safe if there is one device, operands inside
    ``jax.shard_map`` if it maps all axes of the mesh.

    Args:
      operands: operands of a kernel.
      waits: whether the caller passes operands without a mesh, with several devices, to ``unless_sharded``.
    """
    if any(explicit_sharding(x) is not None for x in operands):
        return "an operand has a mesh with explicit axes, outside of jax.shard_map"
    if all(is_whole(x) or (waits and may_shard(x)) for x in operands):
        return None
    return "an operand may be sharded automatically: there are several devices, and it is not inside jax.shard_map"


def may_be_sharded(context: Any) -> bool:
    """Check whether a compiler may shard this program over devices; unclear cases count as sharded.

    The result types that a kernel declares (cuDNN's attention) have no mesh, and the process that lowers for an absent
    chip has a single device.

    Args:
      context: context of a lowering rule.
    """
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return getattr(axes, "num_devices", None) != 1
    return mesh.size != 1 and set(axes.manual_axes) != set(mesh.axis_names)


def unless_sharded(whole: Callable[..., Array], sharded: Callable[..., Array], *operands: Any) -> Array:
    """Return ``whole(*operands)``, or ``sharded(*operands)`` in a program that a compiler may shard over devices.

    If the types do not decide, both are traced, and the lowering selects one. A program for one device therefore
    computes the same on a host with several devices.

    Args:
      whole: function that uses a kernel which ``sharding_refusal`` allows.
      sharded: function that computes the same with operations that a compiler can shard.
      operands: arrays, in any pytree.
    """
    leaves, tree = jax.tree.flatten(operands)
    if not any(map(may_shard, leaves)):
        return whole(*operands)
    first, second = (
        jax.make_jaxpr(lambda *leaves, run=run: run(*tree.unflatten(leaves)))(*leaves) for run in (whole, sharded)
    )
    return _unless_sharded.bind(*leaves, jaxpr=first, sharded=jaxpr_as_fun(second))


UNLESS_SHARDED = "unless_sharded"
"""Name of the primitive. It stores the whole program like a jit, so that program analyses see one program."""

_unless_sharded = Primitive(UNLESS_SHARDED)
compile_impl(_unless_sharded, "jaxpr", "sharded")
_unless_sharded.def_abstract_eval(lambda *_, jaxpr, sharded: jaxpr.out_avals[0])


def _lower(context: Any, *operands: Any, jaxpr: Any, sharded: Callable[..., Any]) -> Any:
    run = sharded if may_be_sharded(context) else jaxpr_as_fun(jaxpr)
    return mlir.lower_fun(run, multiple_results=True)(context, *operands)


def _batch(operands: Any, axes: Any, *, jaxpr: Any, sharded: Callable[..., Any]) -> tuple[Array, int]:
    first, second = (jax.make_jaxpr(jax.vmap(run, axes))(*operands) for run in (jaxpr_as_fun(jaxpr), sharded))
    return _unless_sharded.bind(*operands, jaxpr=first, sharded=jaxpr_as_fun(second)), 0


mlir.register_lowering(_unless_sharded, _lower)
batching.primitive_batchers[_unless_sharded] = _batch


def capability_of(*arrays: Array) -> tuple[int, int]:
    """Return the CUDA compute capability of the device for arrays, which may be absent, or (0, 0) for other devices.

    Args:
      arrays: arrays whose types may have a device.
    """
    kind, here = device_kind_of(*arrays), jax.devices()[0]
    known = next((number for pattern, number in _KINDS.items() if re.search(pattern, kind)), None)
    own = str(getattr(here, "compute_capability", "")) if here.device_kind == kind else ""
    major, dot, minor = own.partition(".")
    return known or ((int(major), int(minor)) if dot else (0, 0))


def module(op: str, kind: str) -> Any:
    """Import the module of an op's kernel, and with it Pallas.

    Args:
      op: name of the op's folder.
      kind: "tpu" or "gpu".
    """
    return importlib.import_module(f"jaxquant.kernels.{op}.{kind}")


def interpretable(*operands: Array) -> bool:
    """Check whether CPUs can interpret a kernel: only outside of ``jax.shard_map``.

    Pallas's interpreter has no types for values that vary along mesh axes. The reference runs there instead.

    Args:
      operands: operands of the kernel.
    """
    return not any(varying_axes(x) for x in operands)


def platform_refusal(op: str, x: Array) -> str | None:
    """Return the reason why a kernel cannot run on the platform of an operand, or None if the platform has kernels.

    Args:
      op: name of the op's folder.
      x: operand. Its mesh may consist of absent devices (ahead-of-time compilation).
    """
    platform = platform_of(x)
    return None if platform in ("cpu", "tpu", "gpu") else f"{op} has no kernel for platform {platform!r}"
