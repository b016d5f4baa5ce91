"""``SHA256SUMS`` of a folder, in the format of ``sha256sum``, for detecting damaged files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?!/|(?:.*/)?\.\.(?:/|\n))([^\n]+)\n")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file atomically."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def list_files(folder: Path) -> list[str]:
    """Return the paths of the files in a folder, relative to the folder and without ``SHA256SUMS``."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name not in (NAME, f"{NAME}.partial"))


def write_sums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the checksums of all files of a folder; with ``names``, update only these entries."""
    sums = read_sums(folder) if names is not None and (folder / NAME).is_file() else {}
    sums |= {name: sha256_of(folder / name) for name in (list_files(folder) if names is None else names)}
    write_atomically(folder / NAME, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def read_sums(folder: Path, *, required: bool = True) -> dict[str, str]:
    """Return the checksums of a folder by file name.

    Args:
      folder: folder that has ``SHA256SUMS``.
      required: see ``check_sums``. Here the argument only changes the advice in the error message.

    Raises:
      ValueError: the file is missing or damaged.
    """
    place = folder / NAME
    if not place.is_file():
        raise ValueError(f"{place} is missing; copy the folder again, or write it again")
    text = place.read_bytes().decode("utf-8", "replace")
    if not re.fullmatch(f"(?:{_LINE.pattern})+", text):
        raise ValueError(f"{place} is not a list of checksums; {_advice(place, required)}")
    return {name: digest for digest, name in _LINE.findall(text)}


def check_sums(
    folder: Path, names: Iterable[str] | None = None, *, required: bool = True, late: Collection[str] = ()
) -> None:
    """Compare the files of a folder with their checksums.

    Args:
      folder: folder that has ``SHA256SUMS``.
      names: files to compare, or None to compare every file with a checksum.
      required: whether every file must have a checksum. If False, files without a checksum are accepted, because the
        user or another program may have written them.
      late: files that may have no checksum, because they are written after the checksums.

    Raises:
      ValueError: a file is missing, has changed or has no checksum; the message names the first one.
    """
    if not required and not (folder / NAME).is_file():
        return
    sums = read_sums(folder, required=required)
    for name in list_files(folder) if required else ():
        if name not in sums and name not in late:
            raise ValueError(f"{folder / name} has no checksum in {NAME}; move it elsewhere, or copy the folder again")
    for name in sums if names is None else names:
        path = folder / name
        if name in sums and (not path.is_file() or sha256_of(path) != sums[name]):
            what = "has changed since it was written" if path.is_file() else "is missing"
            raise ValueError(f"{path} {what}; {_advice(folder / NAME, required)}")


def _advice(place: Path, required: bool) -> str:
    """Return the last clause of an error; it suggests to delete the checksums only if they are not required."""
    return "copy the folder again, or write it again" + ("" if required else f", or delete {place} if intended")
