"""Arguments: part what a function is called with into arrays, which are traced, and all else, which is static."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxquant.trace.paths import Name, leaf_names


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """What is static of a call; hashable, so that jit's cache can go by it.

    Attributes:
      structures: trees of the parameters and of the other arguments.
      statics: for each of the two, every leaf that is no array, in a tuple of its own; () stands for an array.
    """

    structures: tuple[Any, Any]
    statics: tuple[tuple[tuple[Any, ...], ...], tuple[tuple[Any, ...], ...]]

    def rebuild(self, arrays: Sequence[Sequence[Any]]) -> list[Any]:
        """Insert arrays among the rest: the parameters and the other arguments."""
        params, args = (
            jax.tree.unflatten(structure, _fill(statics, given))
            for structure, statics, given in zip(self.structures, self.statics, arrays, strict=True)
        )
        return [params, *args]


def split_arrays(params: Any, args: tuple[Any, ...]) -> tuple[Split, tuple[list[Any], list[Any]]]:
    """Part the arguments of a call.

    Raises:
      TypeError: a leaf that is no array and cannot be hashed.
    """
    structures, statics, arrays = [], [], []
    for what, tree in (("parameter", params), ("argument", args)):
        leaves, structure = jax.tree.flatten(tree)
        for leaf in leaves:
            if not _is_array(leaf) and type(leaf).__hash__ is None:
                raise TypeError(f"{what} {leaf!r} is no array and cannot be hashed, got {type(leaf).__name__}")
        structures.append(structure)
        statics.append(tuple(() if _is_array(leaf) else (leaf,) for leaf in leaves))
        arrays.append([leaf for leaf in leaves if _is_array(leaf)])
    return Split(tuple(structures), tuple(statics)), tuple(arrays)  # pyright: ignore[reportReturnType]


def array_names(static: Split) -> list[Name]:
    """Return the path of every leaf of the parameters that is an array."""
    names = leaf_names(jax.tree.unflatten(static.structures[0], range(len(static.statics[0]))))
    return [name for name, other in zip(names, static.statics[0], strict=True) if not other]


def _fill(statics: Sequence[tuple[Any, ...]], arrays: Sequence[Any]) -> list[Any]:
    given = iter(arrays)
    return [other[0] if other else next(given) for other in statics]


def _is_array(leaf: Any) -> bool:
    """Return whether a value is traced: an array or a number. A bool is a switch."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or (
        isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
    )
