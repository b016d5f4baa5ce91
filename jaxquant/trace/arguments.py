"""Arguments: part what a function is called with into arrays, which are traced, and all else, which is static."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.trace.paths import Name, leaf_names


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """What is static of a call; hashable, so that jit's cache can go by it.

    Attributes:
      structures: trees of the parameters and of the other arguments.
      statics: for each of the two, every leaf that is no array, with its type: 1 is not True; () stands for an array.
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


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, slots=True)
class Outputs:
    """What a function returns: its arrays, and a structure with all else, which a jit keeps beside its trace.

    Without arrays where ``is_skipped``: the trace found nothing to quantize, and its caller computes it otherwise.
    """

    arrays: list[Any]
    structure: Any
    statics: tuple[tuple[Any, ...], ...]
    is_skipped: bool = False

    @classmethod
    def of(cls, tree: Any, numbers: bool = True) -> Outputs:
        """Part what a function returned; ``numbers`` as for ``split_arrays``."""
        leaves, structure = jax.tree.flatten(tree)
        arrays, statics = _divide(leaves, numbers)
        return cls(arrays, structure, statics)

    def rebuild(self) -> Any:
        return jax.tree.unflatten(self.structure, _fill(self.statics, self.arrays))

    def tree_flatten(self) -> tuple[tuple[list[Any]], tuple[Any, Any, bool]]:
        return (self.arrays,), (self.structure, self.statics, self.is_skipped)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, Any, bool], children: tuple[list[Any]]) -> Outputs:
        return cls(*children, *aux)


class ById:
    """A value that cannot be hashed, as a static argument: equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value


def hashable(value: Any) -> Any:
    """Return a value itself, or boxed where it cannot be hashed."""
    try:
        hash(value)
    except TypeError:
        return ById(value)
    return value


def split_arrays(params: Any, args: tuple[Any, ...], numbers: bool = True) -> tuple[Split, tuple[list[Any], list[Any]]]:
    """Part the arguments of a call.

    Args:
      params, args: of the call.
      numbers: whether Python's int, float and complex are arrays, as under ``jax.jit``; else they are static, as in a
        call that nobody traces, and what cannot be hashed is equal to itself alone.

    Raises:
      TypeError: a leaf that is no array and cannot be hashed, with ``numbers``.
    """
    structures, statics, arrays = [], [], []
    for what, tree in (("parameter", params), ("argument", args)):
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_quantized)
        for leaf in leaves if numbers else ():
            if not _is_array(leaf) and type(leaf).__hash__ is None:
                raise TypeError(f"{what} {leaf!r} is no array and cannot be hashed, got {type(leaf).__name__}")
        traced, others = _divide(leaves, numbers)
        structures.append(structure)
        statics.append(others)
        arrays.append(traced)
    return Split(tuple(structures), tuple(statics)), tuple(arrays)  # pyright: ignore[reportReturnType]


def array_names(static: Split) -> list[Name]:
    """Return the path of every leaf of the parameters that is an array."""
    names = leaf_names(jax.tree.unflatten(static.structures[0], range(len(static.statics[0]))))
    return [name for name, other in zip(names, static.statics[0], strict=True) if not other]


def _divide(leaves: Sequence[Any], numbers: bool) -> tuple[list[Any], tuple[tuple[Any, ...], ...]]:
    """Return the leaves that are arrays, and as in ``Split`` the others in their places."""
    is_array = _is_array if numbers else _has_dtype
    statics = tuple(() if is_array(leaf) else (hashable(leaf), type(leaf)) for leaf in leaves)
    return [leaf for leaf in leaves if is_array(leaf)], statics


def _fill(statics: Sequence[tuple[Any, ...]], arrays: Sequence[Any]) -> list[Any]:
    given = iter(arrays)
    return [_value(other[0]) if other else next(given) for other in statics]


def _value(static: Any) -> Any:
    return static.value if isinstance(static, ById) else static


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, (ConvertedKernel, QTensor))


def _has_dtype(leaf: Any) -> bool:
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or _is_quantized(leaf)


def _is_array(leaf: Any) -> bool:
    """Return whether a value is traced: an array, a converted kernel or a number. A bool is a switch."""
    return _has_dtype(leaf) or (isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool))
