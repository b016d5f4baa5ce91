"""What is kept for the backward pass: remat policies of quantized layers, and float functions that keep FP8 inputs."""

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
"""Remat policy that keeps what quantized layers save for backward (one byte an element) and recomputes the rest.

The results of matmuls are part of the rest: they are computed again wherever a norm, a gate or attention needs them.
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
"""Primitives whose results are kept: matmuls under other names, cuDNN's attention, kernels such as splash attention."""
_CASTS = (f"{KERNEL_PREFIX}quantize", f"{KERNEL_PREFIX}block_quantize")
"""How the names of kernels begin whose results are not: casts."""


def save_matmuls(primitive: Primitive, *operands: Any, **parameters: Any) -> bool:
    """Decide what ``jax.checkpoint`` keeps: the results of matmuls, of attention kernels and of other kernels.

    The backward pass then runs no quantized matmul, no float matmul without batch axes and no attention kernel a second
    time. It recomputes norms, gates, rotations and the casts to 8 bits. Of a quantized matmul the result in its own
    dtype is kept, not the sum before its scales. Float matmuls with batch axes are recomputed, as
    ``dots_with_no_batch_dims_saveable`` does: the scores of attention without a kernel are such, and take more memory
    than all the rest.

    Args:
      primitive: the operation, as ``jax.checkpoint`` asks of a policy.
      operands: their abstract values.
      parameters: of the operation.
    """
    if primitive.name == "name":
        return parameters["name"] == RESULT_NAME
    if primitive.name == "pallas_call" and str(parameters["name"]).startswith(_CASTS):
        return False
    is_dot = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **parameters)
    return bool(is_dot) or primitive.name in _KERNELS


# -- residuals in 8 bits -----------------------------------------------------------------------------------------------

_GROUP = 128
"""Neighbours that share a scale, at most: the largest divisor of the axis, all of it where that is below ``_LEAST``."""
_LEAST = 16


def compress_residuals(function: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """Return a function that keeps arguments in FP8 for its backward pass; its results stay the same to the bit.

    Of a norm, a gate or another function without a matmul the backward pass is computed again from arguments that were
    rounded to e4m3, each group of up to 128 neighbours along the last axis by its own scale: 1.03 bytes an element.
    Gradients are those of the function at the rounded arguments.

        gate = jaxquant.compress_residuals(lambda a, b: jax.nn.silu(a) * b, argnums=(0, 1))

    The FP8 arrays carry the name that ``jaxquant.save_quantized`` keeps. Other remat policies compute them again, and
    save nothing by it.

    Args:
      function: of positional arguments, trees of arrays. It must not close over what gets a gradient: hand that in.
      argnums: arguments whose float arrays of 16 elements or more along the last axis are kept in FP8. The others are
        kept as they are.

    Raises:
      ValueError: from the call, an argument number that the call does not have.
      TypeError: from the call, an argument by name.

    Source: FP8 activations of COAT (arXiv 2410.19313), section 5.
    """
    places = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    name = getattr(function, "__name__", "the function")

    @functools.wraps(function)
    def compressed(*arguments: Any, **named: Any) -> Any:
        if named:
            raise TypeError(
                f"compress_residuals: {name} was called with {', '.join(named)} by name; pass arguments by position, "
                "and bind what is not an array with functools.partial"
            )
        for place in places:
            if not -len(arguments) <= place < len(arguments):
                raise ValueError(
                    f"compress_residuals: argnums has {place}, and {name} was called with {len(arguments)} arguments"
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
    """An array in FP8, and the dtype that it had."""

    tensor: QTensor
    dtype: str


def _compress(x: jax.Array) -> jax.Array | _Compressed:
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1 or jnp.shape(x)[-1:] < (_LEAST,):
        return x
    size = x.shape[-1]
    group = next((each for each in range(min(_GROUP, size), _LEAST - 1, -1) if size % each == 0), size)
    (x,) = first_order("compress_residuals", (x,))  # second derivatives would go through the rounding
    tensor = quantize(x, TensorSpec("float8_e4m3fn", "per_tile", tile_size=group), axes=(x.ndim - 1,))
    return _Compressed(jax.tree.map(lambda part: checkpoint_name(part, RESIDUAL_NAME), tensor), x.dtype.name)


def _decompress(x: jax.Array | _Compressed) -> jax.Array:
    return dequantize(x.tensor, x.dtype) if isinstance(x, _Compressed) else x
