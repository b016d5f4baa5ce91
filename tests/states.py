"""Quant state by names, for tests: read as nested dicts, edited by row, and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import state
from jaxquant.core.quant_state import Fields
from jaxquant.state.table import Table, Tables, is_tables


def nested(quant_state: Any) -> dict[str, Any]:
    """Return quant state in flax's nesting, ``{"layer": {"op": {"input_scale": …, "input_amax_history": …}}}``."""
    tree: dict[str, Any] = {}
    for name, fields in state.rows_of(quant_state).items():
        *path, tensor = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node.update({f"{tensor}_{field}": value for field, value in fields.items()})
    return tree


def only(quant_state: Any) -> dict[str, Any]:
    """Return the nested variables of a quant state that has only one op."""
    tree = nested(quant_state)
    while "input_scale" not in tree:
        (tree,) = tree.values()
    return tree


def edited(quant_state: Any, change: Callable[[str, Fields], Fields]) -> Any:
    """Return quant state with the fields of each row replaced by ``change(name, fields)``."""

    def edit(table: Table) -> Table:
        rows = [
            change(name, {field: stack[number] for field, stack in table.fields.items()})
            for number, name in enumerate(table.rows)
        ]
        fields = {field: jnp.stack([row[field] for row in rows]) for field in table.fields}
        return dataclasses.replace(table, fields=fields)

    return jax.tree.map(lambda each: Tables(tuple(map(edit, each.tables))), quant_state, is_leaf=is_tables)


def recorded(amax: Any) -> Any:
    """Return amaxes as a history stores them: rounded up to the largest float32 with the same three mantissa bits."""
    bits = np.asarray(amax, np.float32).view(np.int32)
    return np.where(bits >> 20 > 0, (bits | 0xFFFFF).view(np.float32), np.float32(0))


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Compare two states bit for bit, except for scales that are means over uses."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    others = state.rows_of(theirs)
    for name, fields in state.rows_of(ours).items():
        for field, value in fields.items():
            # a mean of equal scales may differ from the scales in the last bit
            rtol = 1e-6 if field == "scale" else 0
            np.testing.assert_allclose(value, others[name][field], rtol=rtol, err_msg=f"{name}/{field}")
