"""Optimizer state in 8 bits: the moments of an optax transformation are decoded, updated and encoded in every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool
from optax import contrib

from jaxquant.core.paths import array_bytes, join_path, leaves_by_path, map_by_path
from jaxquant.core.sharding import platform_of
from jaxquant.core.typed import nearest
from jaxquant.kernels.optimizer_update.tuning import LANES, MOST
from jaxquant.optim.codes import SCHEMES, Codec, Coded
from jaxquant.optim.run import Moment, Shardings, axis_of, encode, run
from jaxquant.optim.weights import CompensatedState, RoundState

Moments = Mapping[type, Mapping[str, bool]]
Shards = int | Callable[[str, int], int]
Transformation = optax.GradientTransformation | optax.MultiSteps

MOMENTS: Moments = MappingProxyType(
    {
        optax.ScaleByAdamState: {"mu": True, "nu": False},
        optax.ScaleByAmsgradState: {"mu": True, "nu": False, "nu_max": False},
        optax.ScaleByLionState: {"mu": True},
        optax.ScaleByRmsState: {"nu": False},
        optax.TraceState: {"trace": True},
        optax.EmaState: {"ema": True},
        optax.FactoredState: {"v": False},
        contrib.MuonState: {"mu": True},
    }
)
"""Class of an optimizer's state -> its moments, and whether they have signs."""

_FEWEST = 4096  # elements of a moment in 8 bits
_LEAST_GROUP = 16  # its largest magnitude costs a quarter of a byte an element


class QuantizedState(NamedTuple):
    """State of ``quantize_state``. A checkpoint has the codes themselves, so that loading encodes nothing anew.

    Attributes:
      inner: the state of the optimizer, with codes in the place of moments. Rules that place a moment by its shape or
        by the end of its path place the codes alike.
      largest: for each moment, by its path in ``inner``, a tree of the largest magnitude of every group, None where the
        moment is float32. An array of them has the rank of its parameter.
      exponent: the same for the exponents of ``fp8_coat``.
    """

    inner: Any
    largest: dict[str, Any]
    exponent: dict[str, Any]


class NewWeights(NamedTuple):
    """What the ``update`` of ``quantize_state(…, apply=True)`` returns, for ``apply_updates``.

    Attributes:
      weights: the new weights.
      guard: a random key, with which no transformation of updates computes: an error in place of wrong weights.
    """

    weights: Any
    guard: Any


