"""Running an optimizer on 8-bit moments: all parameters at once or one at a time with XLA, or with a kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxquant.core.rounding import prevent_excess_precision
from jaxquant.core.sharding import merge_axes, platform_of, split_axes, varying_axes
from jaxquant.kernels.optimizer_update import api
from jaxquant.kernels.optimizer_update.reference import Result
from jaxquant.ops.implementation import REFUSED, Choice, record_choice
from jaxquant.optim.codes import Codec, Coded
from jaxquant.optim.parts import Part, Update

Shardings = Callable[[str, Any], NamedSharding | None]
OP_NAME = "optimizer update"
_MAX_MOMENTUM = 2.0**54
"""Bound of momenta. Above it, squares of gradients overflow float32 ((1 - b1) · 2^64, with b1 at most 0.999)."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """A moment in 8 bits.

    Attributes:
      path: path of the moment.
      codec, signed: codec, and whether the moment is signed.
      coded: codes and the statistics of each group.
    """

    path: str
    codec: Codec
    signed: bool
    coded: Coded

    @property
    def axis(self) -> int:
        """Axis of the groups, counted from the end."""
        return axis_of(self.coded.codes, self.coded.largest)

    @property
    def group(self) -> int:
        """Number of elements in a group."""
        return self.coded.codes.shape[self.axis] // self.coded.largest.shape[self.axis]


def axis_of(codes: Any, largest: Any) -> int:
    """Return the axis of a moment's groups, counted from the end: the axis with more codes than groups.

    Args:
      codes, largest: arrays of the moment, as in ``Coded``.
    """
    return next(i for i in range(-codes.ndim, 0) if codes.shape[i] != largest.shape[i])


def run(
    function: Callable[..., Any],
    args: Any,
    implementation: str | None,
    shardings: Shardings | None,
    applies: bool,
    changes: jax.Array | None = None,
) -> Any:
    """Run a function of trees on moments decoded to float32; return its result with moments encoded as ``Coded``.

    Args:
      function: function (updates, state, parameters) -> (updates or parameters, state).
      args: arguments of the function, with moments in the state.
      implementation: "xla", "pallas" or None, as for ``quantize_state``.
      shardings: function that returns the sharding of a parameter, or None; see ``quantize_state``.
      applies: whether the function returns parameters instead of updates.
      changes: flag, or None. If the flag is False, the old state is returned, with the old parameters if the function
        returns parameters.
    """
    leaves, tree = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, Moment))
    start, end = len(jax.tree.leaves(args[0])), len(leaves) - len(jax.tree.leaves(args[2]))
    floats = [_decode_moment(x) if isinstance(x, Moment) else x for x in leaves]
    structure: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        made, out_tree = jax.tree.flatten(function(*tree.unflatten(arrays)))
        structure[:] = [out_tree]
        return made

    coded = [x for x in leaves if isinstance(x, Moment)]
    chosen: set[int] = set()  # outputs for which the kernel already applies ``changes``
    platform = platform_of(coded[0].coded.codes) if coded else ""
    kernel = implementation == "pallas" or (implementation is None and platform == "tpu")
    if coded and (kernel or platform == "gpu"):
        shapes = {x.coded.codes.shape for x in coded}
        update = Update(flat, floats, {i for i, x in enumerate(floats) if jnp.shape(x) in shapes and _is_float(x)})
        taken = [part for part in update.parts if _runs_separately(part, leaves, kernel, implementation, shardings)]
        out, scalars = update.run_rest(floats, taken)
        last: dict[Any, dict[int, Any]] = {}
        for part, numbers in zip(taken, scalars, strict=True):
            before = len(out) - end  # offset from the index of a state's input to the index of its output
            states = {i + before: i for i in range(start, end)}
            if kernel:
                order = sorted(part.inputs, reverse=applies)  # inputs: gradients, state, weights
                made = _run_kernel(update, part, numbers, leaves, states, order, shardings, changes)
                chosen |= set(made)
            else:
                made = _run_sequentially(update, part, numbers, leaves, states, last)
            out = [made.get(o, x) for o, x in enumerate(out)]
    else:
        out = flat(*floats)
    before = len(out) - end
    for i in range(start, end):
        if isinstance(x := leaves[i], Moment) and not isinstance(out[before + i], Coded):
            out[before + i] = encode(x.codec, x.signed, x.axis, x.coded.largest.shape[x.axis], out[before + i])
    if changes is not None:
        first = 0 if applies else before + start  # updates replace no old array
        for o, old in enumerate([*(leaves[end:] if applies else ()), *leaves[start:end]], first):
            if o not in chosen:
                kept = old.coded if isinstance(old, Moment) else old
                out[o] = jax.tree.map(lambda new, old: jnp.where(changes, new, old), out[o], kept)
    return structure[0].unflatten(out)


def _runs_separately(
    part: Part, leaves: Sequence[Any], kernel: bool, implementation: str | None, shardings: Shardings | None
) -> bool:
    """Return whether to compute a part separately, and record the choice."""
    coded = [leaves[i] for i in part.inputs if isinstance(leaves[i], Moment)]
    if not coded:
        return False
    if not kernel:
        if part.refusal:
            record_choice(OP_NAME, Choice("xla", f"{coded[0].path}: not updated separately, because {part.refusal}"))
        return part.refusal is None
    arrays = [x.coded.codes if isinstance(x, Moment) else x for x in (leaves[i] for i in part.inputs)]
    why = part.refusal
    if why is None and len({x.axis for x in coded}) > 1:
        why = "the moments of the parameter have groups along different axes"
    if why is None:
        why = api.refusal(arrays, coded[0].axis, [x.group for x in coded], _sharding_of(coded[0], shardings))
    reason = "requested" if implementation else "XLA for TPUs would hold many float32 moments at once"
    refused = f"{REFUSED if implementation else ''}{coded[0].path}: {why}"
    record_choice(OP_NAME, Choice("pallas", reason) if why is None else Choice("xla", refused))
    return why is None


def _sharding_of(moment: Moment, shardings: Shardings | None) -> NamedSharding | None:
    return None if shardings is None else shardings(moment.path, moment.coded.codes)


def _run_kernel(
    update: Update,
    part: Part,
    scalars: Sequence[jax.Array],
    leaves: Sequence[Any],
    states: Mapping[int, int],
    order: Sequence[int],
    shardings: Shardings | None,
    changes: jax.Array | None,
) -> dict[int, Any]:
    """Compute a part with the kernel.

    Args:
      update, part: the update and its part.
      scalars: scalars of the part.
      leaves: inputs of the complete update, with coded moments.
      states: mapping from the index of an output that is state to the index of the input that it replaces.
      order: indices of inputs; outputs that are not state reuse the memory of these inputs in this order.
      shardings, changes: arguments of ``run``.

    Returns:
      Outputs by index: a ``Coded`` for a moment, an array otherwise.
    """
    coded_inputs = {
        i: leaves[i].coded if isinstance(leaves[i], Moment) else Coded(leaves[i], None) for i in part.inputs
    }
    moments = {i: leaves[i] for i in part.inputs if isinstance(leaves[i], Moment)}
    first = next(iter(moments.values()))
    arrays, place, results = [], {}, []
    for i, x in coded_inputs.items():
        place[i] = len(arrays)
        arrays += _arrays_of(x)
    free = [i for i in order if i not in moments and i not in states.values()]
    for o in part.outputs:
        dtype, i = update.dtype(o), states.get(o)
        if i is None:
            i = next((i for i in free if leaves[i].dtype == dtype), None)
            free = [each for each in free if each != i]
        if i in moments:
            parts = _arrays_of(coded_inputs[i])
            results += [Result(x.dtype.name, moments[i].group if n else 1, place[i] + n) for n, x in enumerate(parts)]
        else:
            results.append(Result(dtype.name, 1, None if i is None else place.get(i)))

    def body(scalars: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        rest, floats = iter(arrays), []
        for i, x in coded_inputs.items():
            parts = Coded(*(next(rest) for _ in _arrays_of(x)), *[None] * (x.largest is None))
            floats.append(_decode_moment(dataclasses.replace(moments[i], coded=parts)) if i in moments else parts.codes)
        made = []
        for o, x in zip(part.outputs, update.run_part(part, scalars, floats), strict=True):
            m = moments.get(states.get(o, -1))
            made += [x] if m is None else _arrays_of(_encode(m.codec, m.signed, m.axis, x.shape[m.axis] // m.group, x))
        return made

    step = math.lcm(*(x.group for x in moments.values()))
    sharding = _sharding_of(first, shardings)
    where = {"axis": first.axis, "step": step, "sharding": sharding}
    made = iter(api.update(body, scalars, arrays, results, changes=changes, **where))

    def output(o: int) -> Any:
        i = states.get(o, -1)
        return Coded(*(next(made) for _ in _arrays_of(coded_inputs[i]))) if i in moments else next(made)

    return {o: output(o) for o in part.outputs}


def _run_sequentially(
    update: Update,
    part: Part,
    scalars: Sequence[jax.Array],
    leaves: Sequence[Any],
    states: Mapping[int, int],
    last: dict[Any, dict[int, Any]],
) -> dict[int, Any]:
    """Compute a part with XLA after the previous part is done.

    XLA:GPU would compute many parts at once and hold the float32 moments of all of them. A barrier prevents that: the
    scales that decode a part pass through a barrier together with the codes of the previous part. A barrier keeps its
    inputs in memory, so no float32 array of a parameter's size passes through the barrier.

    Args:
      update, part, scalars, leaves, states: arguments of ``_run_kernel``.
      last: codes of the previous part, by output index; updated in place. There is one entry for each set of axes over
        which arrays vary inside ``jax.shard_map``, because a barrier's outputs vary over the axes of all its inputs.

    Returns:
      Outputs by index: a ``Coded`` for a moment, an array otherwise.
    """
    moments = {i: leaves[i] for i in part.inputs if isinstance(leaves[i], Moment)}
    varying = varying_axes(next(iter(moments.values())).coded.codes)
    largest, previous = jax.lax.optimization_barrier(
        ({i: m.coded.largest for i, m in moments.items()}, last.get(varying, {}))
    )
    for i, m in moments.items():
        moments[i] = dataclasses.replace(m, coded=m.coded._replace(largest=largest[i]))
    inputs = [_decode_moment(moments[i]) if i in moments else leaves[i] for i in part.inputs]
    made: dict[int, Any] = dict(zip(part.outputs, update.run_part(part, scalars, inputs), strict=True))
    codes = {}
    for o in made:
        if (m := moments.get(states.get(o, -1))) is not None:
            codes[o] = encode(m.codec, m.signed, m.axis, m.coded.largest.shape[m.axis], made[o])
    last[varying] = codes
    return previous | made | codes


def _arrays_of(coded: Coded) -> list[jax.Array]:
    return [x for x in coded if x is not None]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _encode(codec: Codec, signed: bool, axis: int, groups: int, x: jax.Array) -> Coded:
    x = jnp.where(jnp.abs(x) < (_MAX_MOMENTUM if signed else jnp.inf), x, 0).astype(jnp.float32)
    coded = codec.encode(split_axes(x, {x.ndim + axis: groups}), signed, x.ndim + axis + 1)
    return coded._replace(codes=merge_axes(coded.codes, x))


# Jitted, because outside of a jit an optimizer's init would otherwise compile each operation separately.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def encode(codec: Codec, signed: bool, axis: int, groups: int, x: jax.Array) -> Coded:
    """Encode a moment; elements that are not finite or too large are encoded as 0.

    Args:
      codec, signed: codec, and whether the moment is signed.
      axis: axis of the groups, counted from the end.
      groups: number of groups along the axis.
      x: moment.
    """
    coded = _encode(codec, signed, axis, groups, x)
    if coded.exponent is None:
        return coded
    return coded._replace(codes=prevent_excess_precision(coded.codes), exponent=coded.exponent.astype(jnp.uint8))


def _decode_moment(moment: Moment) -> jax.Array:
    return _decode(moment.codec, moment.signed, moment.axis, moment.coded)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _decode(codec: Codec, signed: bool, axis: int, coded: Coded) -> jax.Array:
    place = coded.codes.ndim + axis
    codes = split_axes(coded.codes, {place: coded.largest.shape[place]})
    return merge_axes(codec.decode(coded._replace(codes=codes), signed, place + 1), coded.codes)
