"""Quant state of a model as tables: one table for each kind of tensor, one row for each tensor of a layer.

A jitted step has a cost for each array that it takes and returns. The 252 tensors of a twelve-layer decoder have 756
arrays; as tables they have 18.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey

from jaxquant.core import delayed
from jaxquant.core.paths import join_path
from jaxquant.core.quant_state import BINS, FIELDS, HISTORY, SPARSITY_FIELDS, Fields, LayerState

ENTRY = "tables"
"""Name of the only variable in a Linen module's collection of quant state; it is not part of a layer's path."""
LARGEST = 48
"""Maximum number of rows in a table. XLA:CPU compiles all producers of a stack into one function, so larger stacks
compile slowly."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("fields",), meta_fields=("rows", "warm", "rank"))
@dataclasses.dataclass(frozen=True)
class Table:
    """The state of tensors whose fields have the same shapes and dtypes.

    Attributes:
      fields: arrays by field. The row axis precedes a tensor's own axes and follows the axes that ``nn.scan``,
        ``nnx.scan`` and ``jax.vmap`` add in front.
      rows: path of the layer's state and name of the tensor, joined by "/".
      warm: flag for each row: whether the tensor is scaled only by its history (``state.warm``).
      rank: number of axes of the alphabetically first field, before a scan or ``vmap`` adds any; locates the row axis.
    """

    fields: Fields
    rows: tuple[str, ...]
    warm: tuple[bool, ...]
    rank: int

    @property
    def axis(self) -> int:
        """Axis of the rows."""
        return self.fields[min(self.fields)].ndim - self.rank


@functools.partial(jax.tree_util.register_dataclass, data_fields=("tables",), meta_fields=())
@dataclasses.dataclass(frozen=True, repr=False)
class Tables:
    """Quant state, or an observation of it. It is a pytree: save and restore it like any other.

    ``jaxquant.state.rows_of`` lists the tensors.
    """

    tables: tuple[Table, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tables)

    def __repr__(self) -> str:
        tensors = sum(len(table.rows) for table in self.tables)
        return f"Tables({tensors} tensors in {len(jax.tree.leaves(self))} arrays)"


def make_state(rows: Mapping[str, Fields]) -> Tables:
    """Stack the state of tensors into tables.

    A stack has the sharding of its rows; the row axis is not sharded. If shardings differ, the stack is replicated.
    Masks of sparse weights are not stacked, because each is as large as its weight.

    Args:
      rows: fields of each tensor: arrays, shapes or tracers.
    """
    kinds: dict[Any, list[str]] = {}
    for name in sorted(rows):
        own = rows[name]
        kind = tuple((field, tuple(own[field].shape), own[field].dtype.name) for field in _order(own))
        kinds.setdefault(kind, []).append(name)
    tables = []
    for kind in sorted(kinds):
        most = 1 if kind[0][0] in SPARSITY_FIELDS else LARGEST
        for start in range(0, len(kinds[kind]), most):
            names = kinds[kind][start : start + most]
            fields = {field: _stack([rows[name][field] for name in names]) for field, *_ in kind}
            tables.append(Table(fields, tuple(names), (False,) * len(names), fields[min(fields)].ndim))
    return Tables(tuple(tables))


def _order(fields: Fields) -> list[str]:
    return [name for name in (*FIELDS, *SPARSITY_FIELDS) if name in fields]


def is_tables(node: Any) -> bool:
    """Return whether a node of a pytree is quant state."""
    return isinstance(node, Tables)


def is_field(path: Sequence[str]) -> bool:
    """Return whether the path of a leaf, by names, is the path of a scale, a history or bins in a table."""
    return tuple(path[-2:-1]) == ("fields",) and path[-1] in FIELDS


def tables_of(tree: Any) -> list[Table]:
    """List the tables within a pytree."""
    return [table for each in jax.tree.leaves(tree, is_leaf=is_tables) if is_tables(each) for table in each.tables]


