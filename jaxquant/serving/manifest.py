"""``jaxquant.json`` of a quantized checkpoint: its config, its leaves, and the sum of every other file.

The text is the one that ``json.dumps`` makes of its contents, so that a changed byte shows even where it means the
same, and ``checksum`` is the SHA-256 of that text without ``checksum``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from jaxquant.core.typed import convert, show
from jaxquant.export.sums import sha256_of
from jaxquant.serving.leaves import Leaf
from jaxquant.serving.validation import MAX_MANIFEST_BYTES, REPLACE, check_leaves, list_ordinary, read_row

FORMAT = "jaxquant-quantized"
VERSION = 1
NAME = "jaxquant.json"
ARRAYS = "params"

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and what is being done."""


@dataclasses.dataclass(frozen=True)
class File:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> File:
        return cls(path.stat().st_size, sha256_of(path))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a quantized checkpoint says of itself.

    Attributes:
      config: of the quantization.
      extra: what the writer added.
      leaves: of the parameters, in order of their paths.
      files: path below the directory -> the file; all but the manifest.
      version: of the format.
    """

    config: dict[str, Any]
    extra: dict[str, Any]
    leaves: tuple[Leaf, ...]
    files: dict[str, File]
    version: int = VERSION

    @property
    def bytes(self) -> int:
        """Bytes of all leaves, before what the storage adds."""
        return sum(leaf.bytes for leaf in self.leaves)


def as_json(name: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping as it will be read back.

    Raises:
      TypeError, ValueError: it is not one of JSON's.
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{name} is {type(mapping).__name__}, not a mapping; give a dict of plain values")
    try:
        return json.loads(json.dumps(dict(mapping), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} cannot be written as JSON ({error}); give plain finite values") from None


def list_files(
    directory: Path, progress: Progress | None = None, besides: Collection[str] = (NAME,)
) -> dict[str, File]:
    """Size and sum every file below a directory but its manifest, or those that are named."""
    paths = _paths(directory, besides)
    total, done = sum(path.stat().st_size for path in paths.values()), 0
    files = {}
    for name, path in paths.items():
        files[name] = File.of(path)
        done += files[name].bytes
        if progress is not None:
            progress(done, total, "summing")
    return files


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write ``jaxquant.json``; it makes the directory a checkpoint."""
    contents = {"format": FORMAT, **dataclasses.asdict(manifest)}
    contents["leaves"] = [leaf.as_row() for leaf in manifest.leaves]
    contents["checksum"] = _checksum(contents)
    with (directory / NAME).open("w", encoding="utf-8", newline="") as file:
        file.write(_dump(contents))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: str | Path) -> Manifest:
    """Read what a quantized checkpoint says of itself, without its arrays.

    Raises:
      FileNotFoundError: nothing is there.
      ValueError: it is no quantized checkpoint, one of a newer format, or its ``jaxquant.json`` is damaged.
    """
    directory = Path(directory)
    path = directory / NAME
    if not directory.exists():
        raise FileNotFoundError(f"checkpoint {directory} does not exist; give a folder that `train convert` wrote")
    if not path.is_file():
        raise ValueError(f"{directory} is not a quantized checkpoint, it has no {NAME}; convert a run into it first")
    text, contents = _parse(path)
    # A later format may have changed all but these two fields.
    if contents.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not of a quantized checkpoint: its format is {contents.get('format')!r}, not {FORMAT!r}; "
            f"give another folder, or {REPLACE}"
        )
    version = contents.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"{path} has version {version!r}, which no format has; {REPLACE}")
    if version > VERSION:
        raise ValueError(
            f"checkpoint {directory} is of format version {version} and this jaxquant reads up to {VERSION}; "
            "install a newer jaxquant, or convert the run again with this one"
        )
    if contents.get("checksum") != _checksum(contents) or text != _dump(contents):
        raise ValueError(f"{path} is damaged, its text does not match its checksum; {REPLACE}")
    return _build(path, contents)


def _parse(path: Path) -> tuple[str, dict[str, Any]]:
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than any checkpoint's; {REPLACE}")
    try:
        text = path.read_bytes().decode("utf-8")
        contents = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); {REPLACE}") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds {type(contents).__name__}, not the fields of a checkpoint; {REPLACE}")
    return text, contents


def _build(path: Path, contents: Mapping[str, Any]) -> Manifest:
    try:
        leaves = convert(list[Any], contents.get("leaves"), "leaves")
        files = convert(dict[str, Any], contents.get("files"), "files")
        manifest = Manifest(
            config=convert(dict[str, Any], contents.get("config"), "config"),
            extra=convert(dict[str, Any], contents.get("extra"), "extra"),
            leaves=tuple(read_row(Leaf, row, f"leaves[{index}]") for index, row in enumerate(leaves)),
            files={name: read_row(File, row, f"files[{show(name)}]") for name, row in files.items()},
            version=contents["version"],
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}; {REPLACE}") from None
    for name, file in manifest.files.items():
        if file.bytes < 0 or not re.fullmatch("[0-9a-f]{64}", file.sha256):
            raise ValueError(f"{path}: files[{show(name)}] has no size and SHA-256 of a file, got {file}; {REPLACE}")
    check_leaves(path, manifest.leaves)
    return manifest


def check_files(
    directory: Path,
    files: Mapping[str, File],
    verify: bool | Collection[str],
    progress: Progress | None = None,
    besides: Collection[str] = (NAME,),
    fix: str = f"; {REPLACE}",
) -> None:
    """Compare the files of a checkpoint with what was written: names and sizes of all, and the sums of some.

    Args:
      directory: of the checkpoint.
      files: that were written.
      verify: whether sums are compared, or of which files.
      progress: told of those.
      besides: files that have no sums here.
      fix: the end of an error.

    Raises:
      ValueError: naming the first file that is missing, not the checkpoint's, cut short or changed.
    """
    paths = _paths(directory, besides)
    for name in sorted(files.keys() - paths.keys()):
        raise ValueError(f"{directory / name} is missing from the checkpoint{fix}")
    for name in sorted(paths.keys() - files.keys()):
        raise ValueError(f"{paths[name]} is no file of the checkpoint; move it elsewhere")
    for name, file in files.items():
        size = paths[name].stat().st_size
        if size != file.bytes:
            raise ValueError(f"{paths[name]} has {size} bytes, {file.bytes} were written{fix}")
    some = [name for name in files if verify is True or (verify and name in verify)]
    total, done = sum(files[name].bytes for name in some), 0
    for name in some:
        if sha256_of(paths[name]) != files[name].sha256:
            raise ValueError(f"{paths[name]} has changed since it was written, its SHA-256 is another{fix}")
        done += files[name].bytes
        if progress is not None:
            progress(done, total, "verifying")


def _paths(directory: Path, besides: Collection[str]) -> dict[str, Path]:
    return {name: path for name, path in list_ordinary(directory).items() if name not in besides}


def _dump(contents: Mapping[str, Any]) -> str:
    return json.dumps(contents, indent=1, sort_keys=True) + "\n"


def _checksum(contents: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in contents.items() if name != "checksum"}
    return hashlib.sha256(_dump(rest).encode()).hexdigest()
