"""Optimizer state in 8 bits: the moments of an optax transformation are decoded, updated and encoded in every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxquant.core.paths import join_path
from jaxquant.core.sharding import merge_axes, split_axes
from jaxquant.core.trees import array_bytes, leaves_by_path, map_by_path
from jaxquant.core.typed import nearest
from jaxquant.optim.codes import SCHEMES, Codec, Coded, Scheme
from jaxquant.optim.weights import CompensatedState, RoundState

Moments = Mapping[type, Mapping[str, bool]]
Shards = int | Callable[[str], int]

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


_OVERFLOWS = 2.0**54
"""A momentum of gradients whose square overflows float32: at least (1 - b1) · 2^64, and b1 is .999 at most."""


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


def quantize_state(
    tx: optax.GradientTransformation,
    scheme: str,
    *,
    float32: Iterable[str] = (),
    shards: Shards = 1,
    moments: Moments = MOMENTS,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that keeps the moments of another one in 8 bits.

    Each step decodes the moments to float32, runs ``tx`` on gradients and parameters cast to float32, and encodes the
    new moments; updates are float32. Groups of neighbours along the last axis depend on the shape of a moment alone,
    so that no mesh changes a bit. A moment stays float32 where it has fewer than 4096 elements, where no group of 16
    or more divides its last axis, or where ``float32`` names it; ``describe_state`` lists all moments. An element
    whose gradient, or its square, is not finite starts again with moments of 0 and spoils its group in no later step;
    the update of that step is what ``tx`` returns. Second moments that are not 0 never become 0.

    ``optax.MultiSteps`` (accumulated gradients are not moments) and ``stochastic_round`` belong outside.

        tx = optax.chain(optax.clip_by_global_norm(1.0), quantize_state(optax.adamw(1e-3), "fp8_coat"))

    Args:
      tx: an optimizer.
      scheme: a row of ``SCHEMES``: ``fp8_coat``, ``int8_dynamic`` or ``int8_linear``.
      float32: names of parameters, layers or moments (parts of paths) that stay float32.
      shards: how many devices share the last axis of a parameter at most, or a function from a moment's path to that.
        Where it can be, a group lies on one device.
      moments: the moments of each class of state: ``MOMENTS``, or that with classes of your own.

    Raises:
      ValueError: no such scheme. From ``init``: a name in ``float32`` that no path has, an array as large as a moment
        in a state of an unknown class, or a state of ``stochastic_round`` or ``compensated_round``.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"quantize_state has no scheme {scheme!r}; {nearest(scheme, SCHEMES)}")
    row = SCHEMES[scheme]
    names = (float32,) if isinstance(float32, str) else tuple(float32)
    inner_update = optax.with_extra_args_support(tx).update

    def init(params: optax.Params) -> QuantizedState:
        state = tx.init(_float32(params))
        _check(state, moments, names)

        def plan(name: str, codec: Codec, tree: Any) -> Any:
            return map_by_path(lambda path, x: _groups(_join(name, path), codec, x, names, shards), tree)

        return _encode_state(row, moments, state, plan)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, QuantizedState]:
        updates, new = inner_update(_float32(updates), _decode_state(row, moments, state), _float32(params), **extra)
        return updates, _encode_state(row, moments, new, lambda name, codec, tree: state.largest[name])

    return optax.GradientTransformationExtraArgs(init, update)


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
                group = codes.shape[-1] // largest[path].shape[-1]
                rows[row] = f"{codes.dtype}, groups of {group}, {size:.3f} bytes an element"
                sharding = getattr(codes, "sharding", None)
                part = sharding.shard_shape(codes.shape)[-1] if sharding else group
                if part % group:
                    rows[row] += f"; a shard has {part} of the last axis and cuts them"
            elif any(f"{path}/".startswith(f"{name}/") for name in node.largest):
                why = f"fewer than {_FEWEST} elements" if codes.size < _FEWEST else "by its name or its last axis"
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


def _map_moments(function: Callable[[str, bool, Any], Any], moments: Moments, state: Any) -> Any:
    """Replace each moment's tree by a function of its path, whether it has signs, and itself."""

    def of_node(path: Any, node: Any) -> Any:
        fields = moments.get(type(node), {})
        made = {f: function(_join(join_path(path), f), signed, getattr(node, f)) for f, signed in fields.items()}
        return node._replace(**made) if fields else node

    return jax.tree_util.tree_map_with_path(of_node, state, is_leaf=lambda node: type(node) in moments)


