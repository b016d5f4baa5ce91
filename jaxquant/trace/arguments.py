"""Static arguments: mark the non-array leaves of a call, so that its pytree structure can be a key of jit's cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxquant.core.qtensor import is_tensor
from jaxquant.trace.paths import Name, leaf_names


class ById:
    """Unhashable static argument, compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, slots=True)
class Static:
    """Non-array leaf, stored in the structure of its tree.

    Attributes:
      value: the leaf, wrapped in ``ById`` if it is unhashable.
      kind: type of the leaf, because 1 == True.
    """

    value: Any
    kind: type

    @classmethod
    def of(cls, leaf: Any) -> Static:
        try:
            hash(leaf)
        except TypeError:
            return cls(ById(leaf), type(leaf))
        return cls(leaf, type(leaf))


def mark_static(tree: Any, numbers: bool = True, what: str = "") -> Any:
    """Return a tree whose leaves are arrays; all other leaves become ``Static`` nodes.

    Args:
      tree: arguments or results of a call.
      numbers: whether Python's int, float and complex are arrays, as under ``jax.jit``; otherwise they are static, as
        in a call that is not traced.
      what: name of a leaf for the error if static leaves must be hashable; "" compares unhashable leaves by identity.

    Raises:
      TypeError: ``what`` is set, and a leaf is neither an array nor hashable.
    """

    def mark(leaf: Any) -> Any:
        is_number = isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)  # a bool is a switch
        if (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or is_tensor(leaf) or (numbers and is_number):
            return leaf
        if what and type(leaf).__hash__ is None:
            raise TypeError(f"{what} {leaf!r} must be an array or a hashable value, got {type(leaf).__name__}")
        return Static.of(leaf)

    return jax.tree.map(mark, tree, is_leaf=is_tensor)


def restore_static(tree: Any) -> Any:
    """Undo ``mark_static``."""

    def restore(leaf: Any) -> Any:
        value = leaf.value if isinstance(leaf, Static) else leaf
        return value.value if isinstance(value, ById) else value

    return jax.tree.map(restore, tree, is_leaf=lambda leaf: isinstance(leaf, Static) or is_tensor(leaf))


def split_arrays(tree: Any) -> tuple[list[Any], Any]:
    """Return the arrays of a marked tree, with each converted kernel as one leaf, and its structure."""
    return jax.tree.flatten(tree, is_tensor)


def array_names(structure: Any) -> list[Name]:
    """Return the path of every array in a tree structure."""
    return leaf_names(jax.tree.unflatten(structure, range(structure.num_leaves)))
