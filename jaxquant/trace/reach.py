"""Reach: the place of an equation in a traced function, and why a contraction there cannot be quantized."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.kernels import CALLS
from jaxquant.trace.jaxprs import open_jaxpr, programs
from jaxquant.trace.plan import CONTRACTIONS, Contraction
from jaxquant.trace.registry import function_name, how_to_register

NOT_FLOAT = "its inputs are not float"
_DIFFERENTIATED = frozenset({"jvp", "transpose"})


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Place of a jaxpr in the program.

    Attributes:
      level: number of enclosing scans.
      context: index of the equation at each level of nesting, which distinguishes occurrences.
      scopes: name scopes.
      is_differentiated: whether the jaxpr is part of a derivative that the function itself computes.
      is_backward: whether the jaxpr is part of the backward pass of that derivative.
      is_einsum: whether the jaxpr is inside a ``jnp.einsum``.
      closed: reason for which no equation of the jaxpr can be replaced, or "".
      opened: name of the enclosing registered function whose program is analyzed instead, or "".
    """

    level: int = 0
    context: tuple[int, ...] = ()
    scopes: tuple[str, ...] = ()
    is_differentiated: bool = False
    is_backward: bool = False
    is_einsum: bool = False
    closed: str = ""
    opened: str = ""

    def at(self, index: int, eqn: Any) -> Place:
        stack = eqn.source_info.name_stack
        own, transforms = str(stack), {each.name for each in stack.stack if type(each).__name__ == "Transform"}
        return dataclasses.replace(
            self,
            context=(*self.context, index),
            scopes=(*self.scopes, own) if own else self.scopes,
            is_differentiated=self.is_differentiated or not transforms.isdisjoint(_DIFFERENTIATED),
            is_backward=self.is_backward or "transpose" in transforms,
        )

    def branch(self, number: int) -> Place:
        return dataclasses.replace(self, context=(*self.context, number))


def no_float_matmul(eqn: Any) -> str:
    """Return the reason for which an equation is not a float matmul, so that float loses nothing, or ""."""
    if eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][0][0]:
        return "contracts no axis"  # an outer or elementwise product, such as a norm's scale in an einsum
    return "" if any(jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in eqn.invars[:2]) else NOT_FLOAT


def out_of_reach(site: Contraction, eqn: Any, place: Place) -> str:
    """Return the reason for which a parameter contraction cannot be quantized, or ""."""
    if why := no_float_matmul(eqn) or place.closed:
        return why
    if eqn.primitive.name not in CONTRACTIONS:
        return "multiplies blocks that are already quantized"
    if place.is_differentiated:
        return "part of a derivative that the function computes; quantize the differentiated function instead"
    if site.operation == "conv_general_dilated" and (why := _unusual_convolution(site, eqn)):
        return why
    if site.operation == "ragged_dot_general" and (why := _unusual_ragged(site, eqn)):
        return why
    if not all(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in eqn.invars[:2]):
        return NOT_FLOAT
    if any(axis < 0 for leaf in site.leaves for axis in leaf.split):
        return "its stack of layers is split over devices by a shard_map"
    if site.split is None:
        return "its weight has batch axes and is split over devices by a shard_map"
    precision = eqn.params["precision"]
    if isinstance(precision, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)):
        return f"requests the precision algorithm {precision}"
    return ""


def _unusual_ragged(site: Contraction, eqn: Any) -> str:
    """Return the reason for which a ragged matmul is not like ``jax.lax.ragged_dot``, or ""."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, batch), groups = numbers.dot_dimension_numbers, numbers.rhs_group_dimensions
    plain = (tuple(map(tuple, contracted)), tuple(map(tuple, batch))) == (((1,), (1,)), ((), ()))
    if not plain or tuple(numbers.lhs_ragged_dimensions) != (0,) or tuple(groups) != (0,) or site.side != 1:
        return "a ragged matmul with other dimensions than jax.lax.ragged_dot"
    if eqn.params["group_offset"] is not None:
        return "a ragged matmul with a group_offset"
    return ""


def _unusual_convolution(site: Contraction, eqn: Any) -> str:
    if site.side != 1:
        return "a convolution whose first input is the parameter"
    if eqn.params["batch_group_count"] != 1:
        return f"a convolution with batch_group_count {eqn.params['batch_group_count']}"
    return ""


def unreachable_product(eqn: Any, has_matrix: bool) -> str:
    """Return the reason for which a product inside an equation that is not analyzed cannot be quantized.

    Args:
      eqn: equation that receives a parameter.
      has_matrix: whether a parameter that it receives has at least two axes.

    Returns:
      The reason, or "" if the equation contains no product.
    """
    name = eqn.primitive.name
    if ("callback" in name and name != "debug_callback") or (name == "ffi_call" and has_matrix):
        return f"passed to {name}, which computes outside of JAX"
    if "dot_general" not in name and not any(map(_multiplies, programs(eqn.params))):  # sparse matrices have their own
        return ""
    if name == "pallas_call":
        return f"inside {name} of {function_name(eqn)!r}; {how_to_register()}"
    kernel = _kernel_name(eqn)
    return f"inside the Mosaic GPU kernel {kernel!r}" if kernel else f"inside {name}"


def _multiplies(jaxpr: Any) -> bool:
    known = (*CONTRACTIONS, "wgmma", "wgmma_ref", "mma", "tcgen05_mma")  # from Mosaic GPU
    return any(eqn.primitive.name in known or any(map(_multiplies, programs(eqn.params))) for eqn in jaxpr.eqns)


def _kernel_name(eqn: Any) -> str:
    """Return the name of the kernel that an equation calls, or "". Mosaic GPU calls kernels in a ``custom_vmap``."""
    if eqn.primitive.name in CALLS:
        return str(eqn.params["name"])
    inner = open_jaxpr(eqn.params["call"]).eqns if eqn.primitive.name == "custom_vmap_call" else ()
    return next(filter(None, map(_kernel_name, inner)), "")
