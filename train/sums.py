"""What the files of a run are checked by: sums of checkpoints and of lines, and the configuration of each checkpoint.

``sums.json`` stands beside the arrays of a checkpoint, and without it no byte of them is used. The first process writes
it when every process has written its part, before the checkpoint gets its name; so a checkpoint without it was not
finished, is damaged, or was written before there were sums. The configuration that made a checkpoint is summed with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build, show, to_mapping
from jaxquant.export.sums import sha256_of
from jaxquant.serving import manifest
from jaxquant.serving.manifest import File
from train.config import ADJUSTABLE, RUN_CONTROL, TrainConfig

NAME, _PARTIAL = "sums.json", "sums.json.partial"
FORMAT = "jaxquant-checkpoint-sums"
_STILL_READ = "commit 8950e07 of jaxquant still reads"
_CRC = "crc32"

LATE = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files that orbax writes while it gives a checkpoint its name; ``seal`` adds their sums."""
DATA = Path("data", "metadata")
"""Where a checkpoint keeps its data position and, beside it, the configuration that made it."""
_FILES = ("quant_cfg_path", "tokenizer_path")


# -- lines and files ---------------------------------------------------------------------------------------------------


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


# -- a checkpoint ------------------------------------------------------------------------------------------------------


def write_sums(folder: Path) -> None:
    """Sum every file of a checkpoint that is about to get its name."""
    write_whole(folder / NAME, _dump(manifest.list_files(folder, besides=(NAME, _PARTIAL, *LATE))))


def seal(folder: Path) -> None:
    """Add the sums of the files that orbax wrote since; nothing to do where all have theirs."""
    if not (folder / NAME).is_file():
        return
    files = _read(folder)
    if late := {name: File.of(folder / name) for name in LATE if name not in files and (folder / name).is_file()}:
        write_whole(folder / NAME, _dump(files | late))


def check_sums(folder: Path, share: int = 0, shares: int = 1) -> None:
    """Compare the files of a checkpoint with their sums, without holding one in memory.

    Args:
      folder: of the checkpoint.
      share, shares: one in so many files is read; names and sizes of all are compared.

    Raises:
      ValueError: naming the first file that is missing, another, or not the checkpoint's.
    """
    files = _read(folder)
    besides = (NAME, _PARTIAL, *(name for name in LATE if name not in files))
    manifest.check_files(folder, files, sorted(files)[share::shares], besides=besides, fix="")


def _dump(files: Mapping[str, Any]) -> str:
    contents = {"format": FORMAT, "files": {name: [files[name].bytes, files[name].sha256] for name in sorted(files)}}
    text = json.dumps(contents, indent=1, sort_keys=True)
    return json.dumps(contents | {"checksum": hashlib.sha256(text.encode()).hexdigest()}, indent=1, sort_keys=True)


def _read(folder: Path) -> dict[str, Any]:
    if not (folder / NAME).is_file():
        raise ValueError(f"{folder / NAME} is gone; {_STILL_READ} checkpoints without it")
    try:
        text = (folder / NAME).read_bytes().decode()
        files = {name: File(size, digest) for name, (size, digest) in json.loads(text)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / NAME} is not the sums of a checkpoint ({type(error).__name__})") from None
    if text != _dump(files):  # every byte counts, also where it would mean the same
        raise ValueError(f"{folder / NAME} does not match its own checksum")
    return files


# -- the configuration that made it ------------------------------------------------------------------------------------


def record(config: TrainConfig) -> dict[str, Any]:
    """Return what stands beside the data position of a checkpoint."""
    return {"config": to_mapping(config), "files": sums_of_files(config)}


def sums_of_files(config: TrainConfig) -> dict[str, str]:
    """Return the SHA-256 of each file that a configuration names and a model of it reads."""
    paths = {name: Path(getattr(config, name)) for name in _FILES if getattr(config, name)}
    return {name: sha256_of(path) for name, path in paths.items() if path.is_file()}


def check_files(folder: Path, config: Mapping[str, Any], files: Any) -> None:
    """Check that the recipes and the tokenizer of a checkpoint have not changed since.

    Args:
      folder: of the checkpoint.
      config: that names them.
      files: what ``sums_of_files`` returned when the checkpoint was made.

    Raises:
      ValueError: a file that its configuration names is gone or another.
    """
    if not isinstance(files, Mapping) or not set(files) <= set(_FILES):
        raise ValueError(f"{folder} names files that no checkpoint does, {show(files)}; make it anew")
    for name, sum_ in files.items():
        path = Path(str(config.get(name)))
        if not path.is_file() or sha256_of(path) != sum_:
            change = "another file now" if path.is_file() else "gone"
            raise ValueError(f"{folder} was made with {name} {path}, which is {change}; put it back, or make it anew")


def recorded(folder: Path) -> dict[str, Any]:
    """Read the configuration that made a checkpoint, whose record is compared with its sum.

    Raises:
      ValueError: the record is damaged, or of a version of jaxquant that kept no configuration or no sums.
      OSError: the checkpoint has no data position.
    """
    if _read(folder).get(DATA.as_posix()) != File.of(folder / DATA):
        raise ValueError(f"{folder / DATA} is damaged; resume the run, or delete that step")
    contents = json.loads((folder / DATA).read_bytes())
    if "config" not in contents:
        raise ValueError(f"{folder} does not say what configuration made it; {_STILL_READ} it")
    return contents


def config_of(folder: Path) -> TrainConfig:
    """Return the configuration that made a checkpoint.

    Raises:
      ValueError: as ``recorded``; it has other fields than this version of jaxquant, or a file that it names is another
        now.
    """
    contents = recorded(folder)
    check_files(folder, contents["config"], contents.get("files", {}))
    return build(TrainConfig, contents["config"], f"configuration of {folder}")


def check_config_file(run_dir: Path, step: int, made_with: TrainConfig) -> None:
    """Refuse a run whose ``config.yml`` is not of the configuration that made a checkpoint of it.

    Raises:
      ValueError: naming the fields that decide numbers and differ, or what is wrong with the file.
    """
    path = run_dir / "config.yml"
    if not path.exists():
        return
    try:
        here = build(TrainConfig, load_yaml(path))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the configuration of a run ({error}); put it back") from None
    found = f"checkpoint {step} of {run_dir} is not one of its config.yml; put back the one or the other"
    compare(made_with, here, found, "in config.yml")


def compare(one: TrainConfig, other: TrainConfig, message: str, where: str) -> dict[str, tuple[Any, Any]]:
    """Return both values of each field in which a configuration differs from a checkpoint's, and may.

    Args:
      one: the checkpoint's.
      other: the configuration; the run's folder is left out.
      message: what is wrong where a field differs that may not.
      where: the place of the second values.

    Raises:
      ValueError: a field differs that decides the numbers of a run: the message, and a line for each.
    """
    before, after, shards = to_mapping(one), to_mapping(other), "quantization_local_shard_count"
    skipped = {"run_dir", shards} if -1 in (before[shards], after[shards]) else {"run_dir"}  # -1: not resolved
    pairs = {name: (before[name], after[name]) for name in before if name not in skipped}
    different = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    fixed = {name: pair for name, pair in different.items() if name not in RUN_CONTROL | ADJUSTABLE}
    if fixed:
        lines = [f"\n  {name}: {a!r} in the checkpoint, {b!r} {where}" for name, (a, b) in fixed.items()]
        raise ValueError(f"{message}:{''.join(lines)}")
    return different
