"""Quant state in a training loop: split it from the parameters, and update it from a step's observation.

Quant state (amax histories, scales, sparsity masks) is stored as tables (``state.table``). A Linen model has them in
the collection ``_overwrite_with_gradient``. Quant state is not a parameter: its "gradient" is the observation of a
step, so operations on gradients (clipping, weight decay, casts) must not change it. The loop is

    params, quant_state = split(model.init(key, x))
    grads = jax.grad(lambda p, s: loss_fn(merge(p, s)), argnums=(0, 1))
    param_grads, observation = grads(params, quant_state)
    params, quant_state = optimizer_step(params, param_grads), update(quant_state, observation)

``observation`` can be a sum or a mean over uses of a layer, micro-batches or devices: ``update`` recovers the maximum
from it.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxquant.core import delayed
from jaxquant.core.quant_state import BINS, HISTORY, MASK, SCALE, STEP, USES, Fields
from jaxquant.state.table import Table, Tables, any_of, is_tables, named_tables, tables_of

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Collection of the quant state, named as in flax, so that flax's ``TrainState`` keeps it out of the optimizer."""

Tree = Mapping[Any, Any]
_MARKS = (BINS, HISTORY, USES)
"""Fields that become negative if an optimizer updates them."""
_READ: weakref.WeakValueDictionary[int, Tracer] = weakref.WeakValueDictionary()
"""Traced fields of ``_MARKS`` that a layer has read, by id: the inputs of the function that is differentiated."""


def split(variables: Tree) -> tuple[Any, Any]:
    """Split a model's variables into parameters and quant state ({} if the recipe has none).

    Raises:
      ValueError: there is no "params" collection, or there is a further collection that the split would lose.
      TypeError: the argument is not a mapping.
    """
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"variables must be the dict of collections that model.init returns, got {type(variables).__name__}"
        )
    if "params" not in variables:
        raise ValueError(
            f"variables have no collection 'params', only {sorted(variables)}; pass everything that model.init "
            "returned, not only variables['params'], to jaxquant.state.split, TrainState and Optimizer"
        )
    others = sorted(set(variables) - {"params", OVERWRITE_WITH_GRADIENT})
    if others:
        raise ValueError(f"variables have the collections {others}; pass only the parameters and quant state")
    return variables["params"], variables.get(OVERWRITE_WITH_GRADIENT, {})


def merge(params: Any, quant_state: Any) -> dict[str, Any]:
    """Merge parameters and quant state into a model's variables, for ``model.apply``.

    Args:
      params: collection "params".
      quant_state: quant state, or {} if the recipe has none.

    Raises:
      TypeError, ValueError: the arguments are swapped, or one of them is the complete variables.
    """
    _require_state(quant_state)
    leaves = jax.tree.leaves(quant_state, is_leaf=is_tables)
    names = list(params) if isinstance(params, Mapping) else type(params).__name__
    of_function = any(row.startswith("params/") for table in tables_of(quant_state) for row in table.rows)
    if tables_of(params) or not all(map(is_tables, leaves)) or (leaves and names == ["params"] and not of_function):
        has = list(quant_state) if isinstance(quant_state, Mapping) else type(quant_state).__name__
        raise ValueError(
            f"merge(params, quant_state) needs the two parts that jaxquant.state.split returns, got params {names} and "
            f"quant_state {has}; convert quant state of flax with jaxquant.state.from_flax"
        )
    return {"params": params} | ({OVERWRITE_WITH_GRADIENT: quant_state} if leaves else {})


def _marks_in(tree: Any) -> Iterator[tuple[Table, Any]]:
    """Yield each field that becomes negative if an optimizer updates it, with its table."""
    for table in tables_of(tree):
        yield from ((table, table.fields[name]) for name in _MARKS if name in table.fields)


