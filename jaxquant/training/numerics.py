"""Float functions of the decoder: standard ones, and exact ones, whose bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxquant import exact
from jaxquant.training.attention import Rope, attend, rotate

Array = jax.Array
RopeOf = Callable[[Any], Rope]
"""Function from "is the layer global?" to its rotary embedding."""


class Standard:
    """The functions as flax, jax and optax compute them."""

    dot_general: Any = None
    """Product of the head and of the routers; None means ``jax.lax.dot_general``."""

    def rms_norm(self, x: Array, scale: Array, epsilon: float, dtype: Any) -> Array:
        norm = nn.RMSNorm(epsilon=epsilon, dtype=dtype, param_dtype=scale.dtype, parent=None)
        return norm.apply({"params": {"scale": scale}}, x)  # pyright: ignore[reportReturnType]

    def round(self, x: Array, dtype: Any) -> Array:
        """Return the result of a linear layer or of a lookup in the activations' dtype."""
        return x

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def multiply(self, x: Array, factor: float) -> Array:
        return x * jnp.asarray(factor, x.dtype)

    def soft_cap(self, x: Array, cap: float) -> Array:
        return cap * jnp.tanh(x.astype(jnp.float32) / cap)

    def gate(self, activation: str, a: Array, b: Array) -> Array:
        """Return the gated activation of an MLP, ``silu(a) * b`` for "silu"."""
        if activation == "silu":
            return nn.silu(a) * b
        if activation == "gelu_tanh":
            return nn.gelu(a, approximate=True) * b
        a, b = jnp.minimum(a, 7), jnp.clip(b, -7, 7)
        return a * jax.nn.sigmoid(1.702 * a) * (b + 1)

    def rotate(self, x: Array, positions: Array, rope_of: RopeOf, is_global: Any, length: Callable[[], int]) -> Array:
        """Apply the rotary embedding of a layer; ``length()`` is above all positions, others give NaN."""
        return rotate(x, positions, rope_of(is_global))

    def attend(
        self, query: Array, key: Any, value: Any, visible: Any, kind: Any, sharding: Any, **options: Any
    ) -> Array:
        return attend(query, key, value, visible, kind, sharding, **options)

    def softmax(self, x: Array) -> Array:
        return jax.nn.softmax(x)

    def sum(self, x: Array, axis: int) -> Array:
        return x.sum(axis)

    def normalize(self, x: Array) -> Array:
        """Return x divided by the sum of its last axis."""
        return x / x.sum(axis=-1, keepdims=True)

    def logits_of_embedding(self, embed: nn.Embed, x: Array) -> Array:
        return embed.attend(x)

    def token_losses(self, logits: Array, targets: Array) -> Array:
        """Return the negative log-probability of each target, in float32."""
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


class Exact(Standard):
    """The functions of ``jaxquant.exact``, which give a token the same bits in every batch, chunk and mesh.

    The head and the routers, which recipes leave in float, multiply two int8 digits of each operand.
    """

    @staticmethod
    def dot_general(lhs: Array, rhs: Array, dimension_numbers: Any, precision: Any = None, **unused: Any) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return ``jax.lax.dot_general`` of two arrays by their digits, in float32, without batch axes."""
        (of_lhs, of_rhs), _ = dimension_numbers
        left = [chr(97 + axis) for axis in range(lhs.ndim)]
        right = [chr(65 + axis) for axis in range(rhs.ndim)]
        for axis, other in zip(of_lhs, of_rhs, strict=True):
            right[other] = left[axis]
        result = [label for labels in (left, right) for label in labels if (label in left) != (label in right)]
        equation = f"{''.join(left)},{''.join(right)}->{''.join(result)}"
        return exact.dot(equation, lhs, exact.round_to(rhs, rhs.dtype))

    def rms_norm(self, x: Array, scale: Array, epsilon: float, dtype: Any) -> Array:
        return exact.rms_norm(x, scale, epsilon, dtype)

    def round(self, x: Array, dtype: Any) -> Array:
        return exact.round_to(exact.hold(x.astype(jnp.float32)), dtype)

    def add(self, x: Array, y: Array) -> Array:
        return exact.round_to(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)

    def multiply(self, x: Array, factor: float) -> Array:
        return self.round(x.astype(jnp.float32) * float(np.asarray(factor, x.dtype)), x.dtype)

    def soft_cap(self, x: Array, cap: float) -> Array:
        return exact.soft_cap(x, cap)

    def gate(self, activation: str, a: Array, b: Array) -> Array:
        dtype, hold = a.dtype, exact.hold
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if activation == "silu":
            activated = hold(a * exact.sigmoid(a))
        elif activation == "gelu_tanh":  # (1 + tanh(x)) / 2 = sigmoid(2 x)
            inner = a + hold(hold(a * a * a) * 0.044715)
            activated = hold(a * exact.sigmoid(inner * (2 * (2 / np.pi) ** 0.5)))
        else:
            a, b = jnp.minimum(a, 7), jnp.clip(b, -7, 7) + 1
            activated = hold(a * exact.sigmoid(1.702 * a))
        return self.round(activated * b, dtype)

    def rotate(self, x: Array, positions: Array, rope_of: RopeOf, is_global: Any, length: Callable[[], int]) -> Array:
        half = x.shape[-1] // 2
        if isinstance(is_global, bool):
            tables = _rope_table(rope_of(is_global), length(), half)
        else:
            tables = jnp.where(is_global, *(_rope_table(rope_of(each), length(), half) for each in (True, False)))
        sin, cos = (jnp.asarray(table).at[positions].get(mode="fill")[:, :, None] for table in tables)
        return exact.rotate(x, sin, cos)

    def attend(
        self, query: Array, key: Any, value: Any, visible: Any, kind: Any, sharding: Any, **options: Any
    ) -> Array:
        return exact.attend(query, key, value, visible, **options)

    def softmax(self, x: Array) -> Array:
        return exact.softmax(x)

    def sum(self, x: Array, axis: int) -> Array:
        return exact.sum(jnp.moveaxis(exact.hold(x), axis, -1))

    def normalize(self, x: Array) -> Array:
        return exact.hold(x * (1 / exact.sum(x))[..., None])

    def logits_of_embedding(self, embed: nn.Embed, x: Array) -> Array:
        return exact.dot("bsd,vd->bsv", x, exact.round_to(embed.embedding, x.dtype))

    def token_losses(self, logits: Array, targets: Array) -> Array:
        return -exact.token_log_probs(logits, targets)


NUMERICS = {"standard": Standard(), "exact": Exact()}
"""Functions of each ``numerics``."""


def _rope_table(rope: Rope, length: int, half: int) -> np.ndarray:
    """Return the sines and cosines of all positions, [2, length, half], computed in float64."""
    wavelength = rope.theta ** (np.arange(half) / half) * (1 if rope.stretch is None else rope.stretch)
    angle = np.arange(length)[:, None] / wavelength
    return (np.stack([np.sin(angle), np.cos(angle)]) * rope.magnitude).astype(np.float32)