def quantize_state(
    tx: optax.GradientTransformation,
    scheme: str,
    *,
    float32: Iterable[str] = (),
    shards: Shards = 1,
    moments: Moments = MOMENTS,
    axis: int | Literal["rows"] | None = None,
    apply: bool = False,
    implementation: str | None = None,
    shardings: Shardings | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that keeps the moments of another one in 8 bits.

    Each step decodes the moments to float32, runs ``tx`` on gradients and parameters cast to float32, and encodes the
    new moments; updates are float32. Groups of neighbours along one axis depend on the shape of a moment alone, so that
    no mesh changes a bit. A moment stays float32 where it has fewer than 4096 elements, where no group of 16 or more
    divides that axis, or where ``float32`` names it; ``describe_state`` lists all moments. An element
    whose gradient, or its square, is not finite starts again with moments of 0 and spoils its group in no later step;
    the update of that step is what ``tx`` returns. Second moments that are not 0 never become 0.

    ``optax.MultiSteps`` (accumulated gradients are not moments) and ``stochastic_round`` belong outside.

        tx = optax.chain(optax.clip_by_global_norm(1.0), quantize_state(optax.adamw(1e-3), "fp8_coat"))

    Args:
      tx: an optimizer.
      scheme: a row of ``SCHEMES``: ``fp8_coat``, ``int8_dynamic`` or ``int8_linear``.
      float32: names of parameters, layers or moments (parts of paths) that stay float32.
      shards: how many devices share the axis of groups of a parameter at most, or a function from a moment's path and
        that axis, counted from the end, to that. Where it can be, a group lies on one device.
      moments: the moments of each class of state: ``MOMENTS``, or that with classes of your own.
      axis: of the groups, counted from the end; or "rows", the axis before the last, an earlier one whose groups are
        larger, or the last where neither has groups. None takes the last; on TPUs, unless ``implementation`` is "xla",
        "rows". ``update`` goes on along the axis that a state has, on any platform.
      apply: whether ``update`` returns ``NewWeights``, for ``apply_updates`` of this module, in place of updates. The
        kernel then writes weights, and moves 12 bytes a parameter less. It must be the last of a chain, and not inside
        of ``optax.MultiSteps``.
      implementation: "xla", or "pallas", the kernel, which CPUs interpret; None picks the kernel on TPUs. What it does
        not compute, as an optimizer that mixes elements, is XLA's, by ``jaxquant.ops.implementation.choices_made``. On
        GPUs XLA computes a parameter when the one before it is done, so that not all float32 moments are held at once.
      shardings: a function from a moment's path and its codes to the sharding of its parameter. The kernel needs it
        under automatic axes of a mesh, outside of ``jax.shard_map``.

    Raises:
      ValueError: no such scheme or implementation, or no such axis. From ``init``: a name in
        ``float32`` that no path has, an array as large as a moment in a state of an unknown class, fewer than one
        shard, or a state of ``stochastic_round``, ``compensated_round`` or ``quantize_state``. From ``update``: codes
        of another scheme.
      TypeError: from ``update``, a state that no ``quantize_state`` has made.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"quantize_state has no scheme {scheme!r}; {nearest(scheme, SCHEMES)}")
    row = SCHEMES[scheme]
    names = (float32,) if isinstance(float32, str) else tuple(float32)
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(
            f"quantize_state has no implementation {implementation!r}; known ones are xla, pallas and None"
        )
    if axis not in (None, "rows") and (not isinstance(axis, int) or axis >= 0):
        raise ValueError(
            f"quantize_state counts the axis of groups from the end, as -1 or -2, or has 'rows'; got {axis!r}"
        )
    if not callable(shards) and shards < 1:
        raise ValueError(f"quantize_state takes shards of at least 1, got {shards}")
    inner_update = optax.with_extra_args_support(tx).update
    if axis is None and implementation == "xla":
        axis = -1

    def init(params: optax.Params) -> QuantizedState:
        state = tx.init(_float32(params))
        _check(state, moments, names)

        def of_moment(name: str, signed: bool, tree: Any) -> Any:
            codec = row.codec(signed)

            def of_leaf(path: str, x: jax.Array) -> Coded:
                found = _groups(_join(name, path), codec, x, names, shards, axis)
                if found is None:
                    return Coded(x, None)
                # A compiler would encode moments that it knows, zeros, itself: minutes for a large model.
                return encode(codec, signed, *found, jax.lax.optimization_barrier(x))

            return map_by_path(of_leaf, tree)

        return _packed(moments, map_moments(of_moment, moments, state))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, *, changes: Any = None, **extra: Any
    ) -> tuple[Any, QuantizedState]:
        if apply and params is None:
            raise ValueError("quantize_state(…, apply=True) writes new weights; call update(gradients, state, params)")

        if not isinstance(state, QuantizedState):
            raise TypeError(f"update of quantize_state takes the state that its init made, got {type(state).__name__}")

        def of_moment(name: str, signed: bool, tree: Any) -> Any:
            codec = row.codec(signed)

            def of_leaf(path: str, codes: jax.Array, *rest: Any) -> Any:
                if rest[0] is None:
                    return codes
                path = _join(name, path)
                if codes.dtype.name != codec.dtype:
                    raise ValueError(
                        f"the moment {path!r} has codes of {codes.dtype.name}, and scheme {scheme!r} those of "
                        f"{codec.dtype}: another scheme made them, or they were cast; make a new state by init"
                    )
                return Moment(path, codec, signed, Coded(codes, *rest))

            paths = map_by_path(lambda path, _: path, tree)
            return jax.tree.map(of_leaf, paths, tree, state.largest[name], state.exponent[name])

        def function(updates: Any, inner: Any, params: Any) -> Any:
            new, inner = inner_update(_float32(updates), inner, _float32(params), **extra)
            return optax.apply_updates(params, new) if apply else new, inner

        inner = map_moments(of_moment, moments, state.inner)
        flag = None if changes is None else changes.read()
        new, inner = run(function, (updates, inner, params), implementation, shardings, apply, flag)
        return NewWeights(new, jax.random.key(0)) if apply else new, _packed(moments, inner)

    return optax.GradientTransformationExtraArgs(init, update)


class Changes:
    """Whether an update changes anything, as ``update_where`` hands it to every ``quantize_state``.

    Attributes:
      reads: how often it was read.
    """

    def __init__(self, flag: jax.Array) -> None:
        self._flag, self.reads = flag, 0

    def read(self) -> jax.Array:
        """Return the flag, and count."""
        self.reads += 1
        return self._flag


