"""Reference of ``matmul``: 8-bit operands, a sum in float32 or int32, and their scales applied to the result."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxquant.kernels import KERNEL_PREFIX

NAME = f"{KERNEL_PREFIX}fp8_einsum"
"""Name of the kernels in traced and in compiled programs."""
Major = Literal["k", "m", "n"]


def matmul(
    lhs: Shaped[Array, "B M K"],
    rhs: Shaped[Array, "B N K"],
    scale: Float[Array, 1] | None = None,
    *,
    left: Float[Array, "B M 1"] | None = None,
    right: Float[Array, "B 1 N"] | None = None,
    out_dtype: str,
    accumulator: str,
    lhs_major: Major = "k",
    rhs_major: Major = "k",
) -> Float[Array, "B M N"]:
    """Compute ``out[b, m, n] = Σₖ lhs[b, m, k] · rhs[b, n, k] · scale``, or apply ``left`` and ``right`` scales.

    Products are summed in float32, or exactly in int32, then rounded to ``accumulator``. A single scale is applied in
    that dtype if it is also the dtype of the result. In all other cases, scales are applied in float32. The result is
    then rounded to ``out_dtype``.

    Args:
      lhs, rhs: operands, both int8, or each float8_e4m3fn or float8_e5m2.
      scale: product of the scales of both operands, if each has one scale.
      left, right: scales of the rows and of the columns of the result, instead of ``scale``.
      out_dtype: dtype of the result.
      accumulator: int32 for int8, otherwise a float dtype.
      lhs_major: "m" if lhs has the shape [B, K, M].
      rhs_major: "n" if rhs has the shape [B, K, N].
    """
    left_axis, right_axis = (2 if major == "k" else 1 for major in (lhs_major, rhs_major))
    total = sum_dtype(lhs.dtype.name)
    if lhs.shape[0] == 1:  # a plain matmul, which audits of traced programs match to its layer
        numbers = (((left_axis - 1,), (right_axis - 1,)), ((), ()))
        out = jax.lax.dot_general(lhs[0], rhs[0], numbers, preferred_element_type=total)[None]
    else:
        numbers = (((left_axis,), (right_axis,)), ((0,), (0,)))
        out = jax.lax.dot_general(lhs, rhs, numbers, preferred_element_type=total)
    return rescale(out, scale, left, right, out_dtype=out_dtype, accumulator=accumulator)


def sum_dtype(dtype: str) -> str:
    """Return the dtype in which products of operands are added."""
    return "int32" if dtype == "int8" else "float32"


def rescale(
    out: Array, scale: Array | None, left: Array | None, right: Array | None, *, out_dtype: str, accumulator: str
) -> Array:
    """Round sums of products to the accumulator, multiply them by the scales and round to the dtype of the result.

    Args:
      out: sums of products.
      scale, left, right, out_dtype, accumulator: arguments of ``matmul``.
    """
    if out.dtype.name != accumulator:
        out = out.astype(accumulator)
    if scale is None:
        assert left is not None
        assert right is not None
        return (out.astype(jnp.float32) * left * right).astype(out_dtype)
    if accumulator != out_dtype or accumulator == "int32":
        out = out.astype(jnp.float32)
    return (out * scale.astype(out.dtype)).astype(out_dtype)
