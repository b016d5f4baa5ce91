"""8-bit optimizer state: each step decodes, updates and encodes the moments of an optax transformation."""

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
from jaxquant.kernels.optimizer_update.tuning import LANES, MAX_ELEMENTS
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
"""Moments of each class of optimizer state, and whether they are signed."""

_MIN_ELEMENTS = 4096  # minimum number of elements of an 8-bit moment
_MIN_GROUP = 16  # a group's largest magnitude then costs a quarter of a byte per element


class QuantizedState(NamedTuple):
    """State of ``quantize_state``. Checkpoints store the codes, so loading does not encode again.

    Attributes:
      inner: state of the optimizer, with codes instead of moments. Partition rules that match a moment's shape or the
        end of its path also match its codes.
      largest: tree of the largest magnitude of every group, for each moment by its path in ``inner``; None if the
        moment is float32. Each array has as many axes as its parameter.
      exponent: tree of the exponents of ``fp8_coat``, with the same structure.
    """

    inner: Any
    largest: dict[str, Any]
    exponent: dict[str, Any]


class NewWeights(NamedTuple):
    """Result of the ``update`` of ``quantize_state(…, apply=True)``, for ``apply_updates``.

    Attributes:
      weights: new weights.
      guard: random key. It makes a further update transformation fail instead of producing wrong weights.
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
    """Return an optimizer that stores the moments of another optimizer in 8 bits.

    Each step decodes the moments to float32, runs ``tx`` on gradients and parameters cast to float32, and encodes the
    new moments; updates are float32. The groups of neighbours along one axis depend only on the shape of a moment, so
    sharding changes no bit. A moment stays float32 if it has fewer than 4096 elements, if no group size of 16 or more
    divides the axis, or if ``float32`` lists it; ``describe_state`` reports all moments. If the gradient of an element
    or its square is not finite, the moments of the element restart at 0 and do not affect its group in later steps; the
    update of that step is the result of ``tx``. Nonzero second moments never become 0.

    Apply ``optax.MultiSteps`` and ``stochastic_round`` outside of ``quantize_state``. (``optax.MultiSteps`` accumulates
    gradients, which are not moments.)

        tx = optax.chain(optax.clip_by_global_norm(1.0), quantize_state(optax.adamw(1e-3), "fp8_coat"))

    Args:
      tx: optimizer.
      scheme: key of ``SCHEMES``: ``fp8_coat``, ``int8_dynamic`` or ``int8_linear``.
      float32: names of parameters, layers or moments (parts of paths) that stay float32.
      shards: maximum number of devices over which the axis of the groups is sharded, or a function (path of a moment,
        axis counted from the end) -> number of devices. If possible, a group lies on one device.
      moments: moments of each class of optimizer state: ``MOMENTS``, or ``MOMENTS`` with your own classes added.
      axis: axis of the groups, counted from the end; or "rows": the second-last axis, an earlier axis if its groups are
        larger, or the last axis if neither has groups. None selects "rows" on TPUs (unless ``implementation`` is
        "xla"), otherwise the last axis. ``update`` keeps the axis of an existing state, on any platform.
      apply: whether ``update`` returns ``NewWeights`` (for ``apply_updates`` of this module) instead of updates. The
        kernel then writes the weights itself, which saves 12 bytes of memory traffic per parameter. The optimizer must
        be the last of a chain, and not inside ``optax.MultiSteps``.
      implementation: "xla", or "pallas" for the kernel, which CPUs interpret. None selects the kernel on TPUs. If
        the kernel does not support a parameter or optimizer, for example an optimizer that mixes elements, XLA computes
        the update, and ``jaxquant.ops.implementation.choices_made`` lists the reason. On GPUs XLA computes one
        parameter after the other, so that not all float32 moments are in memory at once.
      shardings: function of a moment's path and its codes that returns the sharding of its parameter. The kernel needs
        this function if the mesh has ``Auto`` axes, unless the optimizer runs inside ``jax.shard_map``.

    Raises:
      ValueError: the scheme, implementation or axis does not exist. From ``init``: a name in ``float32`` is not in any
        path, a state of an unknown class has an array as large as a moment, ``shards`` is below 1, or ``tx`` contains
        ``stochastic_round``, ``compensated_round`` or ``quantize_state``. From ``update``: the codes belong to another
        scheme.
      TypeError: from ``update``: the state does not come from ``quantize_state``.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"quantize_state has no scheme {scheme!r}; {nearest(scheme, SCHEMES)}")
    row = SCHEMES[scheme]
    names = (float32,) if isinstance(float32, str) else tuple(float32)
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(f"quantize_state has no implementation {implementation!r}; use 'xla', 'pallas' or None")
    if axis not in (None, "rows") and (not isinstance(axis, int) or axis >= 0):
        raise ValueError(
            f"quantize_state axis must be negative (counted from the end, such as -1), 'rows' or None; got {axis!r}"
        )
    if not callable(shards) and shards < 1:
        raise ValueError(f"quantize_state shards must be at least 1, got {shards}")
    inner_update = optax.with_extra_args_support(tx).update
    if axis is None and implementation == "xla":
        axis = -1

    def init(params: optax.Params) -> QuantizedState:
        state = tx.init(_to_float32(params))
        _check_state(state, moments, names)

        def of_moment(name: str, signed: bool, tree: Any) -> Any:
            codec = row.codec(signed)

            def of_leaf(path: str, x: jax.Array) -> Coded:
                found = _choose_groups(_join(name, path), codec, x, names, shards, axis)
                if found is None:
                    return Coded(x, None)
                # Without the barrier, XLA would constant-fold the encoding of zeros, which can take minutes.
                return encode(codec, signed, *found, jax.lax.optimization_barrier(x))

            return map_by_path(of_leaf, tree)

        return _split_coded(moments, map_moments(of_moment, moments, state))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, *, changes: Any = None, **extra: Any
    ) -> tuple[Any, QuantizedState]:
        if apply and params is None:
            raise ValueError("quantize_state(…, apply=True) needs the weights; call update(gradients, state, params)")

        if not isinstance(state, QuantizedState):
            raise TypeError(f"quantize_state needs the state from quantize_state(…).init, got {type(state).__name__}")

        def of_moment(name: str, signed: bool, tree: Any) -> Any:
            codec = row.codec(signed)

            def of_leaf(path: str, codes: jax.Array, *rest: Any) -> Any:
                if rest[0] is None:
                    return codes
                path = _join(name, path)
                if codes.dtype.name != codec.dtype:
                    raise ValueError(
                        f"the moment {path!r} has dtype {codes.dtype.name}, but scheme {scheme!r} needs {codec.dtype}; "
                        "use the scheme that created the optimizer state, or create a new state with init"
                    )
                return Moment(path, codec, signed, Coded(codes, *rest))

            paths = map_by_path(lambda path, _: path, tree)
            return jax.tree.map(of_leaf, paths, tree, state.largest[name], state.exponent[name])

        def function(updates: Any, inner: Any, params: Any) -> Any:
            new, inner = inner_update(_to_float32(updates), inner, _to_float32(params), **extra)
            return optax.apply_updates(params, new) if apply else new, inner

        inner = map_moments(of_moment, moments, state.inner)
        flag = None if changes is None else changes.read()
        new, inner = run(function, (updates, inner, params), implementation, shardings, apply, flag)
        return NewWeights(new, jax.random.key(0)) if apply else new, _split_coded(moments, inner)

    return optax.GradientTransformationExtraArgs(init, update)


