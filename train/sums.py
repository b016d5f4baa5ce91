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

from jaxquant.serving.manifest import File, check_files, list_files

NAME, _PARTIAL = "sums.json", "sums.json.partial"
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


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_sums(folder: Path) -> None:
    """Sum every file of a checkpoint that is about to get its name."""
    write_whole(folder / NAME, _dump(list_files(folder, besides=(NAME, _PARTIAL, *LATE))))


def seal(folder: Path) -> None:
    """Add the sums of the files that orbax wrote since; nothing to do where all have theirs."""
    if not (folder / NAME).is_file():
        return
    files = _read(folder)
    late = {name: File.of(folder / name) for name in LATE if name not in files and (folder / name).is_file()}
    if late:
        write_whole(folder / NAME, _dump(files | late))


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
    besides = (NAME, _PARTIAL, *(name for name in LATE if name not in files))
    check_files(folder, files, sorted(files)[share::shares], besides=besides, fix="")


def _dump(files: Mapping[str, File]) -> str:
    contents = {"format": FORMAT, "files": {name: [files[name].bytes, files[name].sha256] for name in sorted(files)}}
    text = json.dumps(contents, indent=1, sort_keys=True)
    return json.dumps(contents | {"checksum": hashlib.sha256(text.encode()).hexdigest()}, indent=1, sort_keys=True)


def _read(folder: Path) -> dict[str, File]:
    try:
        text = (folder / NAME).read_bytes().decode()
        files = {name: File(size, digest) for name, (size, digest) in json.loads(text)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / NAME} is not the sums of a checkpoint ({type(error).__name__})") from None
    if text != _dump(files):  # every byte counts, also where it would mean the same
        raise ValueError(f"{folder / NAME} does not match its own checksum")
    return files
