"""The safetensors container: eight bytes of header length, a JSON header, then the tensors, little endian.

The reader maps the file and believes nothing that the header says: every name, dtype, shape and place is checked
before a byte is looked at. It reads the 8-bit floats, E8M0 scales and sub-byte types that the library's numpy front
end does not.

Source: the format's own description in the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxquant.config.loader import check_ordinary
from jaxquant.core.typed import show

MAX_HEADER_BYTES = 100_000_000
MAX_ELEMENTS = 2**48
_MAX_AXES = 32
_PART = 1 << 22

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""The container's types of whole bytes."""
SUB_BYTE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of its smaller types; an array of them is read as bytes, its last axis counted in bytes."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """One tensor of a header: the container's type, shape in elements, first byte and the one after the last."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Of the array that is read; bytes for what is smaller than one."""
        return DTYPES.get(self.dtype, DTYPES["U8"])

    @property
    def array_shape(self) -> tuple[int, ...]:
        bits = SUB_BYTE.get(self.dtype)
        return self.shape if bits is None else (*self.shape[:-1], self.shape[-1] * bits // 8)


def parse_header(data: bytes, size: int, place: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Check and return the tensors of a header and its metadata.

    Args:
      data: the JSON text.
      size: bytes of the file after the header.
      place: name of the file, for errors.

    Raises:
      ValueError: anything that a writer of the format would not write; names the tensor.
    """
    try:
        contents = json.loads(data.decode("utf-8"), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place} has a header that is not JSON ({str(error)[:200]}); download the file again"
        ) from None
    if not isinstance(contents, dict):
        raise ValueError(f"{place} has a header that is {type(contents).__name__}, not a mapping of tensors")
    metadata = contents.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{place} has __metadata__ that is not a mapping of texts, {show(metadata)}")
    entries = {name: _entry(name, row, size, place) for name, row in contents.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1][2:]):
        if entry.start != end:
            kind = "overlaps the one before it" if entry.start < end else "leaves a gap before it"
            raise ValueError(
                f"{place}: tensor {show(name)} begins at byte {entry.start} and {kind}, which ends at {end}"
            )
        end = entry.stop
    if end != size:
        raise ValueError(
            f"{place} has {size:,} bytes of tensors and its header places {end:,}; download the file again"
        )
    return entries, metadata


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _entry(name: str, row: Any, size: int, place: str) -> Entry:
    what = f"{place}: tensor {show(name)}"
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{what} must have dtype, shape and data_offsets, got {show(row)}")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in SUB_BYTE):
        raise ValueError(f"{what} is of type {show(dtype)}; known ones are {', '.join((*DTYPES, *SUB_BYTE))}")
    if not _are_counts(shape) or len(shape) > _MAX_AXES or math.prod(shape) > MAX_ELEMENTS:
        raise ValueError(f"{what} has the shape {show(shape)}, which no array has")
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise ValueError(f"{what} has data_offsets {show(offsets)}, outside the {size:,} bytes of the file")
    bits = SUB_BYTE.get(dtype) or 8 * DTYPES[dtype].itemsize
    wanted, odd = divmod(math.prod(shape) * bits, 8)
    if odd or (bits < 8 and (not shape or shape[-1] * bits % 8)):
        raise ValueError(f"{what} of shape {show(shape)} and type {dtype} does not fill whole bytes in each row")
    if offsets[1] - offsets[0] != wanted:
        raise ValueError(f"{what} takes {wanted:,} bytes and its data_offsets have {offsets[1] - offsets[0]:,}")
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_ELEMENTS for value in values)


class SafetensorsFile(Mapping[str, np.ndarray]):
    """A file, mapped: arrays by name, each a read-only view of the file. A context manager.

    Args:
      path: of the file.

    Raises:
      ValueError: it is none, or its header does not fit it.
      OSError: it cannot be opened.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        place = str(self.path)
        check_ordinary(self.path)
        with self.path.open("rb") as file:
            total = self.path.stat().st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 0 < length <= min(MAX_HEADER_BYTES, total - 8):
                raise ValueError(f"{place} is not a safetensors file: its first eight bytes are no length of a header")
            self.entries, self.metadata = parse_header(file.read(length), total - 8 - length, place)
            self._start = 8 + length
            self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        count = math.prod(entry.array_shape)
        if self._map is None:
            raise ValueError(f"{self.path} is closed")
        if not count:
            return np.empty(entry.array_shape, entry.array_dtype)
        flat = np.frombuffer(self._map, entry.array_dtype, count, self._start + entry.start)
        return flat.reshape(entry.array_shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._map = None  # views of it may live on; the last of them closes it


class SafetensorsWriter:
    """Write a file tensor by tensor, nothing of it kept in memory: the header is filled in at the end.

    Args:
      path: to write.
      names: how many tensors there will be at most, for which the header keeps room.
      metadata: texts; ``{"format": "pt"}`` is what transformers asks for.
    """

    def __init__(self, path: Path, names: int, metadata: Mapping[str, str]):
        self.path, self._metadata = path, dict(metadata)
        self._room = 8 * ((4096 + 512 * names) // 8)
        self.entries: dict[str, Entry] = {}
        self._file = path.open("wb")
        self._file.seek(8 + self._room)
        self.bytes = 0

    def add(self, name: str, array: np.ndarray, dtype: str | None = None, cast: np.dtype[Any] | None = None) -> int:
        """Write a tensor and return its bytes.

        Args:
          name: not there yet.
          array: of one of ``DTYPES``; or bytes, for ``dtype``.
          dtype: type by its name in the container, where it is smaller than a byte.
          cast: dtype to write it in, cast a part at a time.

        Raises:
          ValueError: a name that is there, or a dtype that the format has not.
        """
        written = array.dtype if cast is None else np.dtype(cast)
        kind = dtype or NAMES.get(written)
        if kind is None or name in self.entries or (dtype is not None and array.dtype != np.uint8):
            raise ValueError(f"tensor {name!r} of {array.dtype.name} cannot be written, or is there already")
        shape = array.shape if dtype is None else (*array.shape[:-1], array.shape[-1] * 8 // SUB_BYTE[dtype])
        flat, size = np.ascontiguousarray(array).reshape(-1), array.size * written.itemsize
        for start in range(0, flat.size, _PART):
            part = flat[start : start + _PART]
            self._file.write((part if cast is None else part.astype(written)).view(np.uint8).data)
        self.entries[name] = Entry(kind, tuple(shape), self.bytes, self.bytes + size)
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
                f"{self.path} has a header of {len(text)} bytes and room for {self._room}; shorten the names"
            )
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + text.ljust(self._room))
        self._file.close()
