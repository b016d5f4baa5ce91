"""Health of moments in 8 bits: how many of them underflow."""

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
    """Return how many of an optimizer's 8-bit moments are at the low end of their code: path -> shares of its elements.

    ``zero``: the code is 0, of a moment that was 0 or, where it has a sign, underflowed. ``smallest``: the code is the
    smallest but 0, as that of a second moment that underflows. No moment overflows: its group's largest magnitude is
    the largest number of the code. Where shares grow, groups span more than the code: name these moments in
    ``float32``, or take ``fp8_coat``, which spreads any group over its code.

    Args:
      state: with states of ``jaxquant.optim.quantize_state`` in it, as arrays; it may be traced.
      moments: as of ``quantize_state``.
    """
    found: dict[str, dict[str, Float[Array, ""]]] = {}

    def read(start: str, path: str, signed: bool, tree: Any) -> Any:
        for name, codes in leaves_by_path(tree).items():
            if codes.dtype.itemsize == 1:
                at = _ends(codes, signed)
                found["/".join(filter(None, (start, path, name)))] = {end: jnp.mean(each) for end, each in at.items()}
        return tree

    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, QuantizedState))
    for start, node in nodes:
        if isinstance(node, QuantizedState):
            map_moments(functools.partial(read, join_path(start)), moments, node.inner)
    return found


def _ends(codes: Array, signed: bool) -> dict[str, Array]:
    """Mark the codes that are 0, and those whose magnitude is the smallest but 0."""
    x, smallest = codes.astype(jnp.float32), 1.0
    if codes.dtype == _E4M3.name:
        smallest = 2.0 ** (_E4M3.min_exponent - _E4M3.mantissa_bits)
    elif codes.dtype == jnp.uint8 and signed:  # two's complement, but for 128, which is +1
        x = jnp.where(x > 128, 256 - x, x)
    return {"zero": x == 0, "smallest": jnp.abs(x) == smallest}
