"""Paths of layers and leaves in trees, as rules and errors spell them, and sizes of trees in bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

IsLeaf = Callable[[Any], bool]


def join_path(keys: Iterable[Any]) -> str:
    """Return the "/"-joined path of the names, indices or keys of a pytree."""
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def layer_name(path: str) -> str:
    """Return the name of a layer in errors: ``layer 'a/b'``, or ``the root layer`` if the model is a layer itself."""
    return f"layer {path!r}" if path else at_layer(path)


def at_layer(path: str) -> str:
    """Return the place of a layer in errors: ``'a/b'`` or ``the root layer``."""
    return repr(path) if path else "the root layer"


def leaves_by_path(tree: Any, is_leaf: IsLeaf | None = None) -> dict[str, Any]:
    """Return a mapping from path to leaf, in the order of ``jax.tree.leaves``.

    Args:
      tree: any tree.
      is_leaf: predicate for nodes that are treated as leaves.
    """
    return {join_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)}


def map_by_path(function: Callable[[str, Any], Any], tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Apply a function of (path, leaf) to every leaf, and return a tree of the same structure.

    Args:
      function: function (path, leaf) -> new leaf.
      tree: any tree.
      is_leaf: predicate for nodes that are treated as leaves.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(join_path(path), leaf), tree, is_leaf=is_leaf)


def array_bytes(array: Any) -> int:
    """Return the bytes of an array or ShapeDtypeStruct; elements smaller than a byte are packed."""
    return math.ceil(math.prod(array.shape) * jax.dtypes.itemsize_bits(array.dtype) / 8)


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree, as in ``array_bytes``."""
    return sum(map(array_bytes, jax.tree.leaves(tree)))
