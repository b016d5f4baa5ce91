"""Arguments: mark what of a call is no array, so that the tree of it, with all that is static, is a key of jit's."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxquant.core.qtensor import is_tensor
from jaxquant.trace.paths import Name, leaf_names


class ById:
    """A value that cannot be hashed, as a static argument: equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, slots=True)
class Static:
    """A leaf that is no array, as part of the structure of its tree.

    Attributes:
      value: the leaf, in a ``ById`` where it cannot be hashed.
      kind: its type: 1 is not True.
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
    """Return a tree whose leaves are arrays, all else being ``Static`` nodes.

    Args:
      tree: of what a call is given or returns.
      numbers: whether Python's int, float and complex are arrays, as under ``jax.jit``; else they are static, as in a
        call that nobody traces.
      what: what its leaves are called where one must be hashable; "" for what is equal to itself alone.

    Raises:
      TypeError: a leaf that is no array and cannot be hashed, with ``what``.
    """

    def mark(leaf: Any) -> Any:
        is_number = isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)  # a bool is a switch
        if (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or is_tensor(leaf) or (numbers and is_number):
            return leaf
        if what and type(leaf).__hash__ is None:
            raise TypeError(f"{what} {leaf!r} is no array and cannot be hashed, got {type(leaf).__name__}")
        return Static.of(leaf)

    return jax.tree.map(mark, tree, is_leaf=is_tensor)


def restore_static(tree: Any) -> Any:
    """Undo ``mark_static``."""

    def restore(leaf: Any) -> Any:
        value = leaf.value if isinstance(leaf, Static) else leaf
        return value.value if isinstance(value, ById) else value

    return jax.tree.map(restore, tree, is_leaf=lambda leaf: isinstance(leaf, Static) or is_tensor(leaf))


def split_arrays(tree: Any) -> tuple[list[Any], Any]:
    """Return the arrays of a marked tree, converted kernels whole, and its structure."""
    return jax.tree.flatten(tree, is_tensor)


def array_names(structure: Any) -> list[Name]:
    """Return the path of every array of a structure."""
    return leaf_names(jax.tree.unflatten(structure, range(structure.num_leaves)))
