"""Grouped-query attention whose bits do not depend on the batch, padding, chunks or the length of a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxquant.exact.arithmetic import hold, round_to
from jaxquant.exact.digits import Digits, contract, product_rule, split
from jaxquant.exact.layers import soft_cap as bound_scores
from jaxquant.exact.layers import softmax

Array = jax.Array


def attend(
    query: Array,
    key: Array | Digits,
    value: Array | Digits,
    visible: Array,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Return the attention of queries over keys and values, in the dtype of ``query``.

    Queries, keys, values and probabilities are split into two int8 digits (14 bits), with a unit for each head of a
    token. Keys that are not visible have no effect, so padding and stale slots of a cache change no bit. The gradient
    is that of float attention; ``split`` has none, so differentiate with respect to arrays, not to a cache of digits.
    Scores of all pairs of tokens are stored.

    Args:
      query: array [batch, sequence, query heads, head_dim].
      key, value: arrays [batch, key positions, key heads, head_dim], or their digits as ``split(x, -1)`` returns them.
      visible: boolean mask [batch or 1, 1, sequence, key positions]; each query needs a visible key.
      scale: factor of the scores; None means ``head_dim ** -0.5``.
      soft_cap: bound of the scores, ``soft_cap · tanh(score / soft_cap)``; 0 means no bound.
      sinks: score [query heads] of a key without a value in each head, or None.

    Raises:
      ValueError: the number of query heads is not a multiple of the number of key heads, or there are more key
        positions than int32 sums of digits hold (262,143).
    """
    batch, length, heads, size = query.shape
    num_keys = (key.high if isinstance(key, Digits) else key).shape[2]
    if heads % num_keys:
        raise ValueError(f"query has {heads} heads, which is not a multiple of the {num_keys} key heads")
    scaled = hold(query.astype(jnp.float32) * (size**-0.5 if scale is None else scale))
    groups = scaled.reshape(batch, length, num_keys, -1, size)
    scores = _score(groups, key)
    if soft_cap:
        scores = bound_scores(scores, soft_cap)
    mask = visible[:, :, None]
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_keys, -1, 1, 1)
        scores = jnp.concatenate([jnp.broadcast_to(sink, (*scores.shape[:-1], 1)), scores], axis=-1)
        mask = jnp.concatenate([jnp.ones_like(mask[..., :1]), mask], axis=-1)
    share = softmax(scores, mask)[..., 0 if sinks is None else 1 :]
    return round_to(_mix(share, value).reshape(batch, length, heads, -1), query.dtype)


def _make_product(
    equation: str, multiply: Callable[[str, Array, Digits], Array]
) -> Callable[[Array, Array | Digits], Array]:
    """Return a function that multiplies an array by an array or its digits, with the gradient of ``jnp.einsum``."""

    @jax.custom_jvp
    def product(lhs: Array, rhs: Array | Digits) -> Array:
        return multiply(equation, lhs, rhs if isinstance(rhs, Digits) else split(rhs, -1))

    @product.defjvp
    def _jvp(primals, tangents):
        (lhs, rhs), (grad, other) = primals, tangents
        if isinstance(rhs, Digits):
            rhs, other = rhs.with_unit(rhs.unit), rhs.with_unit(other.unit)
        return product(*primals), product_rule(equation, (lhs, rhs), (grad, other))

    return product


def _mix_digits(equation: str, share: Array, value: Digits) -> Array:
    # A unit along the key positions would depend on padding, so each value's unit multiplies its share.
    units = value.unit.transpose(0, 2, 3, 1)[:, :, :, None]
    weighted = jnp.where(share == 0, 0.0, share * units)  # a share that is NaN stays NaN
    return contract(equation, split(weighted, -1), dataclasses.replace(value, unit=jnp.ones((1, 1, 1, 1), jnp.float32)))


_score = _make_product("bskgd,btkd->bkgst", lambda equation, query, key: contract(equation, split(query, -1), key))
_mix = _make_product("bkgst,btkd->bskgd", _mix_digits)
