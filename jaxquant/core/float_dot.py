"""float_dot: a matmul of float operands, on CPUs too."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

Array = jax.Array


def float_dot(
    lhs: Array,
    rhs: Array,
    numbers: jax.lax.DotDimensionNumbers,
    *,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: str | None = None,
    out_sharding: NamedSharding | None = None,
) -> Array:
    """Compute ``lax.dot_general``, of which CPUs lack one: bfloat16 operands with a float32 result become float32.

    XLA:CPU fails on some of those when it runs them ("Unsupported element type for DotThunk", jax 0.10.2): where the
    result is transposed, for one. The products are exact in either type.

    Args:
      lhs, rhs, numbers, precision, preferred_element_type, out_sharding: as ``lax.dot_general`` takes them.
    """
    dot = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    return wide_on_cpus(dot, lhs, rhs, preferred_element_type)


def wide_on_cpus(dot: Callable[[Array, Array], Array], lhs: Array, rhs: Array, dtype: str | None) -> Array:
    """Compute ``dot(lhs, rhs)`` with a result of ``dtype``, on CPUs of float32 operands where ``float_dot`` does so."""
    if not lhs.dtype == rhs.dtype == jnp.bfloat16 or dtype != "float32":
        return dot(lhs, rhs)
    wide = lambda a, b: dot(a.astype(jnp.float32), b.astype(jnp.float32))  # noqa: E731
    return jax.lax.platform_dependent(lhs, rhs, cpu=wide, default=dot)
