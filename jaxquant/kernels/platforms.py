"""Where a kernel runs: on TPUs, Hopper and other GPUs, interpreted on CPUs, never where a compiler may cut operands."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from jaxquant.core.scales import compile_impl
from jaxquant.core.sharding import device_kind_of, explicit_sharding, is_untold, is_whole, platform_of, varying_axes

Array = jax.Array
_KINDS = {r"\bG?H(20|100|200|800)\b": (9, 0), r"\bG?B[123]00\b": (10, 0)}
"""CUDA compute capability of the kinds of devices that programs are compiled for without one."""

MOST_BLOCKS = 65535
"""Of CUDA, along any axis of a grid but its first, which is the last of Pallas's."""


def cut_refusal(*operands: Array, waits: bool = False) -> str | None:
    """Return why operands may be cut by a compiler, which cannot look into a kernel; None where none can be.

    It is decided while tracing, from the types: of operands without a mesh where there is one device, and of operands
    inside ``jax.shard_map`` along all axes of its mesh.

    Args:
      operands: of a kernel.
      waits: whether the caller leaves operands without a mesh, where there are several devices, to ``unless_cut``.
    """
    if any(explicit_sharding(x) is not None for x in operands):
        return "an operand lies on a mesh with explicit axes, outside of jax.shard_map"
    if all(is_whole(x) or (waits and is_untold(x)) for x in operands):
        return None
    return "an operand may be sharded automatically: there are several devices, and it is not inside jax.shard_map"


def is_cut(context: Any) -> bool:
    """Check whether a compiler may cut what this program computes over devices; what cannot be read off may be cut.

    Types of results that a kernel declares by itself (cuDNN's attention) name no mesh, and the process that lowers for
    an absent chip has a single device.

    Args:
      context: of a lowering rule.
    """
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return getattr(axes, "num_devices", None) != 1
    return mesh.size != 1 and set(axes.manual_axes) != set(mesh.axis_names)


def unless_cut(whole: Callable[..., Array], cut: Callable[..., Array], *operands: Any) -> Array:
    """Return ``whole(*operands)``, but ``cut(*operands)`` in a program that a compiler may cut over devices.

    Where the types leave that open, both are traced, and the lowering takes one: so a program of one device computes
    the same on a host with more of them.

    Args:
      whole: computes by a kernel that ``cut_refusal`` does not refuse.
      cut: computes the same by operations that a compiler can cut.
      operands: arrays, in any tree.
    """
    leaves, tree = jax.tree.flatten(operands)
    if not any(map(is_untold, leaves)):
        return whole(*operands)
    first, second = (
        jax.make_jaxpr(lambda *leaves, run=run: run(*tree.unflatten(leaves)))(*leaves) for run in (whole, cut)
    )
    return _unless_cut.bind(*leaves, jaxpr=first, cut=jaxpr_as_fun(second))


UNLESS_CUT = "unless_cut"
"""Name of the primitive. It has the whole program as a jit has its own, so that those who read programs see one."""

_unless_cut = Primitive(UNLESS_CUT)
compile_impl(_unless_cut, "jaxpr", "cut")
_unless_cut.def_abstract_eval(lambda *_, jaxpr, cut: jaxpr.out_avals[0])


def _lower(context: Any, *operands: Any, jaxpr: Any, cut: Callable[..., Any]) -> Any:
    run = cut if is_cut(context) else jaxpr_as_fun(jaxpr)
    return mlir.lower_fun(run, multiple_results=True)(context, *operands)


def _batch(operands: Any, axes: Any, *, jaxpr: Any, cut: Callable[..., Any]) -> tuple[Array, int]:
    first, second = (jax.make_jaxpr(jax.vmap(run, axes))(*operands) for run in (jaxpr_as_fun(jaxpr), cut))
    return _unless_cut.bind(*operands, jaxpr=first, cut=jaxpr_as_fun(second)), 0


mlir.register_lowering(_unless_cut, _lower)
batching.primitive_batchers[_unless_cut] = _batch


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