def named_tables(tree: Any) -> Iterator[tuple[str, Tables]]:
    """Yield (prefix of the row names, state) for each state in a pytree; the prefix is "" or ends in "/".

    Raises:
      TypeError: a leaf does not belong to quant state.
    """
    for path, each in jax.tree.leaves_with_path(tree, is_leaf=is_tables):
        if not is_tables(each):
            raise TypeError(
                f"quant state must have the structure that init returns, got {type(each).__name__} at "
                f"{join_path(path)!r}; restore checkpoints with the quant state of init as template, and convert quant "
                "state of flax or of an earlier jaxquant with jaxquant.state.from_flax"
            )
        # Drop the attribute in which a variable of NNX holds its value.
        keys = [key for key in path if not isinstance(key, GetAttrKey)]
        keys = keys[: len(keys) - (getattr(keys[-1], "key", None) == ENTRY)] if keys else keys
        yield f"{join_path(keys)}/" if keys else "", each


def rows_of(quant_state: Any) -> dict[str, Fields]:
    """Return the fields of every tensor, by the path of its layer's state and its name.

    ``rows_of(quant_state)["Dense_0/Fp8DirectDotGeneralOp_0/input"]["amax_history"]`` is one array.

    Args:
      quant_state: state of a Linen model, an NNX model (``nnx.to_pure_dict``) or a function, or its observation. Axes
        in front of the rows, as of layers under ``nnx.scan`` or of an ensemble, are the first axes of each field.

    Raises:
      TypeError: the argument is not quant state.
    """
    layers = layers_of(quant_state, fits_bins=False).items()
    return {f"{layer}/{name}".lstrip("/"): row for layer, rows in layers for name, row in rows.items()}


def layers_of(quant_state: Any, *, fits_bins: bool = True) -> dict[str, LayerState]:
    """Return the state of every layer by its path, as ops read it.

    Args:
      quant_state: state as for ``rows_of``.
      fits_bins: whether to widen the bins of tensors that ``state.warm`` marked.
    """
    layers: dict[str, LayerState] = {}
    for prefix, state in named_tables(quant_state):
        for table in state.tables:
            if table.axis < 0:
                raise ValueError(
                    f"quant state {prefix + table.rows[0]!r} has {-table.axis} axes fewer than after init; "
                    "pass quant state of the shape that init returned"
                )
            shape = table.fields[min(table.fields)].shape
            if shape[table.axis] != len(table.rows):
                raise ValueError(
                    f"quant state {prefix + table.rows[0]!r} has shape {shape}, but needs size {len(table.rows)} on "
                    f"axis {table.axis}; if a scan or vmap maps quant state, map axis 0"
                )
            marks = (each and fits_bins for each in table.warm)
            rows = [(*name.rpartition("/"), is_warm) for name, is_warm in zip(table.rows, marks, strict=True)]
            groups = [(path, [*group]) for path, group in itertools.groupby(rows, lambda row: row[0])]
            fields = {name: _moved(x, table.axis, 0) for name, x in table.fields.items()}
            parts = _cut(fields, tuple(len(group) for _, group in groups))
            for part, (path, group) in zip(parts, groups, strict=True):
                own = _rows(part, tuple((tensor, is_warm) for *_, tensor, is_warm in group))
                layers.setdefault((prefix + path).rstrip("/"), {}).update(own)
    return layers


def move_row_axis(state: Tables, axes: int) -> Tables:
    """Return state whose row axis comes after the first axes of a row, which ``nnx.scan`` slices."""

    def move(table: Table) -> Table:
        fields = {name: _moved(x, 0, axes) for name, x in table.fields.items()}
        return dataclasses.replace(table, fields=fields, rank=table.rank - axes)

    return Tables(tuple(map(move, state.tables)))


def _moved(x: Any, source: int, to: int) -> Any:
    """Move an axis of an array or a shape."""
    if source == to:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: jnp.moveaxis(x, source, to), x)
    return jnp.moveaxis(x, source, to)


def _cut(fields: Fields, sizes: tuple[int, ...]) -> list[Fields]:
    """Split the fields of a table into the fields of its layers."""
    if any(isinstance(each, Tracer) for each in fields.values()):
        return _cut_traced(fields, sizes)
    ends = [*itertools.accumulate(sizes)]
    return [
        {name: _slice(x, end - size, end) for name, x in fields.items()} for size, end in zip(sizes, ends, strict=True)
    ]


