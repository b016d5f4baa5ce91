"""Quant state in a training loop: split it from the parameters, and apply what a backward pass observed.

Quant state (amax histories, scales, sparsity masks) is tables (``state.table``). A Linen model has them in the
collection ``_overwrite_with_gradient``. It is no parameter: its "gradient" is what was observed of it, and whatever is
done to gradients (clipping, weight decay, a cast) must not touch it. The loop is

    params, quant_state = split(model.init(key, x))
    grads = jax.grad(lambda p, s: loss_fn(merge(p, s)), argnums=(0, 1))
    param_grads, observation = grads(params, quant_state)
    params, quant_state = optimizer_step(params, param_grads), update(quant_state, observation)

``observation`` may be a sum or a mean over uses of a layer, micro-batches or devices: ``update`` takes the maximum out
of it.
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
"""Collection of the quant state: flax's name, so that flax's ``TrainState`` keeps it out of the optimizer."""

Tree = Mapping[Any, Any]
_MARKS = (BINS, HISTORY, USES)
"""Fields that an optimizer makes negative."""
_READ: weakref.WeakValueDictionary[int, Tracer] = weakref.WeakValueDictionary()
"""Traced marks of quant state that a layer has read, by id: the arrays of the function that takes the gradient."""


def split(variables: Tree) -> tuple[Any, Any]:
    """Split a model's variables into parameters and quant state ({} where a recipe has none).

    Raises:
      ValueError: there is no "params" collection, or another one that this split would lose.
      TypeError: not variables.
    """
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"variables are {type(variables).__name__}, not the dict of collections that model.init returns"
        )
    if "params" not in variables:
        raise ValueError(
            f"variables have no collection 'params', only {sorted(variables)}; pass all that model.init returned, and "
            "not variables['params'], to jaxquant.state.split, TrainState and Optimizer"
        )
    others = sorted(set(variables) - {"params", OVERWRITE_WITH_GRADIENT})
    if others:
        raise ValueError(f"variables have collections {others} beside parameters and quant state; split them off first")
    return variables["params"], variables.get(OVERWRITE_WITH_GRADIENT, {})


def merge(params: Any, quant_state: Any) -> dict[str, Any]:
    """Merge parameters and quant state into a model's variables, for ``model.apply``.

    Args:
      params: the collection "params".
      quant_state: {} where a recipe has none.

    Raises:
      TypeError, ValueError: the arguments are swapped, or one of them is the whole variables.
    """
    _require_state(quant_state)
    leaves = jax.tree.leaves(quant_state, is_leaf=is_tables)
    names = list(params) if isinstance(params, Mapping) else type(params).__name__
    of_function = any(row.startswith("params/") for table in tables_of(quant_state) for row in table.rows)
    if tables_of(params) or not all(map(is_tables, leaves)) or (leaves and names == ["params"] and not of_function):
        has = list(quant_state) if isinstance(quant_state, Mapping) else type(quant_state).__name__
        raise ValueError(
            f"params has {names} and quant_state has {has}: they are swapped, or one of them is the whole variables; "
            "call merge(params, quant_state) with the two parts that jaxquant.state.split returns, and read nested "
            "state with jaxquant.state.from_flax"
        )
    return {"params": params} | ({OVERWRITE_WITH_GRADIENT: quant_state} if leaves else {})


def _marks_in(tree: Any) -> Iterator[tuple[Table, Any]]:
    """Yield each field of quant state that an optimizer would make negative."""
    for table in tables_of(tree):
        yield from ((table, table.fields[name]) for name in _MARKS if name in table.fields)


def refuse_optimized(params: Any) -> None:
    """Refuse quant state among the parameters that an optimizer updates.

    Raises:
      ValueError: names a tensor, and what keeps the state out of an optimizer.
    """
    for table in tables_of(params):
        raise ValueError(
            f"the optimizer updates quant state, as at {table.rows[0]!r}, which is not a parameter: the next loss "
            "would be NaN; give the optimizer parameters alone (jaxquant.state.split), or use "
            "jaxquant.state.TrainState or Optimizer"
        )


def _refuse_swapped(quant_state: Any, observation: Any) -> None:
    """Refuse the arguments of ``update`` in the wrong order, if one array of each shows it.

    In a trace, the state is an array that a layer has read. Otherwise only an observation has numbers in its bins.
    """
    nothing: tuple[Any, Any] = (None, None)
    (_, first), (table, second) = (next(_marks_in(tree), nothing) for tree in (quant_state, observation))
    if second is None:
        return
    is_known = isinstance(second, Tracer) or BINS not in table.fields
    is_state = _READ.get(id(second)) is second if is_known else any_of(first, np.any) and not any_of(second, np.any)
    if is_state:
        raise ValueError(
            "observation is the quant state of the step and quant_state is what the step observed; call "
            "jaxquant.state.update(quant_state, observation), where observation is the gradient"
        )


@functools.cache
def _watch_optax() -> None:
    """Replace ``optax.apply_updates``, once, by a function that refuses quant state among the parameters."""
    plain = optax.apply_updates

    @functools.wraps(plain)
    def apply_updates(params: Any, updates: Any) -> Any:
        refuse_optimized(params)
        return plain(params, updates)

    optax.apply_updates = apply_updates


def refuse_trained(quant_state: Any) -> None:
    """Refuse quant state that an optimizer has changed, where its values can be read; ``core.delayed`` has the rule.

    Its first call with quant state also replaces ``optax.apply_updates``, for the whole process: a jitted step runs
    Python once, while it is traced, and only that call of an optax loop has the names of what is updated. A name that
    was imported from optax earlier is not replaced (``docs/guide/delayed.md``).

    Raises:
      ValueError: names the tensor, and what keeps the state out of an optimizer.
    """
    for table, leaf in _marks_in(quant_state):
        _watch_optax()
        if isinstance(leaf, Tracer):
            outer: Any = leaf
            while isinstance(inner := getattr(outer, "primal", None), Tracer):  # what jax.grad was given
                outer = inner
            _READ[id(outer)] = outer
        elif any_of(leaf, lambda part: part < 0):
            rows = [name for n, name in enumerate(table.rows) if bool(jnp.any(jnp.take(leaf, n, table.axis) < 0))]
            raise ValueError(
                f"quant state {rows[0]!r} has negative numbers, which only an optimizer makes: it was trained "
                "as if it were a weight; begin with the quant state of a new model.init, and give the optimizer "
                "parameters alone (jaxquant.state.split), or use jaxquant.state.TrainState or Optimizer"
            )


def update(quant_state: Any, observation: Any) -> Any:
    """Return the quant state after a step.

    A tensor's history records the largest amax of all uses, rounded up by less than 12.5 %, for any positive weights
    (``core.delayed``). A tensor that was not used, or whose amax was not
    finite, keeps its state. State in flax mode is overwritten as flax does it, except that of a tensor that was not
    used.

    Args:
      quant_state: the state that the step used.
      observation: its "gradient", from one backward pass or summed or averaged with positive weights over several (all
        with this ``quant_state``).

    Raises:
      TypeError: one of them is not quant state.
      ValueError: the two differ, in tensors or shapes, or are swapped.
    """
    new = _in_pairs(quant_state, observation, _advance)
    _refuse_swapped(quant_state, observation)
    return new


def accumulate(total: Any, observation: Any) -> Any:
    """Combine what two backward passes observed of the same quant state, as micro-batches.

    Marks are added; in flax mode, whose "gradients" are new states, the larger of each counts. The order does not
    matter.

    Args:
      total: what was observed so far; ``no_observation(quant_state)`` is where to begin.
      observation: what the next backward pass observed.

    Raises:
      TypeError: one of them is not quant state.
      ValueError: the two differ, in tensors or shapes.
    """
    return _in_pairs(total, observation, _combine)


def no_observation(quant_state: Any) -> Any:
    """Make the observation of a step that used no tensor; ``update`` with it changes nothing."""
    return jax.tree.map(jnp.zeros_like, quant_state)


def hold_observation(quant_state: Any, observation: Any) -> Any:
    """Return quant state whose bins are those of an observation, so that it keeps this until it advances.

    Args:
      quant_state: the state that the step used.
      observation: its "gradient".

    Raises:
      NotImplementedError: state without bins, of flax mode or sparsity.
      ValueError: the two differ, in tensors or shapes.
    """
    return _in_pairs(quant_state, observation, _take_bins)


def with_waiting(observation: Any, quant_state: Any) -> Any:
    """Add to an observation what waits in the bins of a state (``hold_observation``); where none does, no bit changes.

    State without bins, of flax mode or sparsity, has nothing that waits.

    Args:
      observation: the "gradient" of the state.
      quant_state: the state.

    Raises:
      ValueError: the two differ, in tensors or shapes.
    """
    return _in_pairs(observation, quant_state, _add_waiting)


def warm(quant_state: Any) -> Any:
    """Return quant state in which each tensor that has a history is scaled by that history alone.

    A step that is traced with it lets no cast wait for its own amax, and computes the same bits. Which tensors have a
    history is read from the values, so call it between steps: once after the first, and again after what adds tensors
    without one (resuming, an expert that was never used, a layer unfrozen); a tensor without stays as it is, and the
    step compiles once more where that changes. Layers stacked by ``nn.scan`` are warm where all are. If a warm tensor
    is all zeros for the whole history, it keeps its last scale until the next call. What micro-batches observed stays.
    Arrays keep their shapes: a state of ``model.init`` is a template to restore it by.

    Args:
      quant_state: arrays, or their shapes, of a state in which every tensor has a history; of a Linen model, a function
        or an NNX model, or variables with quant state among them. State of flax mode is left alone.

    Raises:
      TypeError: called while tracing, as inside ``jax.jit`` or ``jax.lax.scan``, where values are not known; or not
        quant state.
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
            "state.warm reads which tensors have a history, and was called while tracing; call state.warm(quant_state) "
            "between two steps, outside of jax.jit and jax.lax.scan, and trace the step with what it returns"
        )
    if BINS not in table.fields or history is None:
        return table.warm
    if isinstance(history, jax.ShapeDtypeStruct):
        return (True,) * len(table.rows)
    found = delayed.has_history(table.fields)
    others = tuple(axis for axis in range(found.ndim) if axis != table.axis)
    return tuple(np.asarray(jnp.all(found, axis=others)).tolist())


