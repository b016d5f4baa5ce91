"""Reference of ``quantize``: the cast of core/quantize.py with a known scale, and the amax."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxquant.core.dtypes import element
from jaxquant.core.rounding import saturating_cast
from jaxquant.core.scales import absolute
from jaxquant.kernels import KERNEL_PREFIX

NAME = f"{KERNEL_PREFIX}quantize"
"""Name of the kernels in traced and in compiled programs."""
MAGNITUDE = 0x7FFFFFFF
"""Bits of a float32 without its sign; compared as integers, a NaN is above infinity."""


class Quantized(NamedTuple):
    """Results of one read of a matrix.

    Attributes:
      q: quantized elements.
      q_t: transposed quantized elements, or None if they were not requested.
      amax: largest magnitude; not finite if an element is not.
    """

    q: Shaped[Array, "M N"]
    q_t: Shaped[Array, "N M"] | None
    amax: Float[Array, ""]


def quantize(
    x: Float[Array, "M N"],
    scale: Float[Array, "1 1"],
    *,
    dtype: str,
    transposed: bool = False,
    compute_dtype: str = "float32",
) -> Quantized:
    """Compute the saturating cast ``q = cast(x / scale)``, its transposed copy and ``amax = max|x|``.

    The cast rounds to nearest, ties to even.

    Args:
      x: matrix, float32 or bfloat16.
      scale: scale, float32 of shape (1, 1).
      dtype: int8, float8_e4m3fn or float8_e5m2.
      transposed: whether to return ``q_t``.
      compute_dtype: dtype of the division, float32 or bfloat16.
    """
    q = saturating_cast(x.astype(compute_dtype) / scale.astype(compute_dtype), element(dtype))
    amax = jnp.max(absolute(x)) if x.size else jnp.zeros((), x.dtype)
    return Quantized(q, q.T if transposed else None, amax.astype(jnp.float32))
