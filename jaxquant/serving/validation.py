"""Checks of a checkpoint folder that nobody promised anything about: before a byte of it is allocated or followed.

Sums find what was damaged. What was made to harm has sums that fit, so every value has a kind and a range here, and no
array may be larger than the files that hold it.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxquant.core.qtensor import QTensor, check
from jaxquant.core.typed import build, convert, show
from jaxquant.serving.leaves import Leaf, Stored

T = TypeVar("T")
MAX_MANIFEST_BYTES = 256 * 2**20
MAX_ELEMENTS = 2**48
MAX_AXES = 32
_MAX_ZARRAY_BYTES = 2**16
_MAX_PATH = 4096
_MAX_BYTES = 2**53
REPLACE = "copy the checkpoint again or convert the run again"


def read_row(cls: type[T], row: Any, place: str) -> T:
    """Build one entry of a manifest; a leaf that says its path is called by it in errors.

    Raises:
      ValueError, TypeError: as ``typed.build``.
    """
    if isinstance(row, Mapping) and isinstance(row.get("path"), str):
        place = f"leaf {show(row['path'])}"
    return build(cls, row, place)


def check_leaves(path: Path, leaves: Iterable[Leaf]) -> None:
    """Check that the leaves of a manifest make a tree, of arrays that there can be, and are what their role says.

    Raises:
      ValueError: naming the leaf.
    """
    seen: set[str] = set()
    for leaf in leaves:
        if why := _impossible_array(leaf):
            raise ValueError(f"{path}: leaf {show(leaf.path)}.{why}; {REPLACE}")
        keys = leaf.path.split("/")
        if len(leaf.path) > _MAX_PATH or not all(keys):
            raise ValueError(f"{path}: leaf {show(leaf.path)} has an empty key or too long a path; {REPLACE}")
        if leaf.path in seen:
            raise ValueError(f"{path}: leaf {show(leaf.path)} is there twice; {REPLACE}")
        seen.add(leaf.path)
        if leaf.codec is not None:
            _check_codec(path, leaf)
        is_quantized = leaf.role == "quantized" and leaf.codec is None
        if is_quantized != (leaf.scale_shape is not None) or is_quantized != (leaf.scale_dtype is not None):
            raise ValueError(
                f"{path}: leaf {show(leaf.path)} is of role {leaf.role!r}, and its scale is not; {REPLACE}"
            )
        for array in leaf.arrays().values():
            if array.is_packed and not array.shape:
                raise ValueError(
                    f"{path}: {show(array.path)} is a single {array.dtype}, which is not stored; {REPLACE}"
                )
        if not 0 <= leaf.bytes <= _MAX_BYTES:
            raise ValueError(f"{path}: leaf {show(leaf.path)} says that it has {show(leaf.bytes)} bytes; {REPLACE}")
    for name in seen:
        parents = name.split("/")[:-1]
        for count in range(1, len(parents) + 1):
            if "/".join(parents[:count]) in seen:
                raise ValueError(f"{path}: leaf {show('/'.join(parents[:count]))} holds leaf {show(name)}; {REPLACE}")


def _impossible_array(leaf: Leaf) -> str:
    """Return which shape or dtype of a leaf no array has; "" where all are possible."""
    for name in ("shape", "scale_shape", "outer_shape"):
        shape = getattr(leaf, name)
        if shape and (len(shape) > MAX_AXES or min(shape) < 1 or math.prod(shape) > MAX_ELEMENTS):
            return f"{name} {show(list(shape))} is no shape of an array: at most {MAX_AXES} axes of 1 and more"
    for name in ("dtype", "scale_dtype"):
        if (dtype := getattr(leaf, name)) is not None and not _is_number(dtype):
            return f"{name} {show(dtype)} is no dtype of numbers"
    return ""


def _is_number(name: str) -> bool:
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        return False
    return dtype.name == name and (dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number))


def _check_codec(path: Path, leaf: Leaf) -> None:
    """Check that a leaf in a tensor format has the bytes of its contraction and nothing else."""
    stored = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
    if leaf.role != "quantized" or leaf.zero_point or leaf.outer_shape:
        raise ValueError(f"{path}: leaf {show(leaf.path)} is in a tensor format and has other parts; {REPLACE}")
    try:
        check(QTensor(stored, block=leaf.block, codec=leaf.codec), f"leaf {show(leaf.path)}")  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {REPLACE}") from None


def list_ordinary(directory: Path) -> dict[str, Path]:
    """Return the files below a directory by their path in it.

    Raises:
      ValueError: a link, a device or a pipe, which might lead anywhere or have no end.
    """
    found: dict[str, Path] = {}
    for folder, folders, names in os.walk(directory):
        for name in (*folders, *names):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a link" if stat.S_ISLNK(mode) else "a device or pipe"
                raise ValueError(f"{path} is {kind}, not a file; copy the checkpoint with what it links to (cp -rL)")
            if stat.S_ISREG(mode):
                found[path.relative_to(directory).as_posix()] = path
    return dict(sorted(found.items()))


def check_store(folder: Path, array: Stored) -> None:
    """Check that the chunks of an array are those of its shape, and that its files hold them as they are.

    Raises:
      ValueError: naming the leaf and the folder.
    """
    try:
        path = folder / ".zarray"
        if path.stat().st_size > _MAX_ZARRAY_BYTES:
            raise ValueError("its .zarray is too large")
        about = json.loads(path.read_bytes())
        expected = {
            "zarr_format": 2,
            "compressor": None,
            "filters": None,
            "order": "C",
            "shape": list(array.stored_shape),
        }
        for name, value in expected.items():
            if about.get(name) != value:
                raise ValueError(f"{name} is {show(about.get(name))}, not {value!r}")
        chunks = convert(tuple[int, ...], about.get("chunks"), "chunks")
        if len(chunks) != len(array.stored_shape) or not all(
            1 <= part <= size for part, size in zip(chunks, array.stored_shape, strict=True)
        ):
            raise ValueError(f"chunks {show(list(chunks))} are none of shape {array.stored_shape}")
        count = math.prod(-(-size // part) for part, size in zip(chunks, array.stored_shape, strict=True))
        size = math.prod(chunks) * jnp.dtype(array.stored_dtype).itemsize
        sizes = [file.stat().st_size for file in folder.iterdir() if file.name != ".zarray"]
        if len(sizes) != count or any(found != size for found in sizes):
            raise ValueError(f"there are {len(sizes)} chunks of {sum(sizes):,} bytes, not {count} of {size:,} each")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"leaf {array.path} in {folder} is not stored as written ({error}); {REPLACE}") from None
