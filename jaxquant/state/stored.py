"""Quant state between two steps: stored without its bins, restored (flax's too), and told what has a history."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxquant.core import delayed
from jaxquant.core.quant_state import BINS, HISTORY, delayed_tensors, fields_of, flat, is_named
from jaxquant.state.packed import PackedState, State, Tree, pack, unpack
from jaxquant.state.tree import any_of, refuse_trained


def strip_bins(quant_state: State) -> dict[Any, Any]:
    """Return quant state as it is to be stored: without ``amax_bins``, which are zeros between two steps.

    What is left has the layout of flax's fp8 ops and loses no bit; ``with_bins`` restores the rest. Takes arrays or
    their shapes, of Linen's collection or, as ``nnx.to_pure_dict``, of NNX's ``QuantState``; packed state comes back
    nested.

    Raises:
      ValueError: bins hold what micro-batches observed, as of an NNX model amid ``optax.MultiSteps``, or an optimizer
        has changed the state. (Under ``jax.jit`` nothing can check that.)
    """
    refuse_trained(quant_state)
    new: dict[Any, Any] = {}
    for name, value in unpack(quant_state).items():
        if isinstance(value, Mapping):
            new[name] = strip_bins(value)
        elif not is_named(name, BINS):
            new[name] = value
        elif any_of(value, lambda part: part != 0):
            raise ValueError(
                f"quant state {name!r} holds what micro-batches observed since the optimizer's last step, which "
                "strip_bins would lose; store it after that step, or store the whole state"
            )
    return new


def with_bins(quant_state: State, like: State | None = None) -> Any:
    """Return quant state that was stored without ``amax_bins``, or by flax's fp8 ops, with empty ones.

    Bins that are there are kept. All comes back in float32. ``amax_init: flax`` needs no bins: it takes flax's state as
    it is. Leading axes, as of layers under ``nn.scan``, are kept.

    Args:
      quant_state: arrays or their shapes.
      like: a model's quant state, or its shapes. Bins are made where it has some, and lie where its own do. Where it
        is packed (or, without it, the state), so is what is returned. Keys that are text, as orbax restores integers
        without a template, become the model's integers, and ``dot_general`` and ``einsum_op``, as NNX models named
        state before, become ``quant_kernel``.

    Raises:
      ValueError: ``like`` lacks a module or variable of the state.
    """
    new = _with_bins(unpack(quant_state), None if like is None else unpack(like))
    return pack(new) if isinstance(quant_state if like is None else like, PackedState) else new


def _with_bins(quant_state: Tree, like: Tree | None) -> dict[Any, Any]:
    if like is not None:  # orbax restores the integers of nnx.List as text
        own = {str(name): name for name in like}
        # Also the names under which NNX models held quant state before.
        own |= dict.fromkeys(("dot_general", "einsum_op"), "quant_kernel") if "quant_kernel" in like else {}
        quant_state = {name if name in like else own.get(name, name): value for name, value in quant_state.items()}
    if like is not None and (unknown := [name for name in quant_state if name not in like]):
        raise ValueError(
            f"quant state has {unknown[0]!r} and the model's has {', '.join(map(str, like)) or 'nothing'}; restore it "
            "into the model that it belongs to"
        )
    new: dict[Any, Any] = {
        name: _with_bins(value, None if like is None else like[name]) if isinstance(value, Mapping) else value
        for name, value in quant_state.items()
    }
    for tensor in delayed_tensors(quant_state):
        own = None if like is None else fields_of(like, tensor)
        if own is not None and BINS not in own:
            continue
        fields = {field: _in_float32(value) for field, value in fields_of(new, tensor).items()}
        if BINS not in fields:
            fields[BINS] = _made(lambda x: delayed.empty_bins(x.shape[:-1]), fields[HISTORY], own and own[BINS])
        new |= flat({tensor: fields})
    return new


from_flax = with_bins
"""Alias of ``with_bins``."""


def _in_float32(value: Any) -> Any:
    if value.dtype == jnp.float32:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, jnp.float32, sharding=value.sharding)
    return value.astype(jnp.float32)


def _made(make: Callable[[Any], Any], source: Any, like: Any) -> Any:
    """Make an array of another one, or a shape of a shape, placed as ``like`` is, where that is known."""
    sharding = getattr(like, "sharding", None)
    if isinstance(source, jax.ShapeDtypeStruct):
        made = jax.eval_shape(make, source)
        return jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=sharding)
    if not isinstance(sharding, jax.sharding.NamedSharding) or isinstance(source, Tracer):
        return make(source)
    return jax.jit(make, out_shardings=sharding)(source)


def warmed_as(observation: Tree, quant_state: Tree) -> Any:
    """Return an observation of quant state before ``warm`` as one of what it has become; any other as it is."""
    if jax.tree.structure(observation) != jax.tree.structure(quant_state):
        return observation

    def fit(path: Any, own: Any, now: Any) -> Any:
        turned = is_named(path[-1].key, BINS) and own.shape[:-1] == now.shape[:-1] and own.shape != now.shape
        return delayed.fit_bins(own, delayed.is_warm({BINS: now})) if turned else own

    return jax.tree_util.tree_map_with_path(fit, observation, quant_state)


def warm(quant_state: State) -> Any:
    """Return quant state in which each tensor that has a history is scaled by that history alone.

    A step that is traced with it lets no cast wait for its own amax, and computes the same bits. Which tensors have a
    history is read from the values, so call it between steps: once after the first, and again after what adds tensors
    without one (resuming, an expert that was never used, a layer unfrozen); a tensor without stays as it is, and the
    step compiles once more where that changes. Layers stacked by ``nn.scan`` are warm where all are. A warm tensor that
    is all zeros for as long as its history is keeps its last scale until the next call. What micro-batches observed
    stays.

    Args:
      quant_state: arrays, of Linen's collection or, as ``nnx.to_pure_dict``, of NNX's ``QuantState``; or their shapes,
        of a state in which every tensor has a history; packed or not. State of flax mode is left alone.

    Raises:
      TypeError: called while tracing, as inside ``jax.jit`` or ``jax.lax.scan``, where values are not known.
    """
    leaves = jax.tree.leaves_with_path(quant_state)
    histories = [leaf for path, leaf in leaves if path and is_named(getattr(path[-1], "key", None), HISTORY)]
    if any(isinstance(leaf, Tracer) for leaf in histories):
        raise TypeError(
            "state.warm reads which tensors have a history, and was called while tracing; call state.warm(quant_state) "
            "between two steps, outside of jax.jit and jax.lax.scan, and trace the step with what it returns"
        )
    new = _warmed(unpack(quant_state))
    return pack(new) if isinstance(quant_state, PackedState) else new


def _warmed(quant_state: Tree) -> dict[Any, Any]:
    new = {name: _warmed(value) if isinstance(value, Mapping) else value for name, value in quant_state.items()}
    for tensor in delayed_tensors(quant_state):
        fields = fields_of(quant_state, tensor)
        if BINS in fields:
            is_shape = isinstance(fields[BINS], jax.ShapeDtypeStruct)
            has_history = is_shape or bool(delayed.has_history(fields).all())
            if has_history != delayed.is_warm(fields):
                fit = functools.partial(delayed.fit_bins, is_warm=has_history)
                new |= flat({tensor: {BINS: _made(fit, fields[BINS], fields[BINS])}})
    return new
