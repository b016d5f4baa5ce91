"""Verification of run files: checksums of each checkpoint, and the configuration that made the checkpoint.

Each checkpoint folder contains ``SHA256SUMS``; without it, no array of the checkpoint is used. The first process writes
this file after every process has written its part and before the folder is renamed; an import writes it after the last
parameter. A checkpoint without the file is therefore incomplete or damaged. ``SHA256SUMS`` also covers the
configuration that made the checkpoint.
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

LATE_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files that orbax writes while it renames a checkpoint; ``add_late_sums`` adds their checksums."""
DATA = Path("data", "metadata")
"""File of a checkpoint with its data position and the configuration that made it."""
_FILE_FIELDS = ("quant_cfg_path", "tokenizer_path")


def write_checkpoint_sums(folder: Path) -> None:
    """Write the checksums of a checkpoint before it is renamed."""
    sums.write_sums(folder, [name for name in sums.list_files(folder) if name not in LATE_FILES])


def add_late_sums(folder: Path) -> None:
    """Add the checksums of the files that orbax wrote during the rename."""
    if (folder / sums.NAME).is_file():
        sums.write_sums(folder, [name for name in LATE_FILES if (folder / name).is_file()])


def check_checkpoint_sums(folder: Path, names: Iterable[str] | None = None, share: int = 0, shares: int = 1) -> None:
    """Compare the files of a checkpoint with their checksums.

    Args:
      folder: folder of the checkpoint.
      names: files to read; None reads all.
      share, shares: index and number of shares of the files; this call reads one share. The function always checks that
        every file has a checksum.

    Raises:
      ValueError: a file is missing, changed, or has no checksum; the message names the first file.
    """
    if (folder / "sums.json").is_file() and not (folder / sums.NAME).is_file():
        raise ValueError(f"{folder} has an earlier version's sums.json; read it with jaxquant at commit a87bb9a")
    some = sorted(sums.read_sums(folder) if names is None else names)[share::shares]
    sums.check_sums(folder, some, late=LATE_FILES)


# -- configuration of a checkpoint -------------------------------------------------------------------------------------


def make_record(config: TrainConfig) -> dict[str, Any]:
    """Return the record that is stored next to the data position of a checkpoint."""
    return {"config": to_mapping(config), "files": sums_of_files(config)}


def sums_of_files(config: TrainConfig) -> dict[str, str]:
    """Return the SHA-256 of each file that a configuration names and on which the model depends."""
    paths = {name: Path(getattr(config, name)) for name in _FILE_FIELDS if getattr(config, name)}
    return {name: sha256_of(path) for name, path in paths.items() if path.is_file()}


def check_files(folder: Path, config: Mapping[str, Any], files: Any) -> None:
    """Check that the recipe file and the tokenizer of a checkpoint have not changed.

    Args:
      folder: folder of the checkpoint.
      config: configuration that names the files.
      files: result of ``sums_of_files`` when the checkpoint was made.

    Raises:
      ValueError: a file that the configuration names is missing or changed.
    """
    if not isinstance(files, Mapping) or not set(files) <= set(_FILE_FIELDS):
        raise ValueError(f"{folder} has checksums of unknown files, {show(files)}; create the checkpoint again")
    for name, sum_ in files.items():
        path = Path(str(config.get(name)))
        if not path.is_file() or sha256_of(path) != sum_:
            change = "has changed" if path.is_file() else "is missing"
            raise ValueError(
                f"{folder} was made with {name} {path}, which {change}; restore the file, or create the checkpoint "
                "again"
            )


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of a checkpoint, after checking its checksum.

    Raises:
      ValueError: the record is damaged, or from an earlier version of jaxquant.
      OSError: the checkpoint has no data position.
    """
    check_checkpoint_sums(folder, [DATA.as_posix()])
    return json.loads((folder / DATA).read_bytes())


def config_of(folder: Path) -> TrainConfig:
    """Return the configuration that made a checkpoint.

    Raises:
      ValueError: see ``read_record``; the configuration has other fields than this version of jaxquant, or a file that
        the configuration names has changed.
    """
    contents = read_record(folder)
    config = use_own_tokenizer(contents["config"], folder.parents[1])
    check_files(folder, config, contents.get("files", {}))
    return build(TrainConfig, config, f"configuration of {folder}")


def use_own_tokenizer(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return a configuration with the tokenizer in the folder of an imported or converted run, which may have moved."""
    own = folder.absolute() / "tokenizer.json"
    return {**config, "tokenizer_path": str(own)} if config.get("tokenizer_path") and own.is_file() else config


def check_config_file(run_dir: Path, step: int, made_with: TrainConfig) -> None:
    """Raise if ``config.yml`` of a run is not the configuration that made a checkpoint of the run.

    Raises:
      ValueError: fields that determine numerics differ, or the file is invalid; the message names the fields.
    """
    path = run_dir / "config.yml"
    if not path.exists():
        return
    try:
        here = build(TrainConfig, use_own_tokenizer(load_yaml(path), run_dir))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the configuration of a run ({error}); restore the file") from None
    message = f"checkpoint {step} of {run_dir} was not made with its config.yml; restore one of the two"
    compare_configs(made_with, here, message, "in config.yml")


def compare_configs(one: TrainConfig, other: TrainConfig, message: str, where: str) -> dict[str, tuple[Any, Any]]:
    """Return the allowed differences between the configuration of a checkpoint and another one, with both values.

    Args:
      one: configuration of the checkpoint.
      other: configuration to compare; ``run_dir`` is ignored.
      message: first line of the error.
      where: place of the second values, for the error message.

    Raises:
      ValueError: fields differ that determine the numerics of a run. The message has a line for each of these fields.
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
