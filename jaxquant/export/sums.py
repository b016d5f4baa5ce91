"""SHA-256 of what an export wrote, in the format of ``sha256sum``, with which an import sees a flipped bit."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_NAME, _END = "SHA256SUMS", ".sha256"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)\n")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(out: Path) -> None:
    """Write the sums of a folder into it, or that of a file beside it."""
    files = sorted(out.iterdir()) if out.is_dir() else [out]
    text = "".join(f"{sha256_of(path)}  {path.name}\n" for path in files)
    _place(out).write_text(text, encoding="utf-8")


def check_sums(out: Path) -> None:
    """Compare an export with its sums; what has none is somebody else's, and files that were added are the user's.

    Raises:
      ValueError: naming the first file that is gone or another.
    """
    place = _place(out)
    if not place.is_file():
        return
    text = place.read_bytes().decode("utf-8", "replace")
    if not re.fullmatch(f"(?:{_LINE.pattern})+", text):
        raise ValueError(f"{place} is no list of sums; export the model again, or delete it to go without")
    for digest, name in _LINE.findall(text):
        path = place.parent / name
        if not path.is_file() or sha256_of(path) != digest:
            what = "has changed since it was exported" if path.is_file() else "is gone"
            raise ValueError(f"{path} {what}; export the model again, or delete {place} if that is meant")


def _place(out: Path) -> Path:
    return out / _NAME if out.is_dir() else out.with_name(out.name + _END)
