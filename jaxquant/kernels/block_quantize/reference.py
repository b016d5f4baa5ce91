"""The meaning of ``block_quantize``: the cast of core/quantize.py, once for each shape of blocks."""

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
"""How the kernels' names begin in traced and in compiled programs; see ``kernel_name``."""
_MANTISSA_BITS = 23


class Cast(NamedTuple):
    """One quantization of a matrix.

    Attributes:
      spec: element, scales and rounding.
      block: how many neighbours share a scale along each axis: rows and columns of a matrix.
      floor: scales below it become 1.
      has_elements: whether the elements and their scales are returned.
      has_values: whether they are returned dequantized, in bfloat16.
      is_turned: whether results of square blocks lie transposed in memory, where a kernel has a choice; their type is
        the same. Results of blocks along the rows lie so on GPUs.
    """

    spec: TensorSpec
    block: tuple[int, ...]
    floor: float
    has_elements: bool = True
    has_values: bool = False
    is_turned: bool = False


class Blocks(NamedTuple):
    """What a cast returns: elements with their scales, and their values; None for what it was not asked for."""

    tensor: QTensor | None
    values: BFloat16[Array, "M N"] | None


def block_quantize(x: Float[Array, "M N"], casts: tuple[Cast, ...]) -> tuple[Blocks, ...]:
    """Compute ``scale = amax / bound`` of each block, rounded as the spec says, and ``q = cast(x / scale)``.

    Values are ``q · scale``, computed in float32 and rounded once to bfloat16.

    Args:
      x: float32 or bfloat16; whole blocks.
      casts: each for itself, out of one read of x.
    """
    return tuple(_cast(x, cast) for cast in casts)


def kernel_name(casts: tuple[Cast, ...]) -> str:
    """Return a kernel's name, by which an audit knows blocks of 32, which take longer."""
    return NAME + ("_32" if any(32 in cast.block for cast in casts) else "")


def stored_scale(scale: Float[Array, "*shape"], spec: TensorSpec) -> Array:
    """Return float32 scales in the dtype of a spec: e8m0's are the exponents of powers of two, and NaN."""
    if spec.scale_dtype != "float8_e8m0fnu":
        return scale
    exponent = jax.lax.bitcast_convert_type(scale, jnp.int32) >> _MANTISSA_BITS & 0xFF
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)


def _cast(x: Array, cast: Cast) -> Blocks:
    scale = compute_scale(x, cast.spec, cast.block, cast.floor).scale
    tensor = quantize_with_scale(x, cast.spec, scale)
    values = dequantize(tensor, "bfloat16") if cast.has_values else None
    return Blocks(tensor if cast.has_elements else None, values)
