"""From real numbers to a quantized element type: saturating casts and stochastic rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxquant.core.dtypes import Element


def saturating_cast(x: jax.Array, element: Element) -> jax.Array:
    """Round to nearest, ties to even, and clip to ``±element.max``; NaN stays NaN in float types.

    The clip comes first: XLA's cast to float8_e4m3fn turns what lies beyond the range into NaN, and e5m2 into inf.
    """
    clipped = jnp.clip(x, -element.max, element.max)
    if element.kind == "int":
        clipped = jax.lax.round(clipped, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return clipped.astype(element.name)


def asymmetric_cast(x: jax.Array, element: Element) -> jax.Array:
    """Round to nearest even and clip to the full integer range, ``-max - 1`` included."""
    return jnp.clip(jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN), -element.max - 1, element.max).astype(
        element.name
    )


def stochastic_cast(x: jax.Array, element: Element, key: jax.Array) -> jax.Array:
    """Round up or down at random so that the expected value is x, and clip to ``±element.max``.

    With ulp the distance of two neighbours of ``element`` around x and u uniform in [0, 1):
    ``q = floor(x / ulp + u) · ulp``. Computed in float32. ``key`` gives an independent u to every element.
    """
    x = x.astype(jnp.float32)
    noise = jax.random.uniform(key, x.shape, jnp.float32)
    if element.kind == "int":
        return jnp.clip(jnp.floor(x + noise), -element.max, element.max).astype(element.name)
    # The exponent field of a float32; below the smallest normal number of the element its grid is uniform.
    exponent = ((jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF) - 127
    exponent = jnp.maximum(exponent, element.min_exponent) - element.mantissa_bits
    ulp = jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    rounded = jnp.floor(x / ulp + noise) * ulp
    # floor() keeps a NaN or an infinity, and the clip that follows is the saturating one.
    return jnp.clip(rounded, -element.max, element.max).astype(element.name)


def content_key(x: jax.Array) -> jax.Array:
    """Derive a random key from the values of a tensor, so that stochastic rounding needs no random stream.

    The bit patterns are summed as integers, which no order of summation and no sharding can change. Two steps with
    the same tensor get the same noise.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jax.random.fold_in(jax.random.key(0), jnp.sum(bits, dtype=jnp.uint32))
