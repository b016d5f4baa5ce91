"""Trees of arrays: the path of a layer or a leaf as rules and errors spell it, and how many bytes a tree takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

IsLeaf = Callable[[Any], bool]


def join_path(keys: Iterable[Any]) -> str:
    """Return the "/"-joined path of names, indices or keys of a jax tree."""
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def layer_name(path: str) -> str:
    """Return how an error names a layer: ``layer 'a/b'``, or ``the root layer`` where a model is a layer itself."""
    return f"layer {path!r}" if path else at_layer(path)


def at_layer(path: str) -> str:
    """Return how an error names the place of a layer: ``'a/b'``, or ``the root layer``."""
    return repr(path) if path else "the root layer"


def leaves_by_path(tree: Any, is_leaf: IsLeaf | None = None) -> dict[str, Any]:
    """Return path -> leaf, in the order of ``jax.tree.leaves``.

    Args:
      tree: any tree.
      is_leaf: whether to go no further into a node.
    """
    return {join_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)}


def map_by_path(function: Callable[[str, Any], Any], tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Apply a function of (path, leaf) to every leaf, and return a tree of the same structure.

    Args:
      function: (path, leaf) -> new leaf.
      tree: any tree.
      is_leaf: whether to go no further into a node.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(join_path(path), leaf), tree, is_leaf=is_leaf)


def array_bytes(array: Any) -> int:
    """Count the bytes of an array or of a shape and dtype, elements of less than a byte packed."""
    return math.ceil(math.prod(array.shape) * jax.dtypes.itemsize_bits(array.dtype) / 8)


def tree_bytes(tree: Any) -> int:
    """Count the bytes of all arrays of a tree, as ``array_bytes`` does."""
    return sum(map(array_bytes, jax.tree.leaves(tree)))
