"""Paths: names of parameter leaves, of layers, and of their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxquant.core.paths import join_path

Name = tuple[str, ...]

GENERIC = frozenset({"kernel", "weight", "weights", "w", "W", "embedding", "table"})
"""Last names of a leaf that do not describe it beyond the name of its module."""
_GENERIC_IF_ALONE = frozenset({"value", "scale"})
"""Names that are generic only for the single leaf of a module; in ``{"query", "key", "value"}`` each is a layer."""
_BOXES = frozenset({"value", "raw_value"})
"""Attributes under which a variable (NNX, a boxed Linen parameter) holds its array."""


def leaf_names(tree: Any) -> list[Name]:
    """Return the path of every leaf, in the order of ``jax.tree.leaves``, without the boxes that hold arrays."""
    return [_leaf_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def replace_leaves(tree: Any, new: Mapping[Name, Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return a tree with the leaves at some paths replaced."""
    leaves, structure = jax.tree.flatten(tree, is_leaf)
    names = leaf_names(jax.tree.unflatten(structure, range(len(leaves))))
    return jax.tree.unflatten(structure, [new.get(name, leaf) for name, leaf in zip(names, leaves, strict=True)])


def _leaf_name(path: Sequence[Any]) -> Name:
    keys = list(path)
    while len(keys) > 1 and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name in _BOXES:
        keys.pop()
    return tuple(join_path([key]) for key in keys)


def layer_names(names: Sequence[Name], root_is_layer: bool = False) -> list[Name]:
    """Return the layer of each leaf: its path, without a generic last name.

    Three experts ``wi_0``, ``wi_1`` and ``wo`` of one module stay three layers.

    Args:
      names: path of every leaf.
      root_is_layer: whether a root leaf named ``kernel`` is a layer with the empty path, as in a model that is one
        layer.
    """
    beside: dict[Name, int] = {}
    for name in names:
        beside[name[:-1]] = beside.get(name[:-1], 0) + 1
    return [_layer(name, beside[name[:-1]] == 1, root_is_layer) for name in names]


def _layer(name: Name, alone: bool, root_is_layer: bool) -> Name:
    for last in name[-1:]:
        is_generic = last in GENERIC or (alone and last in _GENERIC_IF_ALONE)
        if is_generic and (len(name) > 1 or (root_is_layer and last == "kernel")):
            return name[:-1]
    return name


def layer_path(layers: Iterable[Name]) -> str:
    """Join the layers of a weight's leaves to one path: their common prefix, or all of them."""
    distinct = sorted(set(layers))
    if not distinct:
        return ""
    if len(distinct) == 1:
        return "/".join(distinct[0])
    common: list[str] = []
    for parts in zip(*distinct, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return "/".join(common) or "+".join("/".join(name) or "root" for name in distinct)
