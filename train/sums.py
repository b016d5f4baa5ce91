"""The sums of a training checkpoint: ``sums.json`` beside its arrays, without which no byte of them is used.

The first process writes it when every process has written its part, before the checkpoint gets its name; so a
checkpoint without it was not finished, is damaged, or was written before there were sums.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxquant.export.sums import sha256_of
from jaxquant.serving.validation import list_ordinary

NAME = "sums.json"
FORMAT = "jaxquant-checkpoint-sums"
READ_BY = "; commit 8950e07 of jaxquant still reads checkpoints without it"
_CRC = "crc32"

LATE = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files that orbax writes while it gives a checkpoint its name; ``seal`` adds their sums."""


def signed(row: Mapping[str, Any], indent: int | None = None) -> str:
    """Return a mapping as JSON with the CRC-32 of its text, in which every flipped bit shows."""
    text = json.dumps(row, indent=indent, allow_nan=False)
    return json.dumps({**row, _CRC: f"{zlib.crc32(text.encode()):08x}"}, indent=indent)


def read_signed(text: bytes, indent: int | None = None) -> Any:
    """Read what ``signed`` wrote, and JSON of before it did.

    Raises:
      ValueError, RecursionError: it is not what was written, or no JSON.
    """
    row = json.loads(text)
    if isinstance(row, dict) and row.pop(_CRC, None) is not None and text.strip() != signed(row, indent).encode():
        raise ValueError(f"its {_CRC} is that of another text")
    return row


def write_sums(folder: Path) -> None:
    """Sum every file of a checkpoint that is about to get its name."""
    _write(folder, _sum(folder, [name for name in _names(folder) if name not in LATE]))


def seal(folder: Path) -> None:
    """Add the sums of the files that orbax wrote since; nothing to do where all have theirs."""
    if not (folder / NAME).is_file():
        return
    files = _read(folder)
    missing = [name for name in _names(folder) if name in LATE and name not in files]
    if missing:
        _write(folder, files | _sum(folder, missing))


def check_sums(folder: Path, share: int = 0, shares: int = 1) -> None:
    """Compare the files of a checkpoint with their sums, without holding one in memory.

    Args:
      folder: of the checkpoint.
      share, shares: one in so many files is read; names and sizes of all are compared.

    Raises:
      ValueError: naming the first file that is missing, another, or not the checkpoint's.
    """
    if not (folder / NAME).is_file():
        raise ValueError(f"{folder / NAME} is gone{READ_BY}")
    files = _read(folder)
    found = _names(folder)
    for name in sorted(files.keys() - set(found)):
        raise ValueError(f"{folder / name} is gone")
    for name in sorted(set(found) - files.keys() - set(LATE)):
        raise ValueError(f"{folder / name} is no file of the checkpoint")
    for name, (size, _) in files.items():
        if (folder / name).stat().st_size != size:
            raise ValueError(f"{folder / name} has {(folder / name).stat().st_size} bytes, {size} were written")
    mine = sorted(files)[share::shares]
    for name, (_, digest) in _sum(folder, mine).items():
        if digest != files[name][1]:
            raise ValueError(f"{folder / name} has changed since it was written, its SHA-256 is another")


def _names(folder: Path) -> list[str]:
    """Return the files below a folder; a link or a device is damage."""
    return [name for name in list_ordinary(folder) if name not in (NAME, f"{NAME}.partial")]


def _sum(folder: Path, names: list[str]) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of files, one after another: threads would take memory that a conversion may lack."""
    return {name: ((folder / name).stat().st_size, sha256_of(folder / name)) for name in names}


def _write(folder: Path, files: dict[str, tuple[int, str]]) -> None:
    partial = folder / f"{NAME}.partial"
    with partial.open("w", encoding="utf-8", newline="") as file:
        file.write(_dump(files))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / NAME)


def _dump(files: dict[str, Any]) -> str:
    contents = {"format": FORMAT, "files": {name: list(files[name]) for name in sorted(files)}}
    text = json.dumps(contents, indent=1, sort_keys=True)
    return json.dumps(contents | {"checksum": hashlib.sha256(text.encode()).hexdigest()}, indent=1, sort_keys=True)


def _read(folder: Path) -> dict[str, tuple[int, str]]:
    try:
        text = (folder / NAME).read_bytes().decode()
        files = {name: (size, digest) for name, (size, digest) in json.loads(text)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / NAME} is not the sums of a checkpoint ({type(error).__name__})") from None
    if text != _dump(files):  # every byte counts, also where it would mean the same
        raise ValueError(f"{folder / NAME} does not match its own checksum")
    return files
