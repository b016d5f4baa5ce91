"""The meaning of ``matmul``: 8-bit operands, a sum in float32 or int32, and their scales on the result."""

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
    """Compute ``out[b, m, n] = Σₖ lhs[b, m, k] · rhs[b, n, k] · scale``, or with a left and a right scale.

    Products are summed in float32, or in int32 exactly, then rounded to ``accumulator``. One scale multiplies in that
    dtype where it is also the result's; otherwise, and with a left and a right scale, in float32. Then comes
    ``out_dtype``.

    Args:
      lhs, rhs: int8 both, or float8_e4m3fn or float8_e5m2 each.
      scale: product of the scales of both operands, where each has one.
      left, right: scales of the rows and of the columns of the result, in place of ``scale``.
      out_dtype: of the result.
      accumulator: int32 for int8, else a float dtype.
      lhs_major: "m" where lhs is given as [B, K, M].
      rhs_major: "n" where rhs is given as [B, K, N].
    """
    left_axis, right_axis = (2 if major == "k" else 1 for major in (lhs_major, rhs_major))
    total = sum_dtype(lhs.dtype.name)
    if lhs.shape[0] == 1:  # a batch of one is a plain matmul, which audits of traced programs read as that of its layer
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
      out: the sums.
      scale, left, right, out_dtype, accumulator: of ``matmul``.
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
