"""Names, shapes and dtypes of the tensors of a checkpoint, from arrays or from a safetensors header."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

SAFETENSORS = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn",
    "BF16": "bfloat16",
    "BOOL": "bool",
}
SAFETENSORS |= {f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}
SAFETENSORS |= {f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
"""Dtype name of each type name in safetensors headers, without six-bit types, which numpy does not support."""
_DTYPES = frozenset((*SAFETENSORS.values(), "int4", "uint4"))


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype name of a tensor, and its value if it is a scalar with a known value."""

    shape: tuple[int, ...]
    dtype: str
    value: float | None = None


def dtype_name(dtype: Any, place: str) -> str:
    """Return the name of a dtype that is written as a name, a safetensors name, ``torch.…`` or a dtype object.

    Raises:
      TypeError: the value is not a dtype.
    """
    if dtype is None:
        raise TypeError(f"{place} must be a dtype, got None")
    text = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype)
    text = SAFETENSORS.get(text, str(text).removeprefix("torch."))
    if text == "float4_e2m1fnx2":
        text = "uint8"
    if text in _DTYPES:
        return text
    try:
        return np.dtype(dtype).name if not isinstance(dtype, str) else jax.numpy.dtype(text).name
    except TypeError:
        raise TypeError(f"{place} has the unknown dtype {dtype!r}") from None


def read_tensors(tensors: Mapping[str, Any] | None) -> dict[str, TensorInfo]:
    """Return the tensors of a checkpoint.

    Args:
      tensors: mapping from names to arrays, to ``(shape, dtype)`` pairs, or to the entries of a safetensors header,
        ``{"shape": …, "dtype": …}``.

    Raises:
      TypeError: a value has the wrong type; the message names the tensor.
    """
    if tensors is None:
        return {}
    return {name: _read_info(name, value) for name, value in tensors.items() if name != "__metadata__"}


def _read_info(name: str, value: Any) -> TensorInfo:
    if isinstance(value, TensorInfo):
        return value
    if isinstance(value, Mapping):
        shape, dtype = value.get("shape"), value.get("dtype")
    elif isinstance(value, tuple) and len(value) == 2:
        shape, dtype = value
    else:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(name, str) or dtype is None or not isinstance(shape, (list, tuple)):
        raise TypeError(f"tensor {name!r} must be an array, (shape, dtype) or a header entry, got {value!r:.80}")
    if any(isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0 for size in shape):
        raise TypeError(f"tensor {name!r} has the shape {shape!r:.80}, which does not consist of integers")
    single = None
    if int(np.prod(shape, dtype=object)) == 1 and hasattr(value, "__array__"):
        single = float(np.asarray(value, np.float32).reshape(()))
    return TensorInfo(tuple(map(int, shape)), dtype_name(dtype, f"tensor {name!r}"), single)