# Tables of one shape share a jitted function, and so do layers, so that a program has few lines for each.
@functools.partial(jax.jit, static_argnums=1)
def _cut_traced(fields: Fields, sizes: tuple[int, ...]) -> list[Fields]:
    # ``split`` transposes to one concatenation; indexing would transpose to a sum of full-size arrays.
    parts = {name: jax.lax.split(stack, sizes) for name, stack in fields.items()}
    return [{name: part[number] for name, part in parts.items()} for number in range(len(sizes))]


def _rows(part: Fields, names: tuple[tuple[str, bool], ...]) -> LayerState:
    """Return the fields of a layer's tensors; ``names`` holds each tensor's name and whether it is warm."""
    if any(isinstance(each, Tracer) for each in part.values()):
        return _rows_traced(part, names)
    rows = {
        name: {field: _first(_slice(x, n, n + 1)) for field, x in part.items()} for n, (name, _) in enumerate(names)
    }
    return _fitted(rows, names)


@functools.partial(jax.jit, static_argnums=1)
def _rows_traced(part: Fields, names: tuple[tuple[str, bool], ...]) -> LayerState:
    parts = {field: jax.lax.split(x, (1,) * len(x)) for field, x in part.items()}
    rows = {
        name: {field: each[n].reshape(each[n].shape[1:]) for field, each in parts.items()}
        for n, (name, _) in enumerate(names)
    }
    return _fitted(rows, names)


def _fitted(rows: LayerState, names: Sequence[tuple[str, bool]]) -> LayerState:
    warm = [name for name, is_warm in names if is_warm]
    return rows | {name: rows[name] | {BINS: delayed.widen_bins(rows[name][BINS])} for name in warm}


def _slice(stack: Any, start: int, end: int) -> Any:
    """Return some rows of arrays or shapes."""
    if isinstance(stack, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((end - start, *stack.shape[1:]), stack.dtype, sharding=stack.sharding)
    sharding = getattr(stack, "sharding", None)
    if isinstance(sharding, NamedSharding):  # like the rows: a short row axis cannot be sharded
        sharding = sharding.update(spec=PartitionSpec(None, *sharding.spec[1:]))
    return _place_result(lambda x: x[start:end], stack, sharding)


def _first(stack: Any) -> Any:
    """Return the only row of an array or shape, with its sharding."""
    sharding = getattr(stack, "sharding", None)
    if isinstance(sharding, NamedSharding):
        sharding = sharding.update(spec=PartitionSpec(*sharding.spec[1:]))
    if not isinstance(stack, jax.ShapeDtypeStruct):
        return _place_result(lambda x: x[0], stack, sharding)
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding)


def _place_result(function: Callable[[Any], Any], stack: Any, sharding: Any) -> Any:
    """Apply a function to an array and place the result with a sharding."""
    return jax.jit(function, out_shardings=sharding)(stack) if isinstance(sharding, NamedSharding) else function(stack)


def _restore(like: Tables, rows: Mapping[str, Fields]) -> Tables:
    """Return tables with the layout of ``like`` and fields from ``flax.serialization``."""
    if different := sorted(rows.keys() ^ {name for table in like.tables for name in table.rows}):
        where = "the checkpoint" if different[0] in rows else "the model"
        raise ValueError(f"quant state {different[0]!r} is only in {where}; use the model that was saved")

    def fill(table: Table) -> Table:
        stacks = {field: _stack([rows[name][field] for name in table.rows]) for field in table.fields}
        fields = {field: _moved(x, 0, table.axis) for field, x in stacks.items()}
        return dataclasses.replace(table, fields=fields, warm=(False,) * len(table.rows))

    return Tables(tuple(map(fill, like.tables)))


serialization.register_serialization_state(Tables, rows_of, _restore)


def from_flax(quant_state: Mapping[Any, Any], like: Any) -> Any:
    """Convert quant state nested by module, as flax's fp8 ops and earlier versions of jaxquant store it.

    Args:
      quant_state: arrays or shapes, ``{"layer": {"op": {"input_scale": …, "input_amax_history": …}}}``. Bins are
        optional. Integer keys can be text, as orbax restores them without a template.
      like: quant state of the model, or its shapes, whose tensors are looked up.

    Returns:
      State with the structure of ``like``, in float32, with empty bins.

    Raises:
      ValueError: a tensor is only in one of the two, a history has another length, or bins hold observations of
        micro-batches.
    """
    rows = dict(_nested_rows(quant_state, ""))

    def take(prefix: str, own: Tables) -> Tables:
        return Tables(tuple(_filled(table, [_pop(rows, prefix + name) for name in table.rows]) for table in own.tables))

    new = [take(prefix, own) for prefix, own in named_tables(like)]
    if rows:
        raise ValueError(f"the model has no quant state {next(iter(rows))!r}; use the model that was saved")
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_tables), new)


