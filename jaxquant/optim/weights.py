"""bfloat16 weights without a float32 copy: round the new weight stochastically, or keep its rounding error."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxquant.core.paths import join_path
from jaxquant.core.rounding import RandomKey, fold, noise, prevent_excess_precision, seed_of
from jaxquant.core.sharding import device_key

_MAX = float(jnp.finfo(jnp.bfloat16).max)


class RoundState(NamedTuple):
    """State of ``stochastic_round``: the number of updates, from which the noise is derived."""

    count: Int[Array, ""]


class CompensatedState(NamedTuple):
    """State of ``compensated_round``: the rounding error of each bfloat16 weight, or None for other weights."""

    error: Any


def stochastic_round(seed: int = 0) -> optax.GradientTransformation:
    """Return the last transformation of a chain, which rounds bfloat16 weights stochastically.

    The update is changed so that the new weight is a bfloat16 number: one of the two neighbours of weight + update,
    computed in float32, with probabilities that make the expected value exact. (Rounding to nearest loses updates
    below half a unit in the last place, 2^-9 of the weight.) The noise is a hash of seed, step, the weight's path and
    an element's index, so that replicas agree and sharding changes no bit. (Inside ``jax.shard_map`` an index is
    local, and each shard of an array has separate noise.) Weights of other dtypes are not changed.

    ``stochastic_round`` must be the last transformation: a later transformation would change the rounded weights, and a
    later optimizer would treat the rounding as a gradient.

    optax keeps moments in the dtype of the weights. Wrap the optimizer in ``quantize_state`` to avoid this.

        tx = optax.chain(quantize_state(optax.adamw(1e-3), "fp8_coat"), stochastic_round())

    Args:
      seed: seed of the noise.

    Raises:
      ValueError: from ``update``: it is called without parameters, or no parameter is bfloat16.
    """

    def init(params: optax.Params) -> RoundState:
        del params  # may be float32, so that an optimizer creates float32 moments
        return RoundState(jnp.zeros((), jnp.int32))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[Any, RoundState]:
        key = fold(jax.random.key(seed), state.count)
        _require_bfloat16(params, "stochastic_round")

        def of_leaf(path: Any, p: jax.Array, u: jax.Array) -> jax.Array:
            if p.dtype != jnp.bfloat16:
                return u
            weight = p.astype(jnp.float32)
            exact = weight + u.astype(jnp.float32)
            leaf_key = fold(key, zlib.crc32(join_path(path).encode()))
            return round_randomly(exact, device_key(leaf_key, exact)) - weight

        return _map_leaves(of_leaf, params, updates), RoundState(state.count + 1)

    return optax.GradientTransformation(init, update)


def compensated_round() -> optax.GradientTransformation:
    """Return the last transformation of a chain, which adds the rounding error of a bfloat16 weight to its next update.

    This is Kahan summation: with the error in bfloat16 (2 bytes per weight), weights effectively have 16 mantissa bits.
    It is an alternative to ``stochastic_round`` that adds no noise.

    Raises:
      ValueError: from ``update``: it is called without parameters, no parameter is bfloat16, or the state was created
        for another dtype.
    """

    def init(params: optax.Params) -> CompensatedState:
        return CompensatedState(jax.tree.map(lambda p: jnp.zeros_like(p) if p.dtype == jnp.bfloat16 else None, params))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[Any, CompensatedState]:
        def exact(_: Any, p: jax.Array, u: jax.Array, error: Any) -> Any:
            if error is None:
                if p.dtype == jnp.bfloat16:
                    raise ValueError(
                        "compensated_round has a state for weights of another dtype; call init with bfloat16 weights"
                    )
                return None
            return p.astype(jnp.float32) + (u.astype(jnp.float32) + error.astype(jnp.float32))

        def of_leaf(_: Any, p: jax.Array, u: jax.Array, wanted: Any) -> jax.Array:
            return u if wanted is None else _round_to_nearest(wanted) - p.astype(jnp.float32)

        def error_of(_: Any, p: jax.Array, wanted: Any) -> Any:
            if wanted is None:
                return None
            lost = wanted - _round_to_nearest(wanted)
            return prevent_excess_precision(jnp.where(jnp.isfinite(lost), lost, 0).astype(jnp.bfloat16))

        _require_bfloat16(params, "compensated_round")
        wanted = _map_leaves(exact, params, updates, state.error)
        return _map_leaves(of_leaf, params, updates, wanted), CompensatedState(_map_leaves(error_of, params, wanted))

    return optax.GradientTransformation(init, update)


def round_randomly(x: Float[Array, "*shape"], key: RandomKey) -> Float[Array, "*shape"]:
    """Round float32 stochastically to a bfloat16 neighbour; the expected value is x, unless x is out of range.

    Adds 16 random bits to the low 16 bits, which bfloat16 does not have, and truncates them. NaN and inf do not change.

    Args:
      x: float32 numbers.
      key: key of the noise, see ``core.rounding.noise``.
    """
    # Indices start at a different number for each key. If all weights used the same indices,
    # XLA:GPU would fuse all weights of a shape into one kernel, which needs all their float32 moments at once.
    drawn = (noise(key, x.shape, seed_of(key).second) * 2.0**16).astype(jnp.int32)  # the first 16 bits of the noise
    bits = (jax.lax.bitcast_convert_type(x, jnp.int32) + drawn) & jnp.int32(-(2**16))
    rounded = jnp.clip(jax.lax.bitcast_convert_type(bits, jnp.float32), -_MAX, _MAX)
    return jnp.where(jnp.isfinite(x), rounded, x)


def _round_to_nearest(x: jax.Array) -> jax.Array:
    """Round to the nearest bfloat16 number, but return float32; a compiler would remove a cast to bfloat16 and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _require_bfloat16(params: Any, what: str) -> None:
    dtypes = sorted({leaf.dtype.name for leaf in jax.tree.leaves(params)})
    if dtypes and "bfloat16" not in dtypes:
        raise ValueError(
            f"{what} rounds weights to bfloat16, but no weight is bfloat16 (dtypes: {', '.join(dtypes)}); cast the "
            f"weights to bfloat16, or remove {what}"
        )


def _map_leaves(function: Any, params: Any, *trees: Any) -> Any:
    if params is None:
        raise ValueError("stochastic_round and compensated_round need the weights; call update(updates, state, params)")
    return jax.tree_util.tree_map_with_path(function, params, *trees)
