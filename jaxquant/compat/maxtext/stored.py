"""Names and data structures of AQT's ops: names of Linen modules, the config that experts read, and stored kernels.

Models that pass ops to layers depend on these names and structures, so the ops of the native backend use them too.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp

from jaxquant.backends import native
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import QTensor
from jaxquant.core.recipe import Recipe, TensorSpec

Op = Literal["dot_general", "einsum"]
_AQT_NAMES: dict[Op, str] = {"dot_general": "AqtDotGeneral", "einsum": "AqtEinsum"}


def op_name(backend: str, op: Op, recipe: Recipe | None) -> str:
    """Return the name of the Linen module of a layer's op; Linen uses the name in the paths of variables."""
    return _AQT_NAMES[op] if backend == "aqt" else native.op_name(op, recipe)


def inner_op_name(backend: str) -> str:
    """Return the name of the ``dot_general`` module inside a layer's einsum, or "" if there is no inner module."""
    return f"{_AQT_NAMES['dot_general']}_0" if backend == "aqt" else ""


def forward_config(backend: str, recipe: Recipe) -> Any:
    """Return the forward operands in the layout of AQT's config, such as ``fwd.dg_quantizer.lhs.numerics``.

    MaxText's experts call ``numerics.get_dtype()`` for the dtypes of their grouped matmul; None is float.
    """
    if backend == "aqt":
        from jaxquant.backends.aqt_config import to_aqt

        return to_aqt(recipe)
    sides = {side: types.SimpleNamespace(numerics=_numerics(recipe.resolve("fwd", side))) for side in ("lhs", "rhs")}
    return types.SimpleNamespace(fwd=types.SimpleNamespace(dg_quantizer=types.SimpleNamespace(**sides)))


def freeze(
    backend: str, recipe: Recipe, kernel: QTensor, axes: Sequence[int], names: Sequence[str | None]
) -> tuple[Any, Sequence[str | None]]:
    """Return a converted kernel in its stored form, which is AQT's tensor for backend ``aqt``, and its axis names.

    Args:
      backend: key of ``BACKENDS``.
      recipe: recipe of the layer.
      kernel: converted kernel.
      axes: contraction axes of the kernel.
      names: names of all axes. A tiled axis becomes two axes, of which only the axis inside the tile has a name.
    """
    if backend != "aqt":
        return kernel, names
    from jaxquant.backends import aqt

    cut = () if aqt.tile_size(recipe) is None else axes
    inner = [part for axis, name in enumerate(names) for part in ((None, name) if axis in cut else (name,))]
    return aqt.freeze(recipe, kernel, axes), inner


def thaw(backend: str, stored: Any, ndim: int, axes: Sequence[int]) -> QTensor:
    """Return the kernel that ``freeze`` stored; its rank is ``ndim`` and its contraction axes are ``axes``."""
    if backend != "aqt":
        return stored
    from jaxquant.backends import aqt

    return aqt.thaw(stored, ndim, axes)


def _numerics(spec: TensorSpec | None) -> Any:
    """Return the dtype of a quantized operand in an object with the attributes of AQT's numerics."""
    dtype = None if spec is None else jnp.dtype(spec.dtype)
    bits = None if spec is None else element(spec.dtype).bits
    return types.SimpleNamespace(dtype=dtype, bits=bits, get_dtype=lambda: dtype)