def warmed_as(observation: Any, quant_state: Any) -> Any:
    """Convert an observation made before ``warm`` to the layout of the warm state."""
    return _in_pairs(quant_state, observation, lambda _, own: own)


def _require_state(tree: Any) -> None:
    if not isinstance(tree, Mapping | Tables):
        raise TypeError(
            f"quant state is {type(tree).__name__}; pass what init, jaxquant.state.split or a gradient with respect to "
            "it returned, or nnx.to_pure_dict of the QuantState of a model"
        )


def _named_tables(tree: Any) -> dict[str, Tables]:
    _require_state(tree)
    return dict(named_tables(tree))


def _in_pairs(first: Any, second: Any, combine: Callable[[Fields, Fields], Fields]) -> Any:
    """Combine the tables of two states of the same tensors.

    Args:
      first, second: the states; what is returned has the structure of the first.
      combine: of the fields of a table in each.
    """
    mine, theirs = (_named_tables(tree) for tree in (first, second))
    if (what := _difference(mine, theirs)) is not None:
        raise ValueError(
            f"quant state and its gradient differ at {what!r}; they must be of one state, so differentiate with "
            "respect to the whole of it"
        )

    def pair(one: Table, other: Table) -> Table:
        if one.rows != other.rows:
            raise ValueError(
                "quant state and what is combined with it have their rows in other tables; make both of one state"
            )
        return dataclasses.replace(one, fields=combine(one.fields, other.fields))

    pairs = {name: zip(own.tables, theirs[name].tables, strict=True) for name, own in mine.items()}
    new = [Tables(tuple(pair(*each) for each in own)) for own in pairs.values()]
    return jax.tree.unflatten(jax.tree.structure(first, is_leaf=is_tables), new)


def _difference(first: Mapping[str, Tables], second: Mapping[str, Tables]) -> str | None:
    """Return the first tensor that one state lacks or has in another shape, None where there is none."""
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
        # A scale of 0 is no scale: it is the gradient of a tensor that was not used.
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
    # Marks in bins are added, and what sparse weights observed, which is divided by its uses in the update. For scale
    # and history, take the maximum: only flax mode reads them.
    return {
        name: jnp.maximum(x, observation[name]) if name in (SCALE, HISTORY) else x + observation[name]
        for name, x in total.items()
    }


def _take_bins(fields: Fields, source: Fields) -> Fields:
    if BINS not in fields:
        raise NotImplementedError(
            "optax.MultiSteps on an NNX model with weight sparsity or amax_init 'flax': their state has no place for "
            "what micro-batches observed; add up the gradients of the micro-batches with jaxquant.state.accumulate"
        )
    return fields | {BINS: source[BINS]}


def _add_waiting(observation: Fields, state: Fields) -> Fields:
    return observation | ({BINS: observation[BINS] + state[BINS]} if BINS in observation else {})