def _check(state: Any, moments: Moments, names: tuple[str, ...]) -> None:
    """Check that nothing in an optimizer's state is like a moment and not known as one, and that all names occur."""
    rounding = (RoundState, CompensatedState)
    if any(isinstance(node, rounding) for node in jax.tree.leaves(state, is_leaf=lambda n: isinstance(n, rounding))):
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


def _groups(path: str, codec: Codec, x: Any, names: tuple[str, ...], shards: Shards) -> jax.ShapeDtypeStruct | None:
    """Return the shape of the largest magnitudes of a moment's groups; None where the moment stays float32."""
    if not _is_large(x) or set(names) & set(path.split("/")):
        return None
    size, most = x.shape[-1], shards(path) if callable(shards) else shards
    for devices in range(most, 0, -1):
        if most % devices == 0 and size % devices == 0:
            part = size // devices
            for group in range(min(codec.group, part), _LEAST_GROUP - 1, -1):
                if part % group == 0:
                    return jax.ShapeDtypeStruct((*x.shape[:-1], size // group), jnp.float32)
    return None


def _encode_state(
    scheme: Scheme, moments: Moments, state: Any, plan: Callable[[str, Codec, Any], Any]
) -> QuantizedState:
    """Encode each moment for which ``plan(path, codec, tree)`` has the shape of its largest magnitudes, not None."""
    largest, exponent = {}, {}

    def of_moment(name: str, signed: bool, tree: Any) -> Any:
        codec = scheme.codec(signed)

        def of_leaf(x: jax.Array, like: Any) -> Coded:
            return Coded(x, None) if like is None else _encode(codec, signed, like.shape[-1], x)

        coded = jax.tree.map(of_leaf, tree, plan(name, codec, tree))
        parts = [jax.tree.map(lambda c, i=i: c[i], coded, is_leaf=lambda c: isinstance(c, Coded)) for i in range(3)]
        codes, largest[name], exponent[name] = parts
        return codes

    return QuantizedState(_map_moments(of_moment, moments, state), largest, exponent)


def _decode_state(scheme: Scheme, moments: Moments, state: QuantizedState) -> Any:
    def of_moment(name: str, signed: bool, tree: Any) -> Any:
        def of_leaf(codes: jax.Array, *rest: Any) -> jax.Array:
            return codes if rest[0] is None else _decode(scheme.codec(signed), signed, Coded(codes, *rest))

        return jax.tree.map(of_leaf, tree, state.largest[name], state.exponent[name])

    return _map_moments(of_moment, moments, state.inner)


# Jits of their own, or an optimizer's init outside of a jit would compile each operation by itself.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _encode(codec: Codec, signed: bool, groups: int, x: jax.Array) -> Coded:
    x = jnp.where(jnp.abs(x) < (_OVERFLOWS if signed else jnp.inf), x, 0).astype(jnp.float32)
    coded = codec.encode(split_axes(x, {x.ndim - 1: groups}), signed)
    return coded._replace(codes=merge_axes(coded.codes, x))


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _decode(codec: Codec, signed: bool, coded: Coded) -> jax.Array:
    codes = split_axes(coded.codes, {coded.codes.ndim - 1: coded.largest.shape[-1]})
    return merge_axes(codec.decode(coded._replace(codes=codes), signed), coded.codes)