def update_where(
    changes: Bool[Array, ""], tx: Transformation, gradients: Any, state: Any, params: Any, **extra: Any
) -> tuple[Any, Any]:
    """Return new weights and a new state, or, where ``changes`` is False, the old ones to the bit.

    A choice between old and new arrays behind an update keeps both where a kernel makes the new ones in the memory of
    the old. ``quantize_state`` makes the choice within; what others return is chosen here.

    Args:
      changes: whether the update is made, as "loss and gradients are finite".
      tx: an optimizer, with ``quantize_state`` in it or without; ``optax.MultiSteps`` itself, too.
      gradients, state, params: of its ``update``.
      extra: further arguments of it.

    Raises:
      ValueError: something around a ``quantize_state`` hands it no extra arguments.
    """
    flag = counted = Changes(changes)
    if isinstance(tx, optax.MultiSteps):  # it may run its optimizer in several branches: count in one run
        counted, inner, takes = Changes(changes), tx.inner_opt, tx
        jax.eval_shape(lambda: inner.update(gradients, state.inner_opt_state, params, changes=counted, **extra))
    else:
        takes = optax.with_extra_args_support(tx)
    updates, new = takes.update(gradients, state, params, changes=flag, **extra)
    is_quantized = lambda node: isinstance(node, QuantizedState)  # noqa: E731
    if counted.reads < sum(map(is_quantized, jax.tree.leaves(state, is_leaf=is_quantized))):
        raise ValueError(
            "update_where: what is around a quantize_state hands it no extra arguments; give it an update that takes "
            "and passes on **extra. Of a MultiSteps m that is optax.GradientTransformationExtraArgs(m.init, m.update), "
            "not m.gradient_transformation()"
        )

    def choose(new: Any, old: Any) -> Any:
        return new if is_quantized(new) else jnp.where(changes, new, old)

    has_chosen = isinstance(updates, NewWeights)
    weights = apply_updates(params, updates)
    weights = weights if has_chosen else jax.tree.map(choose, weights, params)
    return weights, jax.tree.map(choose, new, state, is_leaf=is_quantized)


def apply_updates(params: optax.Params, updates: Any) -> Any:
    """Return the new weights, as ``optax.apply_updates``; also where an optimizer has returned them itself.

    Args:
      params: the weights.
      updates: what an optimizer's ``update`` has returned.
    """
    return updates.weights if isinstance(updates, NewWeights) else optax.apply_updates(params, updates)


def describe_state(state: Any) -> dict[str, str]:
    """Return how each moment is stored: path -> dtype, size of groups and bytes an element, or why it is float32.

    Args:
      state: an optimizer's state with one of ``quantize_state`` in it, as arrays or as shapes. Where a leaf is placed
        on a mesh, groups that are cut by a shard are reported with it.
    """
    rows = {}
    found = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, QuantizedState))
    for start, node in found:
        if not isinstance(node, QuantizedState):
            continue
        largest, exponent = leaves_by_path(node.largest), leaves_by_path(node.exponent)
        for path, codes in leaves_by_path(node.inner).items():
            row = _join(join_path(start), path)
            if path in largest:
                parts = (codes, largest[path], *([exponent[path]] if path in exponent else []))
                size = sum(map(array_bytes, parts)) / codes.size
                axis = axis_of(codes, largest[path])
                group = codes.shape[axis] // largest[path].shape[axis]
                where = "" if axis == -1 else f" along axis {axis}"
                rows[row] = f"{codes.dtype}, groups of {group}{where}, {size:.3f} bytes an element"
                sharding = getattr(codes, "sharding", None)
                part = sharding.shard_shape(codes.shape)[axis] if sharding else group
                if part % group:
                    rows[row] += f"; a shard has {part} of {'the last axis' if axis == -1 else 'it'} and cuts them"
            elif any(f"{path}/".startswith(f"{name}/") for name in node.largest):
                why = "named in float32, or no axis that groups divide"
                if codes.size < _FEWEST:
                    why = f"fewer than {_FEWEST} elements"
                rows[row] = f"{codes.dtype}: {why}"
    return rows


def _join(*paths: str) -> str:
    return "/".join(filter(None, paths))


def _float32(tree: Any) -> Any:
    """Cast what is less precise than float32 to it."""

    def cast(x: Any) -> Any:
        x = jnp.asarray(x)
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x

    return jax.tree.map(cast, tree)