class Changes:
    """Flag whether to apply an update; ``update_where`` passes the flag to every ``quantize_state``.

    Attributes:
      reads: number of times that the flag was read.
    """

    def __init__(self, flag: jax.Array) -> None:
        self._flag, self.reads = flag, 0

    def read(self) -> jax.Array:
        """Return the flag, and increment ``reads``."""
        self.reads += 1
        return self._flag


def update_where(
    changes: Bool[Array, ""], tx: Transformation, gradients: Any, state: Any, params: Any, **extra: Any
) -> tuple[Any, Any]:
    """Return new weights and a new state or, if ``changes`` is False, the old weights and the old state.

    A kernel can write new arrays into the memory of the old arrays. A ``jnp.where`` after the update would keep both in
    memory. Therefore ``quantize_state`` chooses its own arrays internally; this function chooses all other arrays.

    Args:
      changes: whether to apply the update, for example "loss and gradients are finite".
      tx: optimizer, with or without ``quantize_state`` in it; ``optax.MultiSteps`` is supported.
      gradients, state, params: arguments of ``tx.update``.
      extra: further arguments of ``tx.update``.

    Raises:
      ValueError: a transformation around ``quantize_state`` does not forward extra arguments.
    """
    flag = counted = Changes(changes)
    if isinstance(tx, optax.MultiSteps):  # may trace its optimizer in several branches, so count in another trace
        counted, inner, optimizer = Changes(changes), tx.inner_opt, tx
        jax.eval_shape(lambda: inner.update(gradients, state.inner_opt_state, params, changes=counted, **extra))
    else:
        optimizer = optax.with_extra_args_support(tx)
    updates, new = optimizer.update(gradients, state, params, changes=flag, **extra)
    is_quantized = lambda node: isinstance(node, QuantizedState)  # noqa: E731
    if counted.reads < sum(map(is_quantized, jax.tree.leaves(state, is_leaf=is_quantized))):
        raise ValueError(
            "update_where: a transformation around quantize_state drops the argument changes of update; accept and "
            "forward **extra in that transformation (for a MultiSteps m, use "
            "optax.GradientTransformationExtraArgs(m.init, m.update) instead of m.gradient_transformation())"
        )

    def choose(new: Any, old: Any) -> Any:
        return new if is_quantized(new) else jnp.where(changes, new, old)

    has_chosen = isinstance(updates, NewWeights)
    weights = apply_updates(params, updates)
    weights = weights if has_chosen else jax.tree.map(choose, weights, params)
    return weights, jax.tree.map(choose, new, state, is_leaf=is_quantized)