def refuse_optimized(params: Any) -> None:
    """Raise if quant state is among the parameters that an optimizer updates.

    Raises:
      ValueError: quant state is found; names a tensor and the remedy.
    """
    for table in tables_of(params):
        raise ValueError(
            f"the optimizer updates quant state, such as {table.rows[0]!r}, which is not a parameter: the next loss "
            "would be NaN; pass only jaxquant.state.split(variables)[0] to the optimizer, or use "
            "jaxquant.state.TrainState or Optimizer"
        )


def _refuse_swapped(quant_state: Any, observation: Any) -> None:
    """Raise if the arguments of ``update`` are swapped, as far as one array of each shows it.

    While tracing, the state is an array that a layer has read. Otherwise only an observation has nonzero bins.
    """
    nothing: tuple[Any, Any] = (None, None)
    (_, first), (table, second) = (next(_marks_in(tree), nothing) for tree in (quant_state, observation))
    if second is None:
        return
    is_known = isinstance(second, Tracer) or BINS not in table.fields
    is_state = _READ.get(id(second)) is second if is_known else any_of(first, np.any) and not any_of(second, np.any)
    if is_state:
        raise ValueError(
            "quant_state and observation are swapped; call jaxquant.state.update(quant_state, observation), where "
            "observation is the gradient"
        )


@functools.cache
def _watch_optax() -> None:
    """Replace ``optax.apply_updates``, once, by a function that raises for quant state among the parameters."""
    plain = optax.apply_updates

    @functools.wraps(plain)
    def apply_updates(params: Any, updates: Any) -> Any:
        refuse_optimized(params)
        return plain(params, updates)

    optax.apply_updates = apply_updates


def refuse_trained(quant_state: Any) -> None:
    """Raise if an optimizer has changed quant state, as far as its values can be read; see ``core.delayed``.

    The first call with quant state also replaces ``optax.apply_updates`` in the complete process: a jitted step runs
    Python only while it is traced, and in an optax loop only that function gets the names of the updated arrays. A name
    that was imported from optax earlier is not replaced (``docs/guide/loops.md``).

    Raises:
      ValueError: the state was changed; names the tensor and the remedy.
    """
    for table, leaf in _marks_in(quant_state):
        _watch_optax()
        if isinstance(leaf, Tracer):
            outer: Any = leaf
            while isinstance(inner := getattr(outer, "primal", None), Tracer):  # the input of jax.grad
                outer = inner
            _READ[id(outer)] = outer
        elif any_of(leaf, lambda part: part < 0):
            rows = [name for n, name in enumerate(table.rows) if bool(jnp.any(jnp.take(leaf, n, table.axis) < 0))]
            raise ValueError(
                f"quant state {rows[0]!r} has negative numbers, because an optimizer updated quant state; get new "
                "quant state from model.init, and pass only jaxquant.state.split(variables)[0] to the optimizer, or "
                "use jaxquant.state.TrainState or Optimizer"
            )


def update(quant_state: Any, observation: Any) -> Any:
    """Return the quant state after a step.

    The history of a tensor records the largest amax of all uses, rounded up by less than 12.5 %, for any positive
    weights (``core.delayed``). A tensor that was not used, or whose amax was not finite, keeps its state. State with
    ``amax_init: flax`` is overwritten as in flax, except for tensors that were not used.

    Args:
      quant_state: state that the step used.
      observation: "gradient" of that state, from one backward pass, or summed or averaged with positive weights over
        several (all with this ``quant_state``).

    Raises:
      TypeError: one of them is not quant state.
      ValueError: the two differ in tensors or shapes, or are swapped.
    """
    new = _in_pairs(quant_state, observation, _advance)
    _refuse_swapped(quant_state, observation)
    return new


def accumulate(total: Any, observation: Any) -> Any:
    """Combine the observations of two backward passes with the same quant state, such as micro-batches.

    Bins are added. With ``amax_init: flax``, whose "gradients" are new states, the elementwise maximum is taken. The
    order does not matter.

    Args:
      total: observation so far; start with ``no_observation(quant_state)``.
      observation: observation of the next backward pass.

    Raises:
      TypeError: one of them is not quant state.
      ValueError: the two differ in tensors or shapes.
    """
    return _in_pairs(total, observation, _combine)


