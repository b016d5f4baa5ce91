"""Conditions for running a kernel: the platform, the GPU, and operands that XLA does not shard."""

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
"""CUDA compute capability by device kind, for ahead-of-time compilation without the device."""
HAS_JAX_0_11 = jax.__version_info__ >= (0, 11)
"""Whether Mosaic GPU has mixed float8 wgmma, transposed reads of swizzled memory and a public interpreter."""
MAX_GRID_BLOCKS = 65535
"""CUDA's limit for each grid axis except the first; CUDA's first axis is the last axis of a Pallas grid."""


def sharding_refusal(*operands: Array, defers: bool = False) -> str | None:
    """Return the reason why a kernel cannot run because a compiler may shard its operands, or None if no compiler will.

    The decision uses the types of the operands. Operands without a mesh are safe if there is one device. Operands
    inside ``jax.shard_map`` are safe if it maps all axes of the mesh.

    Args:
      operands: operands of a kernel.
      defers: whether the caller uses ``unless_sharded``, which decides at lowering about operands without a mesh.
    """
    if any(explicit_sharding(x) is not None for x in operands):
        return "an array is on a mesh with explicit axes, outside of jax.shard_map"
    if all(is_whole(x) or (defers and may_shard(x)) for x in operands):
        return None
    return "XLA may shard the arrays over several devices, because the call is outside of jax.shard_map"


def may_be_sharded(context: Any) -> bool:
    """Check whether a compiler may shard this program over devices; unclear cases count as sharded.

    The types of arrays cannot decide this: a kernel such as cuDNN's attention declares result types without a mesh. The
    device count of the process cannot either: ahead-of-time compilation may run in a process with one device.

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

    If the operand types do not decide, both functions are traced, and the lowering selects one of them. A program for
    one device therefore computes the same result on a host with several devices.

    Args:
      whole: function that uses a kernel; its operands must not be sharded.
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
    """Return the CUDA compute capability of the device for which arrays are compiled, or (0, 0) if it is unknown.

    Args:
      arrays: arrays whose types may name a device, attached or not; otherwise the default device is used.
    """
    kind, here = device_kind_of(*arrays), jax.devices()[0]
    known = next((number for pattern, number in _KINDS.items() if re.search(pattern, kind)), None)
    own = str(getattr(here, "compute_capability", "")) if here.device_kind == kind else ""
    major, dot, minor = own.partition(".")
    return known or ((int(major), int(minor)) if dot else (0, 0))


def load_kernel(op: str, kind: str) -> Any:
    """Import the module of an op's kernel; this also imports Pallas.

    Args:
      op: name of the op's folder.
      kind: "tpu" or "gpu".
    """
    return importlib.import_module(f"jaxquant.kernels.{op}.{kind}")


def is_interpretable(*operands: Array) -> bool:
    """Check whether CPUs can interpret a kernel, which is only possible outside of ``jax.shard_map``.

    Pallas's interpreter has no types for values that vary along mesh axes. Inside ``jax.shard_map``, the reference runs
    instead.

    Args:
      operands: operands of the kernel.
    """
    return not any(varying_axes(x) for x in operands)


def platform_refusal(op: str, x: Array) -> str | None:
    """Return the reason why a kernel cannot run on the platform of an operand, or None if the platform has kernels.

    Args:
      op: name of the op's folder.
      x: operand. Its mesh may consist of devices that are not attached (ahead-of-time compilation).
    """
    platform = platform_of(x)
    return None if platform in ("cpu", "tpu", "gpu") else f"{op} has no kernel for platform {platform!r}"