def apply_updates(params: optax.Params, updates: Any) -> Any:
    """Return the new weights, like ``optax.apply_updates``; also supports ``NewWeights``.

    Args:
      params: weights.
      updates: result of an optimizer's ``update``.
    """
    return updates.weights if isinstance(updates, NewWeights) else optax.apply_updates(params, updates)


def describe_state(state: Any) -> dict[str, str]:
    """Return the storage of each moment by path: dtype, group size and bytes per element, or the reason for float32.

    Args:
      state: optimizer state that contains a state of ``quantize_state``, as arrays or shapes. For leaves
        on a mesh, the text also reports groups that are split between shards.
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
                rows[row] = f"{codes.dtype}, groups of {group}{where}, {size:.3f} bytes per element"
                sharding = getattr(codes, "sharding", None)
                part = sharding.shard_shape(codes.shape)[axis] if sharding else group
                if part % group:
                    rows[row] += f"; splits groups, because a shard has {part} elements along axis {axis}"
            elif any(f"{path}/".startswith(f"{name}/") for name in node.largest):
                why = "listed in float32, or no group size divides the axis"
                if codes.size < _MIN_ELEMENTS:
                    why = f"fewer than {_MIN_ELEMENTS} elements"
                rows[row] = f"{codes.dtype}: {why}"
    return rows


def _join(*paths: str) -> str:
    return "/".join(filter(None, paths))


def _to_float32(tree: Any) -> Any:
    """Cast floats that are less precise than float32 to float32."""

    def cast(x: Any) -> Any:
        x = jnp.asarray(x)
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x

    return jax.tree.map(cast, tree)


def map_moments(function: Callable[[str, bool, Any], Any], moments: Moments, state: Any) -> Any:
    """Replace the tree of each moment with ``function(path, whether the moment is signed, tree)``."""

    def of_node(path: Any, node: Any) -> Any:
        fields = moments.get(type(node), {})
        made = {f: function(_join(join_path(path), f), signed, getattr(node, f)) for f, signed in fields.items()}
        return node._replace(**made) if fields else node

    return jax.tree_util.tree_map_with_path(of_node, state, is_leaf=lambda node: type(node) in moments)


def _check_state(state: Any, moments: Moments, names: tuple[str, ...]) -> None:
    """Raise if a state has an unknown moment or a forbidden transformation, or has no path for one of the names."""
    kinds = (RoundState, CompensatedState, QuantizedState)
    found = [
        node for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds)) if isinstance(node, kinds)
    ]
    if found and isinstance(found[0], QuantizedState):
        raise ValueError("quantize_state(tx, …): tx already contains a quantize_state; remove one of the two")
    if found:
        raise ValueError(
            "quantize_state(tx, …): tx must not contain stochastic_round or compensated_round; move the rounding after "
            "quantize_state, as in optax.chain(quantize_state(…), stochastic_round())"
        )
    parts = {part for path in leaves_by_path(state) for part in path.split("/")}
    for name in names:
        if name not in parts:
            raise ValueError(f"float32 lists {name!r}, which is in no path of the state; {nearest(name, parts)}")
    for path, leaf in leaves_by_path(state, is_leaf=lambda node: type(node) in moments).items():
        if type(leaf) not in moments and _is_large(leaf) and not set(names) & set(path.split("/")):
            raise ValueError(
                f"quantize_state does not know the array {path!r} of shape {leaf.shape} in the optimizer state; list "
                "the path in float32, add the class of the state to moments, or wrap only the inner transformation"
            )


def _is_large(leaf: Any) -> bool:
    return leaf.size >= _MIN_ELEMENTS and leaf.ndim > 0 and jnp.issubdtype(leaf.dtype, jnp.floating)


def _choose_groups(
    path: str, codec: Codec, x: Any, names: tuple[str, ...], shards: Shards, axis: int | str | None
) -> tuple[int, int] | None:
    """Return the axis of a moment's groups (counted from the end) and the number of groups, or None for float32."""
    if not _is_large(x) or set(names) & set(path.split("/")):
        return None
    # TPUs reduce along rows without moving data. The TPU kernel supports only such groups, in blocks of limited size.
    of_rows = axis == "rows" or (axis is None and platform_of(x) == "tpu")
    rows, last = range(-2, -x.ndim - 1, -1) if of_rows else (), axis if isinstance(axis, int) else -1
    fits = {each: min(codec.group, MAX_ELEMENTS // (LANES * math.prod(x.shape[each + 1 : -1]))) for each in rows}
    found = [(size, each) for each, most in fits.items() if (size := _group_size(path, most, x, shards, each))]
    if not found and (size := _group_size(path, codec.group, x, shards, last)):
        found = [(size, last)]
    return next(((each, x.shape[each] // size) for size, each in [max(found, default=(0, 0))] if size), None)


def _group_size(path: str, largest: int, x: Any, shards: Shards, axis: int) -> int | None:
    if x.ndim < -axis:
        return None
    size, most = x.shape[axis], shards(path, axis) if callable(shards) else shards
    if most < 1:
        raise ValueError(f"shards(path, axis) of quantize_state must be at least 1, got {most} for {path!r}")
    for devices in range(most, 0, -1):
        if most % devices == 0 and size % devices == 0:
            part = size // devices
            for group in range(min(largest, part), _MIN_GROUP - 1, -1):
                if part % group == 0:
                    return group
    return None


def _split_coded(moments: Moments, state: Any) -> QuantizedState:
    """Split a state with ``Coded`` moments into a ``QuantizedState``."""
    statistics: list[dict[str, Any]] = [{}, {}]

    def of_moment(name: str, signed: bool, tree: Any) -> Any:
        def part(i: int) -> Any:
            is_coded = lambda x: isinstance(x, Coded)  # noqa: E731
            return jax.tree.map(lambda x: x[i] if is_coded(x) else None if i else x, tree, is_leaf=is_coded)

        statistics[0][name], statistics[1][name] = part(1), part(2)
        return part(0)

    return QuantizedState(map_moments(of_moment, moments, state), *statistics)
