"""Weights in bfloat16 without a float32 copy: the new weight is rounded at random, or its rounding error is kept."""

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
    """State of ``stochastic_round``: the number of updates, of which the noise is a function."""

    count: Int[Array, ""]


class CompensatedState(NamedTuple):
    """State of ``compensated_round``: what rounding has taken from each bfloat16 weight; None for others."""

    error: Any


def stochastic_round(seed: int = 0) -> optax.GradientTransformation:
    """Return the last link of a chain, after which bfloat16 weights are rounded at random and so change on average.

    The update becomes one with which the weight is a bfloat16 number: of the two next to weight + update, computed in
    float32, each with the probability that makes the mean right. (To nearest, updates below half a unit in the last
    place, 2^-9 of the weight, are lost.) The noise is a hash of seed, step, the weight's path and an element's place
    in it, so that replicas agree and no mesh changes a bit. (Inside of ``jax.shard_map``, where a place is one of a
    device's part, each part has noise of its own.) Weights of other dtypes are left alone.

    It must be the last link: what follows it would change the rounded weights, and an optimizer after it takes the
    rounding for a gradient.

    optax keeps moments in the dtype of the weights: wrap the optimizer in ``quantize_state``, which does not.

        tx = optax.chain(quantize_state(optax.adamw(1e-3), "fp8_coat"), stochastic_round())

    Args:
      seed: of the noise.

    Raises:
      ValueError: from ``update``: it is called without parameters, or none of them is bfloat16.
    """

    def init(params: optax.Params) -> RoundState:
        del params  # of another dtype, perhaps: an optimizer's float32 moments are made of float32 weights
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

        return _map(of_leaf, params, updates), RoundState(state.count + 1)

    return optax.GradientTransformation(init, update)


def compensated_round() -> optax.GradientTransformation:
    """Return the last link of a chain, after which what rounding takes from a bfloat16 weight is added to its next one.

    Kahan's summation: the error, in bfloat16 too (2 bytes a weight), gives weights of 16 bits of mantissa. The
    alternative to ``stochastic_round`` without noise.

    Raises:
      ValueError: from ``update``: it is called without parameters, none of them is bfloat16, or the state was made for
        another dtype.
    """

    def init(params: optax.Params) -> CompensatedState:
        return CompensatedState(jax.tree.map(lambda p: jnp.zeros_like(p) if p.dtype == jnp.bfloat16 else None, params))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[Any, CompensatedState]:
        def exact(_: Any, p: jax.Array, u: jax.Array, error: Any) -> Any:
            if error is None:
                if p.dtype == jnp.bfloat16:
                    raise ValueError(
                        "compensated_round has no error of a bfloat16 weight; init it with bfloat16 weights"
                    )
                return None
            return p.astype(jnp.float32) + (u.astype(jnp.float32) + error.astype(jnp.float32))

        def of_leaf(_: Any, p: jax.Array, u: jax.Array, wanted: Any) -> jax.Array:
            return u if wanted is None else _nearest(wanted) - p.astype(jnp.float32)

        def error_of(_: Any, p: jax.Array, wanted: Any) -> Any:
            if wanted is None:
                return None
            lost = wanted - _nearest(wanted)
            return prevent_excess_precision(jnp.where(jnp.isfinite(lost), lost, 0).astype(jnp.bfloat16))

        _require_bfloat16(params, "compensated_round")
        wanted = _map(exact, params, updates, state.error)
        return _map(of_leaf, params, updates, wanted), CompensatedState(_map(error_of, params, wanted))

    return optax.GradientTransformation(init, update)


def round_randomly(x: Float[Array, "*shape"], key: RandomKey) -> Float[Array, "*shape"]:
    """Round float32 up or down to a bfloat16 number at random, so that the mean is x, unless that is out of range.

    16 bits of noise are added to the 16 that bfloat16 does not have, and those are cut off. NaN and inf stay.

    Args:
      x: numbers.
      key: of the noise, see ``core.rounding.noise``.
    """
    # Places count from a different one for each key: if weights share the numbers of places, XLA for GPUs makes one
    # kernel of all weights of a shape, and needs the float32 moments of all of them at once.
    drawn = (noise(key, x.shape, seed_of(key).second) * 2.0**16).astype(jnp.int32)  # the number's first 16 bits
    bits = (jax.lax.bitcast_convert_type(x, jnp.int32) + drawn) & jnp.int32(-(2**16))
    rounded = jnp.clip(jax.lax.bitcast_convert_type(bits, jnp.float32), -_MAX, _MAX)
    return jnp.where(jnp.isfinite(x), rounded, x)


def _nearest(x: jax.Array) -> jax.Array:
    """Round float32 to the nearest bfloat16 number, in float32; a compiler drops a cast there and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _require_bfloat16(params: Any, what: str) -> None:
    dtypes = sorted({leaf.dtype.name for leaf in jax.tree.leaves(params)})
    if dtypes and "bfloat16" not in dtypes:
        raise ValueError(
            f"{what} rounds weights to bfloat16, and those given are {', '.join(dtypes)}; cast them to bfloat16, or "
            "leave it out"
        )


def _map(function: Any, params: Any, *trees: Any) -> Any:
    if params is None:
        raise ValueError("rounding of weights needs the weights; call update(updates, state, params)")
    return jax.tree_util.tree_map_with_path(function, params, *trees)
