"""Parts of a decoder whose bits do not depend on the batch: norm, softmax, log-probabilities and rotary embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxquant.exact.arithmetic import exp, hold, log, round_to, rsqrt, sum

Array = jax.Array


def rms_norm(x: Array, scale: Array, epsilon: float = 1e-6, dtype: jax.typing.DTypeLike | None = None) -> Array:
    """Return ``x / sqrt(mean(x²) + epsilon) · scale`` over the last axis, computed in float32.

    Args:
      x: array [..., n].
      scale: array [n].
      epsilon: number that is added to the mean.
      dtype: dtype of the result, "float32" or "bfloat16"; None means the dtype of x.
    """
    wide = x.astype(jnp.float32)
    mean = hold(sum(hold(wide * wide)) * (1 / x.shape[-1]))
    normal = wide * rsqrt(mean + epsilon)[..., None] * scale.astype(jnp.float32)
    return round_to(hold(normal), x.dtype if dtype is None else dtype)


@jax.custom_jvp
def sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))`` in float32."""
    return 1 / (1 + exp(-x.astype(jnp.float32)))


@sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
    y = sigmoid(primals[0])
    return y, y * (1 - y) * tangents[0].astype(jnp.float32)  # finite where exp(-x) is infinite


def soft_cap(x: Array, cap: float) -> Array:
    """Return ``cap · tanh(x / cap)`` in float32, with an absolute error below ``cap · 4e-7``."""
    return hold((sigmoid(hold(x.astype(jnp.float32) * (2 / cap))) * 2 - 1) * cap)


def softmax(x: Array, where: Array | None = None) -> Array:
    """Return the softmax of the last axis in float32. Masked elements are 0, and their values have no effect.

    Args:
      x: array [..., n].
      where: boolean mask that broadcasts to x; each row needs one True. None selects all elements.
    """
    x = hold(x.astype(jnp.float32))
    if where is not None:
        x = jnp.where(where, x, -float(jnp.finfo(jnp.float32).max))
    powers = exp(x - jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True)))
    if where is not None:
        powers = jnp.where(where, powers, 0.0)
    return hold(powers * (1 / sum(powers))[..., None])


def token_log_probs(logits: Array, tokens: Array) -> Array:
    """Return the log-probability of each token in float32.

    Args:
      logits: array [..., vocabulary].
      tokens: int array [...].
    """
    logits = hold(logits.astype(jnp.float32))
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    chosen = jnp.take_along_axis(shifted, tokens[..., None], -1)[..., 0]
    return chosen - log(sum(exp(shifted)))


def rotate(x: Array, sin: Array, cos: Array) -> Array:
    """Rotate the two halves of the last axis as pairs, the rotary position embedding.

    Args:
      x: array [..., n]; the result has its dtype.
      sin, cos: float32 arrays that broadcast to [..., n / 2]. Read them from a constant table: a compiler may compute
        sines of the same angle differently in two programs.
    """
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [hold(left * cos) - hold(right * sin), hold(right * cos) + hold(left * sin)]
    return round_to(jnp.concatenate(turned, axis=-1), x.dtype)
