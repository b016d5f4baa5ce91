"""Reader and writer of GGUF containers (version 3, little endian): metadata by key, then aligned tensors.

The reader maps the file into memory and checks every length and offset before use.

Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxquant.config.loader import check_ordinary
from jaxquant.core.typed import show
from jaxquant.export.layouts import check_finite, decode_blocks, encode_blocks
from jaxquant.formats import CODECS

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
_MAX_AXES, _MAX_DEPTH = 4, 2

TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20, "IQ3_S": 21,
    "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40,
}  # fmt: skip
"""Numbers of the supported tensor types. The package gguf decodes types that are not in ``OWN``."""
OWN = {row.encoding: row for row in CODECS.values() if row.encoding}
"""Codec of each tensor type that jaxquant decodes without the package gguf."""
_OTHERS = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0"}
"""Names of unsupported types, for errors."""
_TYPE_NAMES = {number: name for name, number in TYPES.items()}
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_NUMPY = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8"}


class U32(int):
    """An integer that is written as uint32, like most metadata of a model."""


def row_bytes(kind: str, columns: int) -> int:
    """Return the size in bytes of a row of ``columns`` elements of a tensor type.

    Raises:
      ValueError: the block size of the type does not divide ``columns``.
    """
    elements, size = block_parameters(kind)
    if columns % elements:
        raise ValueError(f"a row of {columns} elements is not a multiple of the block size {elements} of {kind}")
    return columns // elements * size


def block_parameters(kind: str) -> tuple[int, int]:
    """Return the number of elements and the number of bytes in a block of a tensor type."""
    if kind in OWN:
        return OWN[kind].elements_per_block, OWN[kind].bytes_per_block
    return (1, 4) if kind == "F32" else _package(kind).GGML_QUANT_SIZES[_package(kind).GGMLQuantizationType[kind]]


def decode(kind: str, data: np.ndarray) -> np.ndarray:
    """Decode rows of encoded bytes of a block type to float32."""
    if kind in OWN:
        return decode_blocks(kind, data)
    with np.errstate(all="ignore"):
        return _package(kind).quants.dequantize(data, _package(kind).GGMLQuantizationType[kind])


def encode(kind: str, rows: np.ndarray) -> np.ndarray:
    """Encode float32 rows in a block type; the package gguf encodes the types that are not in ``OWN``."""
    if kind in OWN:
        return encode_blocks(kind, rows)
    return _package(kind).quants.quantize(np.asarray(rows), _package(kind).GGMLQuantizationType[kind])


def _package(kind: str) -> Any:
    try:
        import gguf  # optional package that only some tensor types need
    except ImportError:
        raise NotImplementedError(f"tensor type {kind} needs the package gguf; install it: pip install gguf") from None
    return gguf


class Tensor(NamedTuple):
    """Header entry of a tensor: type name, shape (contiguous axis last), offset of the first byte, size in bytes."""

    kind: str
    shape: tuple[int, ...]
    start: int
    bytes: int


def encode_text(value: str) -> bytes:
    """Return the encoding of a string: its length, then its UTF-8 bytes."""
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _encode_value(value: Any) -> bytes:
    """Return the encoding of a metadata value with its type: str, bool, int32, ``U32``, float32, or a list of these."""
    if isinstance(value, list):
        kinds = {_type_number(each) for each in value} or {_STRING}
        if len(kinds) > 1:
            raise ValueError(f"a GGUF array must have elements of one type, got {show(value)}")
        (kind,) = kinds
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(_encode_payload(kind, each) for each in value)
    return struct.pack("<I", _type_number(value)) + _encode_payload(_type_number(value), value)


def _type_number(value: Any) -> int:
    for kind, number in ((bool, _BOOL), (U32, 4), (int, 5), (float, 6), (str, _STRING)):
        if isinstance(value, kind):
            return number
    raise TypeError(f"GGUF metadata cannot hold a {type(value).__name__}")


def _encode_payload(kind: int, value: Any) -> bytes:
    return encode_text(value) if kind == _STRING else struct.pack(_SCALARS[kind], value)


def header(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the bytes before the tensor data, padded to the alignment.

    Args:
      metadata: values by key, of the types that ``_encode_value`` encodes.
      tensors: type and shape by name, in the order in which the tensors follow; each is padded to the alignment.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [encode_text(key) + _encode_value(value) for key, value in metadata.items()]
    offset = 0
    for name, (kind, shape) in tensors.items():
        parts.append(encode_text(name) + struct.pack("<I", len(shape)))
        parts.append(struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", TYPES[kind], offset))
        offset += align_up(row_bytes(kind, shape[-1]) * math.prod(shape[:-1]))
    data = b"".join(parts)
    return data.ljust(align_up(len(data)), b"\0")


def align_up(size: int, alignment: int = ALIGNMENT) -> int:
    """Return a size rounded up to a multiple of the alignment."""
    return -(-size // alignment) * alignment


class GgufFile:
    """A memory-mapped GGUF file.

    Attributes:
      metadata: values by key; arrays of numbers are numpy arrays.
      tensors: types, shapes and positions of the tensors, by name.

    Args:
      path: path of the file.

    Raises:
      ValueError: the file is not a GGUF file, or its header is invalid.
      NotImplementedError: the version or a tensor type is not supported.
      OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        check_ordinary(self.path)
        with self.path.open("rb") as file:
            if self.path.stat().st_size < 24:
                raise ValueError(f"{path} is not a GGUF file: it has fewer than 24 bytes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._read_bytes(4) != MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it does not begin with GGUF")
        version, count, keys = self._unpack("<I"), self._unpack("<Q"), self._unpack("<Q")
        if version != VERSION:
            raise NotImplementedError(f"{path} is GGUF version {version}, but only version {VERSION} is supported")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._read_text()
            if key in self.metadata:
                raise ValueError(f"{path} has the metadata key {show(key)} twice; convert the model again")
            self.metadata[key] = self._read_value(self._unpack("<I"), 0)
        self.tensors = self._read_tensors(count)

    def raw(self, name: str, index: Any = ...) -> np.ndarray:
        """Return the encoded bytes of a tensor, or of one index of its first axis, as a view of the file."""
        tensor = self.tensors[name]
        self._map.madvise(mmap.MADV_DONTNEED)  # removes the pages of the tensor that was read before; views stay valid
        flat = np.frombuffer(self._map, np.uint8, tensor.bytes, tensor.start)
        return flat.reshape(*tensor.shape[:-1], row_bytes(tensor.kind, tensor.shape[-1]))[index]

    def read(self, name: str, index: Any = ...) -> np.ndarray:
        """Return a tensor, or one index of its first axis, decoded to float32; raises if a value is not finite."""
        tensor, data = self.tensors[name], self.raw(name, index)
        if tensor.kind in ("F32", "F16"):
            stored = np.ascontiguousarray(data).view("<f4" if tensor.kind == "F32" else "<f2")
            array = stored.reshape(*data.shape[:-1], tensor.shape[-1]).astype(np.float32, copy=False)
        else:
            array = decode(tensor.kind, data)
        return check_finite(array, f"{self.path}: tensor {show(name)}")

    def _read_tensors(self, count: int) -> dict[str, Tensor]:
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            raise ValueError(f"{self.path} has general.alignment {show(alignment)}; must be a power of 2 up to 2**20")
        tensors: dict[str, Tensor] = {}  # offsets are relative to the end of the header
        end = 0
        for _ in range(count):
            name = self._read_text()
            place = f"{self.path}: tensor {show(name)}"
            axes = self._unpack("<I")
            if name in tensors or not 1 <= axes <= _MAX_AXES:
                raise ValueError(f"{place} has {axes} axes (1 to 4 are supported), or occurs twice")
            shape = tuple(self._unpack("<Q") for _ in range(axes))[::-1]
            number, offset = self._unpack("<I"), self._unpack("<Q")
            if number not in _TYPE_NAMES:
                kind = _OTHERS.get(number, f"number {number}")
                raise NotImplementedError(
                    f"{place} is of type {kind}, which is not supported; quantize to one of {', '.join(TYPES)}"
                )
            try:
                size = row_bytes(_TYPE_NAMES[number], shape[-1]) * math.prod(shape[:-1])
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            if offset % alignment or offset < end or not 0 < size <= len(self._map):
                raise ValueError(
                    f"{place} is at {offset} with {size} bytes: it overlaps the previous tensor, is not aligned, or "
                    "is outside of the file; download the file again"
                )
            end = offset + size
            tensors[name] = Tensor(_TYPE_NAMES[number], shape, offset, size)
        begin = align_up(self._at, alignment)
        if begin + end > len(self._map):
            raise ValueError(f"{self.path} ends at byte {len(self._map)}, before its tensors end; download it again")
        return {name: tensor._replace(start=begin + tensor.start) for name, tensor in tensors.items()}

    def _read_bytes(self, count: int) -> bytes:
        if count > len(self._map) - self._at:
            raise ValueError(f"{self.path} ends at byte {len(self._map)}, before its header ends; download it again")
        self._at += count
        return self._map[self._at - count : self._at]

    def _unpack(self, form: str) -> Any:
        return struct.unpack(form, self._read_bytes(struct.calcsize(form)))[0]

    def _read_text(self) -> str:
        try:
            return self._read_bytes(self._unpack("<Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} has text in its header that is not UTF-8 ({error.reason})") from None

    def _read_value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._read_text()
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise ValueError(f"{self.path} has a value of unknown type {kind} in its header")
        inner, count = self._unpack("<I"), self._unpack("<Q")
        if inner in _NUMPY:
            return np.frombuffer(self._read_bytes(count * np.dtype(_NUMPY[inner]).itemsize), _NUMPY[inner])
        return [self._read_value(inner, depth + 1) for _ in range(count)]
