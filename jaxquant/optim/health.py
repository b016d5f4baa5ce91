"""Health of 8-bit moments: the share of elements that underflow."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.paths import join_path, leaves_by_path
from jaxquant.optim.state import MOMENTS, Moments, QuantizedState, map_moments

_E4M3 = ELEMENTS["float8_e4m3fn"]


def moment_health(state: Any, moments: Moments = MOMENTS) -> dict[str, dict[str, Float[Array, ""]]]:
    """Return, for each 8-bit moment by path, the shares of elements with the two smallest codes.

    ``zero`` is the share of code 0: the moment was 0 or, if it is signed, underflowed. ``smallest`` is the share of the
    smallest nonzero code, to which a second moment underflows. Moments do not overflow, because the largest magnitude
    of a group is the largest value of the code. If the shares grow, the values in a group span more than the range of
    the code: list these moments in ``float32``, or use ``fp8_coat``, which adapts the range to each group.

    Args:
      state: optimizer state that contains states of ``jaxquant.optim.quantize_state``, as arrays or tracers.
      moments: argument of ``quantize_state``.
    """
    found: dict[str, dict[str, Float[Array, ""]]] = {}

    def read(start: str, path: str, signed: bool, tree: Any) -> Any:
        for name, codes in leaves_by_path(tree).items():
            if codes.dtype.itemsize == 1:
                at = _low_end_masks(codes, signed)
                found["/".join(filter(None, (start, path, name)))] = {end: jnp.mean(each) for end, each in at.items()}
        return tree

    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, QuantizedState))
    for start, node in nodes:
        if isinstance(node, QuantizedState):
            map_moments(functools.partial(read, join_path(start)), moments, node.inner)
    return found


def _low_end_masks(codes: Array, signed: bool) -> dict[str, Array]:
    """Return a mask of the codes that are 0, and a mask of the codes with the smallest nonzero magnitude."""
    x, smallest = codes.astype(jnp.float32), 1.0
    if codes.dtype == _E4M3.name:
        smallest = 2.0 ** (_E4M3.min_exponent - _E4M3.mantissa_bits)
    elif codes.dtype == jnp.uint8 and signed:  # two's complement, except that 128 is +1
        x = jnp.where(x > 128, 256 - x, x)
    return {"zero": x == 0, "smallest": jnp.abs(x) == smallest}
