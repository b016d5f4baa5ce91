"""Packed quant state: the scales and histories of all tensors of a model in a few arrays, which cost little to carry.

A jitted step pays for each array that it takes and returns. A decoder of twelve layers in ``fp8`` has 756 arrays of
quant state; packed it has 24. ``pack`` stacks the state of tensors whose fields have the same shapes and dtypes,
and ``unpack`` is the state by layers again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant.core.quant_state import PACKED, delayed_tensors, fields_of, flat

Tree = Mapping[Any, Any]
"""Nested by module name; the leaves are ``TENSOR_scale``, ``TENSOR_amax_history``, ``TENSOR_amax_bins``, …"""
Kind = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and dtype of each field of a tensor's state."""
LARGEST = 32
"""The most rows of a group: XLA for CPUs makes one function of all that a stack of observations is made of."""
Row = tuple[tuple[Any, ...], str]
"""The path of a module, and the name of one of its tensors."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("fields",), meta_fields=("rows", "rank"))
@dataclasses.dataclass(frozen=True)
class Group:
    """The state of tensors of one kind, at most ``LARGEST``.

    Attributes:
      fields: ``packed_scale``, ``packed_amax_history`` and, except in flax mode, ``packed_amax_bins``, with a leading
        axis of as many rows as there are such tensors.
      rows: what each row is.
      rank: of the packed scales; an ensemble carried by ``jax.vmap`` has an axis more.
    """

    fields: dict[str, Any]
    rows: tuple[Row, ...]
    rank: int


@functools.partial(jax.tree_util.register_dataclass, data_fields=("groups", "rest"), meta_fields=())
@dataclasses.dataclass(frozen=True, repr=False)
class PackedState:
    """Quant state of a model in a few arrays. It is a pytree; ``pack`` makes it.

    ``unpack(packed)["layer"]["input_scale"]`` reads one array. An observation of packed state is packed, too.

    Attributes:
      groups: the state of each kind of tensor. ``warm`` may change how many there are.
      rest: state that has no amax history, as of sparsity, nested as it was.
    """

    groups: tuple[Group, ...]
    rest: dict[Any, Any]

    def __bool__(self) -> bool:
        return bool(self.groups or self.rest)

    def __repr__(self) -> str:
        tensors = sum(len(group.rows) for group in self.groups)
        return f"PackedState({tensors} tensors in {len(jax.tree.leaves(self.groups))} arrays)"


State = Tree | PackedState
"""Quant state, nested by module name or packed."""


def pack(quant_state: State) -> PackedState:
    """Stack the state of tensors of a kind. What is packed is returned as it is.

    A stack is sharded as all of its rows are, its first axis is on no mesh axis; rows that are sharded in different
    ways make one that is replicated.

    Args:
      quant_state: nested by module name; arrays, their shapes or tracers, of Linen's collection or, as
        ``nnx.to_pure_dict``, of NNX's ``QuantState``.

    Raises:
      TypeError: not nested by module name.
    """
    if isinstance(quant_state, PackedState):
        return quant_state
    require_tree(quant_state)
    kinds: dict[Kind, dict[Row, dict[str, Any]]] = {}
    rest = _without_tensors(quant_state, (), kinds)
    groups = []
    for kind in sorted(kinds):
        ordered = sorted(kinds[kind], key=lambda row: ([*map(str, row[0])], row[1]))
        for start in range(0, len(ordered), LARGEST):
            rows = tuple(ordered[start : start + LARGEST])
            stacks = {field: _stack([kinds[kind][row][field] for row in rows]) for field, *_ in kind}
            groups.append(Group(flat({PACKED: stacks}), rows, stacks["scale"].ndim))
    return PackedState(tuple(groups), rest)


def unpack(quant_state: Any) -> Any:
    """Return quant state nested by module name, as it was before ``pack``. What is nested is returned as it is.

    Its derivative is one concatenation for each array.

    Raises:
      TypeError: not nested by module name.
      ValueError: arrays of another rank than ``pack`` made.
    """
    if not isinstance(quant_state, PackedState):
        require_tree(quant_state)
        return quant_state
    tree = jax.tree.map(lambda leaf: leaf, quant_state.rest)
    for group in quant_state.groups:
        stacks = fields_of(group.fields, PACKED)
        if (rank := stacks["scale"].ndim) != group.rank:
            way = (
                "unpack an ensemble inside of jax.vmap" if rank > group.rank else "pack each member inside of jax.vmap"
            )
            raise ValueError(
                f"packed quant state has scales of rank {rank} and was packed with rank {group.rank}; {way}"
            )
        parts = {field: _unstack(stack) for field, stack in stacks.items()}
        for number, (path, tensor) in enumerate(group.rows):
            module = functools.reduce(lambda inner, name: inner.setdefault(name, {}), path, tree)
            module.update(flat({tensor: {field: part[number] for field, part in parts.items()}}))
    return tree


def require_tree(tree: Any, name: str = "quant state") -> None:
    """Check that quant state, or what was observed of it, is nested by module name or packed.

    Raises:
      TypeError: it is neither; calls it ``name``.
    """
    if not isinstance(tree, Mapping | PackedState):
        raise TypeError(
            f"{name} is {type(tree).__name__}, not a dict nested by module name; give what init, jaxquant.state.split "
            "or a gradient with respect to it returned, or nnx.to_pure_dict of the QuantState of a model"
        )


def _without_tensors(tree: Tree, path: tuple[Any, ...], kinds: dict[Kind, dict[Row, dict[str, Any]]]) -> dict[Any, Any]:
    """Return a tree without its tensors, which are added to ``kinds``."""
    taken: set[str] = set()
    for tensor in delayed_tensors(tree):
        fields = fields_of(tree, tensor)
        kind = tuple((field, tuple(value.shape), value.dtype.name) for field, value in fields.items())
        kinds.setdefault(kind, {})[path, tensor] = fields
        taken.update(flat({tensor: fields}))
    left = {name: value for name, value in tree.items() if name not in taken}
    modules = {name: value for name, value in left.items() if isinstance(value, Mapping)}
    inner = {name: _without_tensors(value, (*path, name), kinds) for name, value in modules.items()}
    empty = {name for name, value in inner.items() if not value and modules[name]}
    return {name: inner.get(name, value) for name, value in left.items() if name not in empty}


def _stack(rows: Sequence[Any]) -> Any:
    """Stack arrays, tracers or shapes along a new first axis."""
    if any(isinstance(row, Tracer) for row in rows):
        return _stacked(rows)
    shardings = [getattr(row, "sharding", None) for row in rows]
    found = shardings[0] if all(each == shardings[0] for each in shardings) else None
    if isinstance(shardings[0], NamedSharding):
        is_cut = found is not None and any(shardings[0].spec)
        spec = PartitionSpec(None, *shardings[0].spec) if is_cut else PartitionSpec()
        found = shardings[0].update(spec=spec)
    if isinstance(rows[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(rows), *rows[0].shape), rows[0].dtype, sharding=found)
    return jax.jit(_stacked, out_shardings=found if isinstance(found, NamedSharding) else None)(rows)


def _unstack(stack: Any) -> Sequence[Any]:
    """Return the rows of a stack."""
    if isinstance(stack, Tracer):
        return _rows(stack)
    sharding = getattr(stack, "sharding", None)
    is_named = isinstance(sharding, NamedSharding)
    if is_named:
        sharding = sharding.update(spec=PartitionSpec(*sharding.spec[1:]))
    if isinstance(stack, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding)] * stack.shape[0]
    return jax.jit(_rows, out_shardings=sharding if is_named else None)(stack)


def _stacked(rows: Sequence[Any]) -> jax.Array:
    return jnp.stack(rows)


def _rows(stack: Any) -> list[jax.Array]:
    # One operation, whose transpose is one: of indexing it would be a sum of as many arrays of the whole size.
    return [part.reshape(part.shape[1:]) for part in jax.lax.split(stack, (1,) * len(stack))]