def no_observation(quant_state: Any) -> Any:
    """Return the observation of a step that used no tensor; ``update`` with it changes nothing."""
    return jax.tree.map(jnp.zeros_like, quant_state)


def store_observation(quant_state: Any, observation: Any) -> Any:
    """Return quant state that stores an observation in its bins until the next update.

    Args:
      quant_state: state that the step used.
      observation: "gradient" of that state.

    Raises:
      NotImplementedError: the state has no bins (``amax_init: flax`` or sparsity).
      ValueError: the two differ in tensors or shapes.
    """
    return _in_pairs(quant_state, observation, _store_bins)


def add_stored_observation(observation: Any, quant_state: Any) -> Any:
    """Add to an observation the bins that ``store_observation`` stored in a state; empty bins change nothing.

    State without bins (``amax_init: flax`` or sparsity) stores no observation.

    Args:
      observation: "gradient" of the state.
      quant_state: quant state.

    Raises:
      ValueError: the two differ in tensors or shapes.
    """
    return _in_pairs(observation, quant_state, _add_stored)


def warm(quant_state: Any) -> Any:
    """Mark the tensors that have a history, so that only the history scales them. Returns quant state.

    In a step that is traced with the result, no cast waits for its own amax; the computed bits are the same. The
    histories are read as values, so call it between steps: once after the first step, and again after a change that
    adds tensors without a history (resuming, an expert that was never used, an unfrozen layer). Tensors without a
    history are not marked. If the marks change, the step compiles again. Layers stacked by ``nn.scan`` are marked if
    all of them have a history. A marked tensor that is all zeros for the complete history keeps its last scale until
    the next call. Observations of micro-batches are kept. Arrays keep their shapes, so a state of ``model.init`` is a
    template for restoring it.

    Args:
      quant_state: arrays, or the shapes of a state in which every tensor has a history; from a Linen model, a function
        or an NNX model, or variables that contain quant state. State with ``amax_init: flax`` is not changed.

    Raises:
      TypeError: the function is called while tracing, as inside ``jax.jit`` or ``jax.lax.scan``, where values are not
        known; or the argument is not quant state.
    """
    _require_state(quant_state)

    def mark(state: Any) -> Any:
        return (
            state
            if not is_tables(state)
            else Tables(tuple(dataclasses.replace(table, warm=_with_history(table)) for table in state.tables))
        )

    return jax.tree.map(mark, quant_state, is_leaf=is_tables)


def _with_history(table: Table) -> tuple[bool, ...]:
    history = table.fields.get(HISTORY)
    if isinstance(history, Tracer):
        raise TypeError(
            "jaxquant.state.warm reads values and cannot run in jax.jit or jax.lax.scan; call "
            "jaxquant.state.warm(quant_state) between two steps, and pass the result to the step"
        )
    if BINS not in table.fields or history is None:
        return table.warm
    if isinstance(history, jax.ShapeDtypeStruct):
        return (True,) * len(table.rows)
    has_history = delayed.has_history(table.fields)
    others = tuple(axis for axis in range(has_history.ndim) if axis != table.axis)
    return tuple(np.asarray(jnp.all(has_history, axis=others)).tolist())


def match_warm_layout(observation: Any, quant_state: Any) -> Any:
    """Convert an observation from before ``warm`` to the layout of the warm state."""
    return _in_pairs(quant_state, observation, lambda _, own: own)


def _require_state(tree: Any) -> None:
    if not isinstance(tree, Mapping | Tables):
        raise TypeError(
            f"quant state must come from init, jaxquant.state.split or a gradient, got {type(tree).__name__}; for an "
            "NNX model, pass nnx.to_pure_dict(nnx.state(model, jaxquant.state.QuantState))"
        )


