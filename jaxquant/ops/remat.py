"""Memory of the backward pass: remat policies of quantized layers, and float functions that save inputs in FP8."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec
from jaxquant.kernels import KERNEL_PREFIX
from jaxquant.ops.gradients import RESIDUAL_NAME, RESULT_NAME, first_order

save_quantized = jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME)
"""Remat policy that keeps the residuals of quantized layers (one byte an element) and recomputes the rest.

The rest includes the results of matmuls: matmuls run again if a norm, a gate or attention needs their results.
"""

_KERNELS = frozenset(
    {
        "conv_general_dilated",
        "dot_product_attention_fp8_fwd_wrapper",
        "dot_product_attention_fwd_wrapper",
        "pallas_call",
        "ragged_dot_general",
    }
)
"""Primitives whose results are kept: other matmuls, cuDNN's attention, and kernels such as splash attention."""
_CASTS = (f"{KERNEL_PREFIX}quantize", f"{KERNEL_PREFIX}block_quantize")
"""Name prefixes of kernels whose results are not kept: casts."""


def save_matmuls(primitive: Primitive, *operands: Any, **parameters: Any) -> bool:
    """Remat policy for ``jax.checkpoint``: keep the results of matmuls, attention kernels and other kernels.

    The backward pass then repeats no quantized matmul, no float matmul without batch axes and no attention kernel. It
    recomputes norms, gates, rotations and the casts to 8 bits. The result of a quantized matmul is kept in its own
    dtype, after its scales are applied. Float matmuls with batch axes are recomputed, as in
    ``dots_with_no_batch_dims_saveable``: among them are the scores of attention without a kernel, which take more
    memory than everything else.

    Args:
      primitive: primitive of the operation, as ``jax.checkpoint`` passes it to a policy.
      operands: abstract values of the operands.
      parameters: parameters of the operation.
    """
    if primitive.name == "name":
        return parameters["name"] == RESULT_NAME
    if primitive.name == "pallas_call" and str(parameters["name"]).startswith(_CASTS):
        return False
    is_dot = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **parameters)
    return bool(is_dot) or primitive.name in _KERNELS


# -- residuals in 8 bits -----------------------------------------------------------------------------------------------

_GROUP = 128
"""Largest number of neighbours that share a scale: the largest divisor of the axis, or the whole axis if that divisor
is below ``_LEAST``."""
_LEAST = 16


def compress_residuals(function: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """Return a function that keeps arguments in FP8 for its backward pass; its results are bit for bit the same.

    The backward pass recomputes a norm, a gate or another function without a matmul from arguments rounded to e4m3.
    Each group of up to 128 neighbours along the last axis has its own scale: 1.03 bytes an element. The gradients are
    the function's gradients at the rounded arguments.

        gate = jaxquant.compress_residuals(lambda a, b: jax.nn.silu(a) * b, argnums=(0, 1))

    The FP8 arrays have the name that ``jaxquant.save_quantized`` keeps. Other remat policies recompute them, which
    saves no memory.

    Args:
      function: function of positional arguments, which are pytrees of arrays. Pass every array that needs a gradient as
        an argument; the function must not close over it.
      argnums: arguments whose float arrays of 16 elements or more along the last axis are kept in FP8. Other arrays
        keep their dtype.

    Raises:
      ValueError: one of the argument numbers is out of range for the call.
      TypeError: the call passes an argument by name.

    Source: FP8 activations of COAT (arXiv 2410.19313), section 5.
    """
    places = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    name = getattr(function, "__name__", "the function")

    @functools.wraps(function)
    def compressed(*arguments: Any, **named: Any) -> Any:
        if named:
            raise TypeError(
                f"compress_residuals: {name} got {', '.join(named)} as keyword arguments; pass arrays by position, "
                "and bind other arguments with functools.partial"
            )
        for place in places:
            if not -len(arguments) <= place < len(arguments):
                raise ValueError(
                    f"compress_residuals: argnums has {place}, but {name} got {len(arguments)} arguments; count from 0"
                )
        return run(*arguments)

    def plain(*arguments: Any) -> Any:
        return function(*arguments)

    plain.__name__ = name
    run = jax.custom_vjp(plain)

    def forward(*arguments: Any) -> Any:
        chosen = {place % len(arguments) for place in places}
        kept = [jax.tree.map(_compress, x) if i in chosen else x for i, x in enumerate(arguments)]
        return function(*arguments), kept

    def backward(kept: Any, grad: Any) -> Any:
        arguments = jax.tree.map(_decompress, kept, is_leaf=lambda x: isinstance(x, _Compressed))
        return jax.vjp(function, *arguments)[1](grad)

    run.defvjp(forward, backward)
    return compressed


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tensor"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class _Compressed:
    """An array in FP8, and its original dtype."""

    tensor: QTensor
    dtype: str


def _compress(x: jax.Array) -> jax.Array | _Compressed:
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1 or jnp.shape(x)[-1:] < (_LEAST,):
        return x
    size = x.shape[-1]
    group = next((each for each in range(min(_GROUP, size), _LEAST - 1, -1) if size % each == 0), size)
    (x,) = first_order("compress_residuals", (x,))  # second derivatives would differentiate the rounding
    tensor = quantize(x, TensorSpec("float8_e4m3fn", "per_tile", tile_size=group), axes=(x.ndim - 1,))
    return _Compressed(jax.tree.map(lambda part: checkpoint_name(part, RESIDUAL_NAME), tensor), x.dtype.name)


def _decompress(x: jax.Array | _Compressed) -> jax.Array:
    return dequantize(x.tensor, x.dtype) if isinstance(x, _Compressed) else x