def map_moments(function: Callable[[str, bool, Any], Any], moments: Moments, state: Any) -> Any:
    """Replace each moment's tree by a function of its path, whether it has signs, and itself."""

    def of_node(path: Any, node: Any) -> Any:
        fields = moments.get(type(node), {})
        made = {f: function(_join(join_path(path), f), signed, getattr(node, f)) for f, signed in fields.items()}
        return node._replace(**made) if fields else node

    return jax.tree_util.tree_map_with_path(of_node, state, is_leaf=lambda node: type(node) in moments)


def _check(state: Any, moments: Moments, names: tuple[str, ...]) -> None:
    """Check that nothing in an optimizer's state is like a moment and not known as one, and that all names occur."""
    kinds = (RoundState, CompensatedState, QuantizedState)
    found = [
        node for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds)) if isinstance(node, kinds)
    ]
    if found and isinstance(found[0], QuantizedState):
        raise ValueError("quantize_state(tx, …): tx has a quantize_state in it already; leave one of the two out")
    if found:
        raise ValueError(
            "quantize_state hands float32 parameters to its optimizer, and that rounds them to bfloat16; put "
            "stochastic_round or compensated_round behind it: optax.chain(quantize_state(…), stochastic_round())"
        )
    parts = {part for path in leaves_by_path(state) for part in path.split("/")}
    for name in names:
        if name not in parts:
            raise ValueError(f"float32 names {name!r}, which is no part of a path of the state; {nearest(name, parts)}")
    for path, leaf in leaves_by_path(state, is_leaf=lambda node: type(node) in moments).items():
        if type(leaf) not in moments and _is_large(leaf) and not set(names) & set(path.split("/")):
            raise ValueError(
                f"the optimizer's state has {path!r} of shape {leaf.shape}, in a class whose moments are unknown; put "
                "quantize_state inside of what made it, add the class to moments, or name it in float32"
            )


def _is_large(leaf: Any) -> bool:
    return leaf.size >= _FEWEST and leaf.ndim > 0 and jnp.issubdtype(leaf.dtype, jnp.floating)


def _groups(
    path: str, codec: Codec, x: Any, names: tuple[str, ...], shards: Shards, axis: int | str | None
) -> tuple[int, int] | None:
    """Return the axis of a moment's groups, counted from the end, and their number there; None for float32."""
    if not _is_large(x) or set(names) & set(path.split("/")):
        return None
    # TPUs reduce along rows without moving a number, and their kernel takes no other groups, nor larger blocks.
    of_rows = axis == "rows" or (axis is None and platform_of(x) == "tpu")
    rows, last = range(-2, -x.ndim - 1, -1) if of_rows else (), axis if isinstance(axis, int) else -1
    fits = {each: min(codec.group, MOST // (LANES * math.prod(x.shape[each + 1 : -1]))) for each in rows}
    found = [(size, each) for each, most in fits.items() if (size := _group(path, most, x, shards, each))]
    if not found and (size := _group(path, codec.group, x, shards, last)):
        found = [(size, last)]
    return next(((each, x.shape[each] // size) for size, each in [max(found, default=(0, 0))] if size), None)


def _group(path: str, largest: int, x: Any, shards: Shards, axis: int) -> int | None:
    if x.ndim < -axis:
        return None
    size, most = x.shape[axis], shards(path, axis) if callable(shards) else shards
    if most < 1:
        raise ValueError(f"shards(path, axis) of quantize_state must be at least 1, got {most} for {path!r}")
    for devices in range(most, 0, -1):
        if most % devices == 0 and size % devices == 0:
            part = size // devices
            for group in range(min(largest, part), _LEAST_GROUP - 1, -1):
                if part % group == 0:
                    return group
    return None


def _packed(moments: Moments, state: Any) -> QuantizedState:
    """Take a state that has ``Coded`` in the place of moments apart."""
    apart: list[dict[str, Any]] = [{}, {}]

    def of_moment(name: str, signed: bool, tree: Any) -> Any:
        def part(i: int) -> Any:
            is_coded = lambda x: isinstance(x, Coded)  # noqa: E731
            return jax.tree.map(lambda x: x[i] if is_coded(x) else None if i else x, tree, is_leaf=is_coded)

        apart[0][name], apart[1][name] = part(1), part(2)
        return part(0)

    return QuantizedState(map_moments(of_moment, moments, state), *apart)
