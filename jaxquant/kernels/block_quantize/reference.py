"""Reference of ``block_quantize``: the cast of core/quantize.py, once for each block shape."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.quantize import compute_scale, quantize_with_scale
from jaxquant.core.recipe import TensorSpec
from jaxquant.kernels import KERNEL_PREFIX

NAME = f"{KERNEL_PREFIX}block_quantize"
"""Prefix of the kernels' names in traced and in compiled programs; see ``kernel_name``."""
_MANTISSA_BITS = 23


class Cast(NamedTuple):
    """One quantization of a matrix.

    Attributes:
      spec: element type, scales and rounding.
      block: number of neighbours that share a scale along each axis; rows and columns of a matrix.
      floor: scales below this value are replaced by 1.
      has_elements: whether to return the elements and their scales.
      has_values: whether to return the dequantized values, in bfloat16.
      is_transposed: whether results of square blocks are transposed in memory, if a kernel supports both layouts.
        This does not change their type. On GPUs, results of blocks along the rows are always transposed.
    """

    spec: TensorSpec
    block: tuple[int, ...]
    floor: float
    has_elements: bool = True
    has_values: bool = False
    is_transposed: bool = False


class Blocks(NamedTuple):
    """Results of a cast: elements with their scales, and values; None if they were not requested."""

    tensor: QTensor | None
    values: BFloat16[Array, "M N"] | None


def block_quantize(x: Float[Array, "M N"], casts: tuple[Cast, ...]) -> tuple[Blocks, ...]:
    """Compute ``scale = amax / bound`` of each block, rounded as in the spec, and ``q = cast(x / scale)``.

    Values are ``q · scale``, computed in float32 and rounded once to bfloat16.

    Args:
      x: matrix of whole blocks, float32 or bfloat16.
      casts: independent casts of x.
    """
    return tuple(_cast(x, cast) for cast in casts)


def kernel_name(casts: tuple[Cast, ...]) -> str:
    """Return a kernel's name; the audit reads its suffix, which marks the slower blocks of 32."""
    return NAME + ("_32" if any(32 in cast.block for cast in casts) else "")


def stored_scale(scale: Float[Array, "*shape"], spec: TensorSpec) -> Array:
    """Return float32 scales in the dtype of a spec; e8m0 stores only powers of two and NaN."""
    if spec.scale_dtype != "float8_e8m0fnu":
        return scale
    exponent = jax.lax.bitcast_convert_type(scale, jnp.int32) >> _MANTISSA_BITS & 0xFF
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)


def _cast(x: Array, cast: Cast) -> Blocks:
    scale = compute_scale(x, cast.spec, cast.block, cast.floor).scale
    tensor = quantize_with_scale(x, cast.spec, scale)
    values = dequantize(tensor, "bfloat16") if cast.has_values else None
    return Blocks(tensor if cast.has_elements else None, values)
