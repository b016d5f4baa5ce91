"""Text sources: the standard library, text files, JSONL, Parquet. Each source is a stream of documents."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxquant.config.loader import check_ordinary
from jaxquant.training.tokenizer import raise_unreadable

# Folders left out of "stdlib": installed packages, tests, tables and generated files.
_SKIPPED_FOLDERS = frozenset(
    (
        *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"),
        *("pydoc_data", "encodings", "ensurepip", "__phello__", "__pycache__"),
    )
)
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "_sysconfig_vars")
# A single text file is split at line ends, so that there are documents for the training and the held-out part: each has
# about _PART_CHARS characters; a shorter file has about _PARTS documents.
_PART_CHARS = 16384
_PARTS = 20


Documents = Iterator[tuple[str, str | None]]
"""(text, name) of each document. The hash of the name selects the split, or of the text if the name is None."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A readable collection of documents.

    Attributes:
      label: description for messages: ``text at /data/books``.
      files: files in reading order.
      read: function file -> documents of the file.
    """

    label: str
    files: list[Path]
    read: Callable[[Path], Documents]

    def documents(self) -> Documents:
        """Yield the documents.

        Raises:
          ValueError: a file cannot be read or has invalid contents; the message names it.
        """
        for file in self.files:
            try:
                check_ordinary(file)
                yield from self.read(file)
            except OSError as error:
                raise_unreadable(file, error)


def open_source(dataset: str, path: str, field: str) -> Source:
    """Find the files of a dataset, without reading them.

    Args:
      dataset: ``stdlib``, ``text``, ``jsonl`` or ``parquet``.
      path: file or folder (searched recursively, without hidden names); empty for ``stdlib``.
      field: key (JSONL) or column (Parquet) that holds the text.

    Raises:
      ValueError: the path is missing, unreadable, not allowed, or has no files of this kind.
    """
    if dataset in ("stdlib", "text") and field != "text":
        raise ValueError(f"dataset_text_field {field!r} has no effect with dataset {dataset!r}; leave it out")
    if dataset == "stdlib":
        if path:
            raise ValueError(f"dataset_path {path!r} has no effect with dataset 'stdlib'; set dataset=text or jsonl")
        return _stdlib()
    if not path:
        raise ValueError(f"dataset {dataset!r} requires dataset_path; set it to a file or a folder")
    read = _split_file if Path(path).is_file() else _read_whole
    if dataset != "text":
        read = functools.partial(_json_lines if dataset == "jsonl" else _parquet_rows, field=field)
    return Source(f"{dataset} at {Path(path)}", _list_files(Path(path), dataset), read)


def _stdlib() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in _walk(root, _SKIPPED_FOLDERS) if file.suffix == ".py"]
    files = [x for x in files if not any(part.startswith(_SKIPPED_PREFIXES) for part in x.relative_to(root).parts)]
    if not files:
        raise ValueError(f"dataset 'stdlib' found no .py sources under {str(root)!r}; set dataset=text, or another")
    name_of = lambda file: file.relative_to(root).as_posix()  # noqa: E731
    return Source(f"stdlib at {root}", files, lambda file: iter([(_read_text(file), name_of(file))]))


def _read_whole(file: Path) -> Documents:
    yield _read_text(file), None


def _split_file(file: Path) -> Documents:
    text = _read_text(file)
    size = min(_PART_CHARS, len(text) // _PARTS)
    start = end = 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        if end - start >= size:
            yield text[start:end], None
            start = end
    if start < end:
        yield text[start:end], None


def _json_lines(file: Path, field: str) -> Documents:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{file} line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # long numbers, deep nesting
                fix = "write one JSON object per line, in UTF-8"
                raise ValueError(f"{place} is not JSON that Python can read ({error}); {fix}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{place} must be a JSON object with the key {field!r}, got {type(record).__name__}")
            _check_field(field, [*record], place, "key")
            yield _check_text(record[field], f"{place} key {field!r}"), None


def _check_field(field: str, names: Sequence[str], place: object, kind: str) -> None:
    if field not in names:
        one_of = ", ".join(map(repr, names)) or "none"
        raise ValueError(f"{place} has no {kind} {field!r}; set dataset_text_field to one of {one_of}")


def _parquet_rows(file: Path, field: str) -> Documents:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError("dataset 'parquet' requires pyarrow, which is not installed; pip install pyarrow") from None
    row = 0
    try:
        with parquet.ParquetFile(file) as table:
            _check_field(field, table.schema_arrow.names, file, "column")
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _check_text(value, f"{file} row {row} column {field!r}"), None
    except (pyarrow.ArrowInvalid, UnicodeDecodeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{file} is not a Parquet file, or is damaged after row {row}: {reason}") from None


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        why = f"{error.reason} at byte {error.start}"
        raise ValueError(f"{str(file)!r} is not UTF-8 text: {why}; convert it or remove it") from None


def _check_text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place} must be text, got {type(value).__name__}; set dataset_text_field")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} has an incomplete surrogate pair at character {error.start}; remove it") from None
    return value


def _list_files(path: Path, dataset: str) -> list[Path]:
    """Return the files of a path in an order that does not depend on the file system."""
    try:
        check_ordinary(path, "dataset_path")
        if not stat.S_ISDIR(path.stat().st_mode):
            return [path]
    except OSError as error:
        raise_unreadable(path, error, "dataset_path")
    suffix = "" if dataset == "text" else f".{dataset}"
    files = [file for file in _walk(path) if file.name.endswith(suffix)]
    if not files:
        kind = f"*{suffix} files" if suffix else "files"
        raise ValueError(f"dataset {dataset!r} is empty: {str(path)!r} has no {kind}")
    return files


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    found: list[Path] = []
    seen: set[str] = set()  # links are followed; each folder is read once
    refuse = lambda error: raise_unreadable(Path(error.filename), error)  # noqa: E731
    for folder, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
        else:
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
            found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())