def _nested_rows(tree: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Fields]]:
    rows: dict[str, Fields] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _nested_rows(value, f"{path}{name}/")
            continue
        field = next((each for each in (*FIELDS, *SPARSITY_FIELDS) if str(name).endswith(f"_{each}")), None)
        if field is None:
            raise ValueError(f"quant state has the unknown entry {path + str(name)!r}; pass only quant state")
        rows.setdefault(path + str(name).removesuffix(f"_{field}"), {})[field] = value
    yield from rows.items()


def _pop(rows: dict[str, Fields], name: str) -> Fields:
    # Earlier versions named the state of NNX models by its operation.
    module, _, tensor = name.rpartition("/")
    owner = module.rpartition("/")[0]
    for each in (name, *("/".join(filter(None, (owner, op, tensor))) for op in ("dot_general", "einsum_op"))):
        if each in rows:
            return rows.pop(each)
    raise ValueError(f"the checkpoint has no quant state {name!r}; use the model that was saved")


def _filled(table: Table, rows: Sequence[Fields]) -> Table:
    for name, row in zip(table.rows, rows, strict=True):
        if any_of(row.get(BINS), np.any):
            raise ValueError(
                f"quant state {name!r} was saved between two optimizer steps, after a part of the micro-batches; "
                "save quant state right after an optimizer step"
            )
    fields: Fields = {}
    for field, own in table.fields.items():
        if field == BINS:
            is_shape = isinstance(rows[0].get(HISTORY), jax.ShapeDtypeStruct)
            fields[field] = own if is_shape else _placed(jnp.zeros(own.shape, own.dtype), own)
            continue
        arrays = [row.get(field) for row in rows]
        row_shape = (*own.shape[: table.axis], *own.shape[table.axis + 1 :])
        for name, value in zip(table.rows, arrays, strict=True):
            if value is None or tuple(value.shape) != row_shape:
                has = f"no {field}" if value is None else f"{field} of shape {tuple(value.shape)}"
                raise ValueError(f"quant state {name!r} has {has}, but the model needs shape {row_shape}")
        new: Any = _moved(_stack(arrays), 0, table.axis)
        if isinstance(new, jax.ShapeDtypeStruct):
            fields[field] = jax.ShapeDtypeStruct(new.shape, own.dtype, sharding=new.sharding)
        else:
            fields[field] = _placed(new.astype(own.dtype), own)
    return dataclasses.replace(table, fields=fields, warm=(False,) * len(table.rows))


def any_of(value: Any, test: Callable[[np.ndarray], Any]) -> bool:
    """Return whether any number of an array passes a test; False for shapes, tracers and arrays on other hosts."""
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        return any(np.any(test(np.asarray(shard.data))) for shard in value.addressable_shards)
    return isinstance(value, np.ndarray) and bool(np.any(test(value)))


def _placed(new: jax.Array, like: Any) -> jax.Array:
    sharding = getattr(like, "sharding", None)
    return jax.device_put(new, sharding) if isinstance(sharding, NamedSharding) else new


def _stack(rows: Sequence[Any]) -> Any:
    """Stack arrays, tracers or shapes along a new first axis."""
    if any(isinstance(row, Tracer) for row in rows):
        return jnp.stack(rows)
    shardings = [getattr(row, "sharding", None) for row in rows]
    sharding = shardings[0] if all(each == shardings[0] for each in shardings) else None
    if isinstance(shardings[0], NamedSharding):
        is_cut = sharding is not None and any(shardings[0].spec)
        sharding = shardings[0].update(spec=PartitionSpec(None, *shardings[0].spec) if is_cut else PartitionSpec())
    if isinstance(rows[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(rows), *rows[0].shape), rows[0].dtype, sharding=sharding)
    return jax.jit(_stacked, out_shardings=sharding if isinstance(sharding, NamedSharding) else None)(rows)


def _stacked(rows: Sequence[Any]) -> jax.Array:
    return jnp.stack(rows)
