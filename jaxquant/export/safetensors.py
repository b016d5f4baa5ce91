"""Reader and writer of safetensors files: the header length (8 bytes), a JSON header, the tensors (little endian).

The safetensors library checks every dtype, shape and offset of a header before any tensor is read. The reader here also
rejects duplicate names, unknown keys and impossible shapes. Arrays are views of the file, also for 8-bit floats, E8M0
scales and sub-byte types, which the library's numpy front end does not support.

Source: the format's own description in the README of huggingface/safetensors.
"""

from __future__ import annotations

import collections
import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxquant.config.loader import check_ordinary
from jaxquant.core.typed import show
from jaxquant.export.hf.tensors import SAFETENSORS
from jaxquant.export.layouts import row_chunks

_MAX_ELEMENTS = 2**48
_MAX_AXES = 32
SUB_BYTE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of the sub-byte types. Their arrays are read as bytes, so the last axis counts bytes."""
DTYPES = {name: np.dtype(jnp.dtype(kind)) for name, kind in SAFETENSORS.items() if name not in SUB_BYTE}
"""Dtypes of the types with whole bytes."""
TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorEntry(NamedTuple):
    """Header entry of a tensor: type name, shape in elements, and offsets of the first byte and after the last byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Shape of the array that is read; the last axis of a sub-byte type counts bytes."""
        bits = SUB_BYTE.get(self.dtype, 8)
        return self.shape if bits == 8 else (*self.shape[:-1], self.shape[-1] * bits // 8)


class SafetensorsFile(Mapping[str, np.ndarray]):
    """A memory-mapped file: arrays by name, each a read-only view of the file.

    Args:
      path: path of the file.

    Raises:
      ValueError: the file is not a safetensors file, or its header does not match its size.
      OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        check_ordinary(self.path)
        with self.path.open("rb") as file:
            try:
                with safe_open(self.path, "numpy") as checked:
                    self.metadata: dict[str, str] = checked.metadata() or {}
            except SafetensorError as error:
                fix = "download it again, or update the package safetensors if the type is newer"
                raise ValueError(f"{path} is not a safetensors file ({str(error)[:200]}); {fix}") from None
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length), object_pairs_hook=self._reject_twice)
            self._start = 8 + length
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.entries = {name: self._read_entry(name, row) for name, row in header.items() if name != "__metadata__"}

    def _reject_twice(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the pairs of a JSON object as a dict; raises if a name occurs twice."""
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"{self.path} has {show(twice)} twice in its header; download it again")
        return found

    def _read_entry(self, name: str, row: Any) -> TensorEntry:
        # The safetensors library accepts a JSON array as an entry, and ignores unknown keys.
        if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(
                f"{self.path}: tensor {show(name)} must have dtype, shape and data_offsets, got {show(row)}"
            )
        dtype, shape = row["dtype"], row["shape"]
        is_known = dtype in DTYPES or (dtype in SUB_BYTE and shape and shape[-1] * SUB_BYTE[dtype] % 8 == 0)
        # An empty axis counts as 1, because numpy limits the other axes of an empty array too.
        if not is_known or len(shape) > _MAX_AXES or math.prod(max(1, n) for n in shape) > _MAX_ELEMENTS:
            raise ValueError(
                f"{self.path}: tensor {show(name)} of type {dtype} and shape {show(shape)} is not supported; "
                f"types are {', '.join(DTYPES)}, and {', '.join(SUB_BYTE)} with whole bytes in each row"
            )
        return TensorEntry(dtype, tuple(shape), *row["data_offsets"])

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        shape, dtype = entry.array_shape, DTYPES.get(entry.dtype, np.dtype(np.uint8))
        if not math.prod(shape):
            return np.empty(shape, dtype)
        return np.frombuffer(self._map, dtype, math.prod(shape), self._start + entry.start).reshape(shape)

    def release(self) -> None:
        """Remove the pages of the file from the resident memory of this process; views stay valid."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class SafetensorsWriter:
    """Writer of a safetensors file that writes one tensor at a time, and the header at the end.

    Args:
      path: path to write.
      names: maximum number of tensors, for which space is reserved in the header.
      metadata: texts for the header; transformers requires ``{"format": "pt"}``.
    """

    def __init__(self, path: Path, names: int, metadata: Mapping[str, str]):
        self.path, self._metadata = path, dict(metadata)
        self._room = 8 * ((4096 + 512 * names) // 8)
        self.entries: dict[str, TensorEntry] = {}
        self._file = path.open("wb")
        self._file.seek(8 + self._room)
        self.bytes = 0

    def add(self, name: str, array: np.ndarray, cast: np.dtype[Any] | None = None) -> int:
        """Write a tensor; return its size in bytes.

        Args:
          name: name that is not in the file yet.
          array: array of one of ``DTYPES``.
          cast: dtype to which the array is cast chunk by chunk, or None.

        Raises:
          ValueError: the name is already in the file, or the format does not support the dtype.
        """
        written = array.dtype if cast is None else np.dtype(cast)
        kind = TYPE_NAMES.get(written)
        if kind is None or name in self.entries or name == "__metadata__":
            raise ValueError(f"tensor {name!r} has the unsupported dtype {array.dtype.name}, or is already in the file")
        flat, size = np.ascontiguousarray(array).reshape(-1), array.size * written.itemsize
        for part in row_chunks(flat.shape):
            self._file.write(flat[part].astype(written, copy=False).view(np.uint8).data)
        self.entries[name] = TensorEntry(kind, array.shape, self.bytes, self.bytes + size)
        self.bytes += size
        return size

    def close(self) -> None:
        """Write the header and close the file."""
        header: dict[str, Any] = {"__metadata__": self._metadata} if self._metadata else {}
        for name, entry in self.entries.items():
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.start, entry.stop]}
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > self._room:
            raise ValueError(
                f"{self.path} has a header of {len(text)} bytes, but {self._room} are reserved; shorten tensor names"
            )
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + text.ljust(self._room))
        self._file.close()
