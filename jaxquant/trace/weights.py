"""Description of a contraction's weight operand: its axes, its batch sizes, and how devices split it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxquant.trace.flow import SHARDED, Route
from jaxquant.trace.plan import Contraction


def describe_weight(site: Contraction, eqn: Any) -> None:
    """Set the fields of ``site`` that describe the weight: axes, sizes of batch axes, number of output features."""
    assert site.side is not None
    shape = site.shapes[site.side]
    groups, numbers = (), eqn.params.get("dimension_numbers")
    if site.operation == "ragged_dot_general":
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        groups, numbers = tuple(ragged.rhs_group_dimensions), ragged.dot_dimension_numbers
    if site.operation == "conv_general_dilated":
        contract, batch = tuple(axis for axis in range(len(shape)) if axis != numbers.rhs_spec[0]), ()
    else:
        contract, batch = (tuple(axes[site.side]) for axes in numbers)
    site.weight_axes = contract, (*groups, *batch)
    site.batch = tuple(shape[axis] for axis in (*groups, *batch))
    _split_batch(site, shape)
    site.out_features = math.prod(n for axis, n in enumerate(shape) if axis not in (*groups, *contract, *batch))


def _split_batch(site: Contraction, shape: Sequence[int]) -> None:
    """Set the mesh axes that split each batch axis of a weight (None if unknown) and the global batch sizes."""
    route, batch = site.route, site.weight_axes[1]
    if not isinstance(route, Route):
        site.split = None if batch and any(leaf.split for leaf in site.leaves) else ()
        return
    found = route.by_batch(batch, (axis for axis, n in enumerate(shape) if n > 1 and axis not in batch))
    if not found or not any(found):
        site.split = None if found is None else ()
        return
    site.split = tuple(tuple(name for each in own for name in each.names) for own in found)
    site.batch = tuple(n * math.prod(each.parts for each in own) for n, own in zip(site.batch, found, strict=True))
    if route.obstacle == SHARDED and sum(map(len, found)) == len(route.splits):
        site.route = dataclasses.replace(route, obstacle="")  # conversion handles each expert of a whole leaf
