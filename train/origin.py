"""What a checkpoint knows of its run: the configuration that made it, summed with it, which config.yml must be."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build, show, to_mapping
from jaxquant.export.sums import sha256_of
from train.config import ADJUSTABLE, RUN_CONTROL, TrainConfig

DATA = Path("data", "metadata")
"""Where a checkpoint keeps its data position and, beside it, what is recorded here."""
_KEY = "config"
_FILES = ("quant_cfg_path", "tokenizer_path")
FREE = RUN_CONTROL | ADJUSTABLE
"""Fields in which a run may go on otherwise."""


def record(config: TrainConfig) -> dict[str, Any]:
    """Return what stands beside the data position of a checkpoint."""
    return {_KEY: to_mapping(config), "files": sums_of_files(config)}


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


def recorded(folder: Path) -> TrainConfig:
    """Read the configuration that made a checkpoint, whose sums have been compared.

    Raises:
      ValueError: it is of a version of jaxquant that has other fields or kept none, or a file that it names is another
        now.
      OSError: the checkpoint has no data position.
    """
    contents = json.loads((folder / DATA).read_bytes())
    if _KEY not in contents:
        raise ValueError(f"{folder} does not say what configuration made it; commit 8950e07 of jaxquant still reads it")
    check_files(folder, contents[_KEY], contents.get("files", {}))
    return build(TrainConfig, contents[_KEY], f"configuration of {folder}")


def read_config(run_dir: Path) -> TrainConfig | None:
    """Read the ``config.yml`` of a run, None where it has none.

    Raises:
      ValueError: it is damaged.
    """
    path = run_dir / "config.yml"
    if not path.exists():
        return None
    try:
        return build(TrainConfig, load_yaml(path))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is not the configuration of a run ({error}); put the run's own back, or choose another run_dir"
        ) from None


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each field that differs between configurations, the run's folder apart."""
    shards = "quantization_local_shard_count"
    skipped = {"run_dir", shards} if -1 in (one.get(shards), other.get(shards)) else {"run_dir"}  # -1: not resolved
    pairs = {name: (value, other.get(name)) for name, value in one.items() if name not in skipped}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def refuse(
    different: Mapping[str, tuple[Any, Any]], message: str, one: str, other: str, free: Collection[str] = FREE
) -> None:
    """Refuse fields that differ, from ``differing``, and are not ``free``.

    Raises:
      ValueError: the message, and a line for each field with where its two values stand.
    """
    lines = [f"\n  {name}: {a!r} {one}, {b!r} {other}" for name, (a, b) in different.items() if name not in free]
    if lines:
        raise ValueError(f"{message}:{''.join(lines)}")


def config_of(run_dir: Path, step: int) -> TrainConfig:
    """Return the configuration that made a checkpoint, whose sums have been compared.

    Raises:
      ValueError: config.yml says otherwise in more than how long a run lasts and what it writes; names the fields.
    """
    here, made_with = read_config(run_dir), recorded(run_dir / "checkpoints" / str(step))
    if here:
        _refuse_other_run(run_dir, step, differing(to_mapping(made_with), to_mapping(here)))
    return made_with


def _refuse_other_run(run_dir: Path, step: int, different: Mapping[str, tuple[Any, Any]]) -> None:
    message = f"checkpoint {step} of {run_dir} is not one of its config.yml; put back the one or the other"
    refuse(different, message, "in the checkpoint", "in config.yml")


def contradiction(run_dir: Path, step: int, here: Mapping[str, Any]) -> str:
    """Describe where what a checkpoint recorded and the mapping of config.yml differ and may; no other file is read.

    Raises:
      ValueError: they differ elsewhere, or the checkpoint's record is damaged.
    """
    path = run_dir / "checkpoints" / str(step) / DATA
    try:
        different = differing(json.loads(path.read_bytes()).get(_KEY, {}), here)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}); resume the run, or delete that checkpoint"
        ) from None
    _refuse_other_run(run_dir, step, different)
    words = ", ".join(f"{name} ({a!r} and {b!r})" for name, (a, b) in different.items())
    return f"checkpoint {step} of {run_dir} and its config.yml differ in {words}" if different else ""
