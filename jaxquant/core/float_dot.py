"""float_dot: a matmul of float operands that also runs on CPUs."""

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
    """Compute ``lax.dot_general``; on CPUs, bfloat16 operands with a float32 result are cast to float32 first.

    XLA:CPU fails at run time on some such matmuls, for example if the result is transposed ("Unsupported element type
    for DotThunk", jax 0.10.2). The products are exact in either type.

    Args:
      lhs, rhs, numbers, precision, preferred_element_type, out_sharding: arguments of ``lax.dot_general``.
    """
    dot = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    return float32_on_cpus(dot, lhs, rhs, preferred_element_type)


def float32_on_cpus(dot: Callable[[Array, Array], Array], lhs: Array, rhs: Array, dtype: str | None) -> Array:
    """Compute ``dot(lhs, rhs)`` with a result of ``dtype``; on CPUs, cast operands to float32 as ``float_dot`` does."""
    if not lhs.dtype == rhs.dtype == jnp.bfloat16 or dtype != "float32":
        return dot(lhs, rhs)
    wide = lambda a, b: dot(a.astype(jnp.float32), b.astype(jnp.float32))  # noqa: E731
    return jax.lax.platform_dependent(lhs, rhs, cpu=wide, default=dot)
