"""``quantize`` of tensors of any rank, on the platform for which a program is compiled."""

from __future__ import annotations

import functools
import math

import jax
from jaxtyping import Array, Float, Shaped

from jaxquant.core.sharding import platform_of
from jaxquant.kernels import DTYPES
from jaxquant.kernels.platforms import capability_of, is_interpretable, load_kernel, platform_refusal, sharding_refusal
from jaxquant.kernels.quantize import reference
from jaxquant.kernels.varying import vary_alike


def refusal(x: Array, scale: Array, *, dtype: str, compute_dtype: str, split: int | None = None) -> str | None:
    """Return the reason why the kernel cannot quantize a tensor, or None if it can.

    Args:
      x, scale, dtype, compute_dtype, split: arguments of ``quantize``.
    """
    if dtype not in DTYPES:
        return f"the quantize kernel writes {', '.join(DTYPES)}, not {dtype}"
    if x.dtype.name not in ("float32", "bfloat16"):
        return f"the quantize kernel reads float32 and bfloat16, not {x.dtype.name}"
    if not x.size or not x.ndim:
        return f"the quantize kernel does not support a tensor of shape {x.shape}"
    if why := sharding_refusal(x, scale) or platform_refusal("quantize", x):
        return why
    if platform_of(x) != "gpu":
        return None
    options = {"dtype": dtype, "compute_dtype": compute_dtype, "capability": capability_of(x)}
    return load_kernel("quantize", "gpu").refusal(_matrix(x.shape, split), x.dtype.name, **options)


def _matrix(shape: tuple[int, ...], split: int | None) -> tuple[int, int]:
    """Return the rows and columns of a tensor whose axes are split before axis ``split`` (default: the last axis)."""
    split = len(shape) - 1 if split is None else split
    return math.prod(shape[:split]), math.prod(shape[split:])


def quantize(
    x: Float[Array, "*shape"],
    scale: Float[Array, "*ones"],
    *,
    dtype: str,
    compute_dtype: str = "float32",
    split: int | None = None,
) -> tuple[Shaped[Array, "*shape"], Shaped[Array, "*shape"], Float[Array, ""]]:
    """Return the quantized elements of a tensor, a copy of them, and the amax; ``refusal`` must return None.

    Args:
      x: tensor, float32 or bfloat16.
      scale: one float32 number.
      dtype, compute_dtype: arguments of ``reference.quantize``.
      split: first axis in the memory of the copy, followed by the axes after it. If ``split`` is None, the
        kernel makes no copy and returns the elements twice. Only GPUs have a kernel that writes a copy.
    """
    (matrix, scales), _ = vary_alike(x.reshape(_matrix(x.shape, split)), scale.reshape(1, 1))
    on = functools.partial(functools.partial, dtype=dtype, compute_dtype=compute_dtype)
    copies, where = {"transposed": split is not None}, {}
    if split is None:
        tpu = load_kernel("quantize", "tpu")
        where["tpu"] = on(tpu.quantize)
        if is_interpretable(matrix):
            where["cpu"] = on(tpu.quantize, interpret=True, in_steps=False)
    if platform_of(x) == "gpu":
        where["cuda"] = on(load_kernel("quantize", "gpu").quantize, **copies)
    out = jax.lax.platform_dependent(matrix, scales, **where, default=on(reference.quantize, **copies))
    q = out.q.reshape(x.shape)
    if split is None:
        return q, q, out.amax
    copy = out.q_t.reshape(*x.shape[split:], *x.shape[:split])
    return q, copy.transpose((*range(x.ndim - split, x.ndim), *range(x.ndim - split))), out.amax
