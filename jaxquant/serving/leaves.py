"""Leaves of a quantized checkpoint: description, arrays on disk, and comparison with a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jaxquant.core.qtensor import QTensor, check
from jaxquant.export.safetensors import TYPE_NAMES
from jaxquant.formats.packing import PACKED_DTYPES

_AS_BYTES = ("float8_e4m3fnuz", "float8_e5m2fnuz")
"""Elements that are stored as uint8, because some readers of safetensors files do not support them."""
_SCALES = ("scale", "outer_scale", "input_scale")
_OPTIONAL = ("outer_shape", "input_shape", "block", "codec", "float_dtype", "read_as")
_WIDE = ("int64", "uint64", "float64")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the parameters: an array or a ``QTensor``.

    Attributes:
      path: keys joined by "/".
      role: kind of the leaf; "quantized" is a ``QTensor``.
      dtype, shape: dtype and shape of the elements in the model.
      bytes: bytes on disk.
      scale_shape, scale_dtype: shape and dtype of the scale of a ``QTensor``.
      zero_point: whether the ``QTensor`` has a zero point, which has the dtype ``dtype`` and the shape ``scale_shape``.
      outer_shape, input_shape: shapes of the outer scale and of the input scale, both float32, or None.
      block: block shape of a ``QTensor`` if its array shapes do not determine it, otherwise None.
      codec: tensor format of a ``QTensor`` without scales; ``shape`` is then the shape of its bytes.
      float_dtype, read_as: ``dtype`` and ``read_as`` of a ``QTensor``.
    """

    path: str
    role: Literal["array", "quantized"]
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    scale_shape: tuple[int, ...] | None = None
    scale_dtype: str | None = None
    zero_point: bool = False
    outer_shape: tuple[int, ...] | None = None
    input_shape: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    codec: str | None = None
    float_dtype: str | None = None
    read_as: str | None = None

    def arrays(self) -> dict[str, StoredArray]:
        """Return the stored arrays by path; a ``QTensor`` has one to five arrays."""
        if self.role == "array":
            return {self.path: StoredArray(self.path, self.shape, self.dtype)}
        paths = {f"{self.path}/{name}": of for name, of in self._parts().items()}
        return {path: StoredArray(path, *of) for path, of in paths.items()}

    def as_row(self) -> dict[str, Any]:
        """Return the fields for the manifest, without empty optional fields."""
        row = dataclasses.asdict(self)
        return {name: value for name, value in row.items() if value or name not in _OPTIONAL}

    def _parts(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype of each part of a ``QTensor``, in the order of its fields."""
        parts: dict[str, Any] = {"qvalue": (self.shape, self.dtype)}
        if self.codec is None:
            parts["scale"] = (self.scale_shape, self.scale_dtype)
        if self.zero_point:
            parts["zero_point"] = (self.scale_shape, self.dtype)
        for name, shape in (("outer_scale", self.outer_shape), ("input_scale", self.input_shape)):
            if shape is not None:
                parts[name] = (shape, "float32")
        return parts

    def assemble(self, arrays: Mapping[str, Any]) -> Any:
        """Build the leaf from a mapping of path to array."""
        if self.role == "array":
            return arrays[self.path]
        parts = {name: arrays[f"{self.path}/{name}"] for name in self._parts()}
        return QTensor(**parts, block=self.block, codec=self.codec, dtype=self.float_dtype, read_as=self.read_as)


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint: ``shape`` and ``dtype`` in the model, ``stored_*`` on disk."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_packed(self) -> bool:
        return self.dtype in PACKED_DTYPES

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], -(-self.shape[-1] // 2)) if self.is_packed else self.shape

    @property
    def stored_dtype(self) -> str:
        return "uint8" if self.is_packed or self.dtype in _AS_BYTES else self.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.stored_shape) * jnp.dtype(self.stored_dtype).itemsize


def flatten(params: Mapping[str, Any], empty: bool = False) -> dict[str, Any]:
    """Return the arrays and ``QTensor`` leaves by path, sorted by path.

    Args:
      params: nested dict of arrays and ``QTensor``.
      empty: whether empty mappings are allowed; the result omits these mappings.

    Raises:
      TypeError: a node is not a mapping, array or ``QTensor``, or a key is not a string.
      ValueError: a key is empty or contains "/", a mapping is empty, or there is no leaf.
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be a nested dict, got {type(params).__name__}; pass the parameters")
    leaves = dict(sorted(_walk(params, (), empty)))
    if not leaves:
        raise ValueError("params are an empty dict; pass the parameters of a model")
    return leaves


def _walk(node: Any, keys: tuple[str, ...], empty: bool) -> Iterable[tuple[str, Any]]:
    path = "/".join(keys)
    if isinstance(node, Mapping):
        if keys and not node and not empty:
            raise ValueError(f"{path} is an empty dict, which a checkpoint cannot store; remove {path}")
        for key, child in node.items():
            if not isinstance(key, str):
                raise TypeError(f"{path or 'params'} has the key {key!r} of type {type(key).__name__}; use string keys")
            if not key or "/" in key:
                raise ValueError(f'{path or "params"} has the key {key!r}; use a key that is not empty and has no "/"')
            yield from _walk(child, (*keys, key), empty)
    elif isinstance(node, QTensor) or (hasattr(node, "shape") and hasattr(node, "dtype")):
        yield path, node
    else:
        raise TypeError(f"{path} must be an array or a QTensor, got {type(node).__name__}")


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dict for a result of ``flatten``."""
    return unflatten_dict(dict(leaves), sep="/")


def describe(path: str, leaf: Any) -> Leaf:
    """Return the description of a leaf; the leaf may be abstract.

    Raises:
      ValueError: the dtype or shape cannot be stored.
    """
    is_quantized = isinstance(leaf, QTensor)
    elements = leaf.qvalue if is_quantized else leaf
    dtype, shape = _dtype_name(path, elements), tuple(elements.shape)
    described = Leaf(path, "array", dtype, shape, 0)
    if is_quantized:
        check(leaf, path)
        fields = {name: getattr(leaf, name) for name in ("block", "codec", "read_as")} | {"float_dtype": leaf.dtype}
        fields |= {f"{name.split('_')[0]}_shape": tuple(x.shape) for name, x in leaf.parts.items() if name in _SCALES}
        if leaf.codec is None:
            fields["scale_dtype"] = _dtype_name(path, leaf.scale)
        described = dataclasses.replace(described, role="quantized", zero_point="zero_point" in leaf.parts, **fields)
    for array in described.arrays().values():
        if array.is_packed and not array.shape:
            raise ValueError(f"{array.path} is a scalar {array.dtype}, which cannot be stored; reshape to (1,)")
        if 0 in array.shape:
            raise ValueError(f"{array.path} has shape {array.shape} and no elements; remove {array.path}")
    return dataclasses.replace(described, bytes=sum(array.bytes for array in described.arrays().values()))


def _dtype_name(path: str, array: Any) -> str:
    name = array.dtype.name
    if name in _WIDE and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"{path} is {name}, which JAX would load in 32 bits; cast {path}, or set jax_enable_x64")
    if name not in PACKED_DTYPES and array.dtype not in TYPE_NAMES:
        supported = ", ".join((*PACKED_DTYPES, *(dtype.name for dtype in TYPE_NAMES)))
        raise ValueError(f"{path} has dtype {name}, which a checkpoint cannot store; supported dtypes: {supported}")
    return name


def check_like(directory: Any, leaves: Iterable[Leaf], like: Mapping[str, Any]) -> None:
    """Compare a checkpoint with the tree that a model expects.

    Raises:
      ValueError: the trees differ. The message lists missing and extra paths, and leaves with another role, shape or
        dtype.
    """
    stored = {leaf.path: leaf for leaf in leaves}
    expected = {path: describe(path, leaf) for path, leaf in flatten(like, empty=True).items()}
    lines = []
    if stored.keys() != expected.keys():
        lines.append(f"missing in the checkpoint: {', '.join(sorted(expected.keys() - stored.keys())) or 'none'}")
        lines.append(f"not in the model: {', '.join(sorted(stored.keys() - expected.keys())) or 'none'}")
    for path in sorted(stored.keys() & expected.keys()):
        differences = _differences(stored[path], expected[path])
        lines += [f"{path}: {'; '.join(differences)}"] if differences else []
    if lines:
        raise ValueError(
            f"checkpoint {directory} does not match the model; use the model and the config that the checkpoint "
            "was converted from:" + "".join(f"\n  {line}" for line in lines)
        )


def _differences(stored: Leaf, expected: Leaf) -> list[str]:
    names = [name for name in ("role", "shape", "dtype") if getattr(stored, name) != getattr(expected, name)]
    if "role" not in names:
        # Layers use a weight in the dtype ``read_as``; the dtype of the float parameter may differ.
        more = ("scale_shape", "scale_dtype", "zero_point", *(name for name in _OPTIONAL if name != "float_dtype"))
        names += [name for name in more if getattr(stored, name) != getattr(expected, name)]
    return [
        f"{name} {getattr(stored, name)} in the checkpoint, {getattr(expected, name)} in the model" for name in names
    ]