def _named_tables(tree: Any) -> dict[str, Tables]:
    _require_state(tree)
    return dict(named_tables(tree))


def _in_pairs(first: Any, second: Any, combine: Callable[[Fields, Fields], Fields]) -> Any:
    """Combine the tables of two states of the same tensors.

    Args:
      first, second: states; the result has the structure of the first.
      combine: function of the fields of a table in each state.
    """
    first_tables, second_tables = (_named_tables(tree) for tree in (first, second))
    if (tensor := _difference(first_tables, second_tables)) is not None:
        raise ValueError(
            f"quant state and gradient have different structures at {tensor!r}; differentiate with respect to the "
            "complete quant state, or pass the same part of quant state and gradient"
        )

    def pair(one: Table, other: Table) -> Table:
        if one.rows != other.rows:
            raise ValueError(
                "quant state and gradient have different layers; take the gradient with respect to this quant state"
            )
        return dataclasses.replace(one, fields=combine(one.fields, other.fields))

    pairs = {name: zip(own.tables, second_tables[name].tables, strict=True) for name, own in first_tables.items()}
    new = [Tables(tuple(pair(*each) for each in own)) for own in pairs.values()]
    return jax.tree.unflatten(jax.tree.structure(first, is_leaf=is_tables), new)


def _difference(first: Mapping[str, Tables], second: Mapping[str, Tables]) -> str | None:
    """Return the first tensor that is missing in one state or has another shape there, or None."""
    shapes: list[dict[str, Any]] = []
    for each in (first, second):
        tables = [(name, table) for name, state in each.items() for table in state.tables]
        kinds = [(name, table, _row_shapes(table)) for name, table in tables]
        shapes.append({f"{name}{row}": kind for name, table, kind in kinds for row in table.rows})
    names = [*shapes[0], *(name for name in shapes[1] if name not in shapes[0])]
    return next((name for name in names if shapes[0].get(name) != shapes[1].get(name)), None)


def _row_shapes(table: Table) -> dict[str, tuple[int, ...]]:
    axis = table.axis
    return {field: (*jnp.shape(x)[:axis], *jnp.shape(x)[axis + 1 :]) for field, x in table.fields.items()}


def _advance(old: Fields, observation: Fields) -> Fields:
    if BINS in old:
        return delayed.advance(old, observation)
    if HISTORY in old:
        # A scale of 0 is the gradient of a tensor that was not used.
        used = observation[SCALE] != 0
        return {name: jnp.where(used, observation[name], value) for name, value in old.items()}
    uses = observation[USES]
    used, new = uses > 0, {USES: jnp.zeros_like(uses)}
    for name in (STEP, MASK):
        shape = uses.shape + (1,) * (old[name].ndim - uses.ndim)
        mean = observation[name] / jnp.where(used, uses, 1.0).reshape(shape).astype(observation[name].dtype)
        new[name] = jnp.where(used.reshape(shape), jnp.round(mean), old[name])
    return {name: new[name] for name in old}


def _combine(total: Fields, observation: Fields) -> Fields:
    # Bins are added. So are observations of sparse weights; the update divides them by the number of uses. Scale and
    # history take the maximum, because only ``amax_init: flax`` reads them.
    return {
        name: jnp.maximum(x, observation[name]) if name in (SCALE, HISTORY) else x + observation[name]
        for name, x in total.items()
    }


def _store_bins(fields: Fields, source: Fields) -> Fields:
    if BINS not in fields:
        raise NotImplementedError(
            "optax.MultiSteps on an NNX model does not support weight sparsity or amax_init 'flax'; remove "
            "optax.MultiSteps and sum the gradients with jaxquant.state.accumulate"
        )
    return fields | {BINS: source[BINS]}


def _add_stored(observation: Fields, state: Fields) -> Fields:
    return observation | ({BINS: observation[BINS] + state[BINS]} if BINS in observation else {})
