"""Checks of the files of a run: the sums of each checkpoint, and the configuration that made it.

``SHA256SUMS`` stands in the folder of a checkpoint, and without it no byte of the arrays is used. The first process
writes it when every process has written its part, before the checkpoint gets its name; so a checkpoint without it was
not finished or is damaged. The configuration that made a checkpoint is summed with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build, show, to_mapping
from jaxquant.export import sums
from jaxquant.export.sums import sha256_of
from jaxquant.training.config import ADJUSTABLE, RUN_CONTROL, TrainConfig

LATE = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files that orbax writes while it gives a checkpoint its name; ``seal`` adds their sums."""
DATA = Path("data", "metadata")
"""Where a checkpoint keeps its data position and, beside it, the configuration that made it."""
_FILES = ("quant_cfg_path", "tokenizer_path")


def write_checkpoint_sums(folder: Path) -> None:
    """Write the sums of a checkpoint that is about to get its name."""
    sums.write_sums(folder, [name for name in sums.files_of(folder) if name not in LATE])


def seal(folder: Path) -> None:
    """Add the sums of the files that orbax wrote since."""
    if (folder / sums.NAME).is_file():
        sums.write_sums(folder, [name for name in LATE if (folder / name).is_file()])


def check_checkpoint_sums(folder: Path, names: Iterable[str] | None = None, share: int = 0, shares: int = 1) -> None:
    """Compare the files of a checkpoint with their sums.

    Args:
      folder: folder of the checkpoint.
      names: files to read; None is all.
      share, shares: one in so many of them is read; whether all have a sum is always checked.

    Raises:
      ValueError: naming the first file that is missing, another, or without a sum.
    """
    if (folder / "sums.json").is_file() and not (folder / sums.NAME).is_file():
        raise ValueError(f"{folder} has the sums of an earlier version, sums.json; commit a87bb9a of jaxquant reads it")
    some = sorted(sums.read_sums(folder) if names is None else names)[share::shares]
    sums.check_sums(folder, some, late=LATE)


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
      ValueError: the record is damaged, or of an earlier version of jaxquant.
      OSError: the checkpoint has no data position.
    """
    check_checkpoint_sums(folder, [DATA.as_posix()])
    return json.loads((folder / DATA).read_bytes())


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
