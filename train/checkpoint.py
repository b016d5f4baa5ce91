"""Checkpoints of a run: saved in the background, committed atomically, and passed over when they do not load."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import yaml

from jaxquant.config.loader import build, load_yaml, to_mapping
from jaxquant.serving.arrays import save_args_of
from train import processes
from train.config import RUN_CONTROL, TrainConfig
from train.step import TrainState
from train.stored import from_stored, stored_shapes, to_stored


def _is_unreadable(error: Exception) -> bool:
    """Whether this is how orbax reports a step whose files are missing, cut short or garbled.

    Metadata fail with ValueError, KeyError or TypeError, missing files with OSError, and an array whose bytes cannot
    be read with a bare ``Exception``. Anything else (out of memory, a failing device) is no fault of the files.
    """
    return isinstance(error, (ValueError, KeyError, TypeError, OSError)) or type(error) is Exception


def write_config(run_dir: Path, config: TrainConfig) -> None:
    """Write the resolved configuration as ``config.yml``, whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(to_mapping(config), sort_keys=False)
    partial = run_dir / "config.yml.partial"
    partial.write_text(text)
    os.replace(partial, run_dir / "config.yml")


def check_config(run_dir: Path, config: TrainConfig) -> None:
    """Refuse to go on with a run under another configuration.

    Raises:
      ValueError: listing every field outside ``RUN_CONTROL`` that differs from the run's ``config.yml``.
    """
    path = run_dir / "config.yml"
    if not path.exists():
        return
    there, here = to_mapping(build(TrainConfig, load_yaml(path))), to_mapping(config)
    different = [name for name in here if name not in RUN_CONTROL and here[name] != there.get(name)]
    if there["quantization_local_shard_count"] == -1:  # a run that reads it has it resolved, see with_global_shards
        different = [name for name in different if name != "quantization_local_shard_count"]
    if different:
        lines = "".join(f"\n  {name}: {there.get(name)!r} in the run, {here[name]!r} asked" for name in different)
        raise ValueError(
            f"the configuration does not match the run in {run_dir}; choose another run_dir or undo:{lines}"
        )


class Checkpoints:
    """The ``checkpoints`` folder of a run. A context manager: leaving it waits for what is being written."""

    def __init__(self, run_dir: Path, config: TrainConfig):
        self._folder = (run_dir / "checkpoints").absolute()
        self._discarded = run_dir.absolute() / "unreadable_checkpoints"
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=config.checkpoint_keep,
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
            ),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    def save(self, step: int, state: TrainState, data_state: Any) -> None:
        """Save in the background, unless this step is saved already."""
        if step in self._manager.all_steps():
            return
        stored = to_stored(state)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                # In chunks, so that `train.parameters` reads a layer of stacked ones without the others.
                state=ocp.args.StandardSave(stored, save_args=save_args_of(stored)),
                data=ocp.args.JsonSave(_to_json(data_state)),
            ),
            force=True,
        )

    def wait(self) -> None:
        """Return when all that was saved is on disk."""
        self._manager.wait_until_finished()

    def restore(self, abstract_state: TrainState, say: Any = print) -> tuple[TrainState, Any] | None:
        """Load the newest checkpoint that is whole; None where there is none at all.

        A checkpoint that does not load is moved to ``unreadable_checkpoints`` with a message, and the one before it
        is tried.

        Raises:
          ValueError: there are checkpoints and none of them loads.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        broken: list[tuple[int, Exception]] = []
        for step in steps:
            found, failure = None, None
            try:
                shapes = stored_shapes(self._folder / str(step) / "state", abstract_state)
                found = self._manager.restore(
                    step,
                    args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes), data=ocp.args.JsonRestore()),
                )
            except Exception as error:
                if not _is_unreadable(error):
                    raise
                failure = error
            # What one process cannot read no process goes on from.
            if not processes.all_agree(failure is None) or found is None:
                error = failure or OSError("it does not load in another process")
                broken.append((step, error))
                say(f"checkpoint {step} does not load ({_first_line(error)}); trying the one before it")
                continue
            self._discard([step for step, _ in broken], say)
            return from_stored(found["state"], abstract_state), _from_json(found["data"])
        if broken:
            raise ValueError(
                f"none of the checkpoints {[step for step, _ in broken]} in {self._folder} loads "
                f"({_first_line(broken[0][1])}); choose another run_dir or delete that folder to start over"
            )
        return None

    def _discard(self, steps: list[int], say: Any) -> None:
        for step in steps if processes.is_main() else ():
            self._discarded.mkdir(exist_ok=True)
            target = self._discarded / str(step)
            while target.exists():
                target = target.with_name(target.name + "+")
            os.replace(self._folder / str(step), target)
            say(f"moved checkpoint {step} to {target}")
        if steps:
            processes.wait_for_all("broken checkpoints moved")
            self._manager.reload()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"


def _to_json(data_state: Any) -> dict[str, Any]:
    if isinstance(data_state, bytes):
        return {"base64": base64.b64encode(data_state).decode()}
    return {"value": data_state}


def _from_json(stored: dict[str, Any]) -> Any:
    return base64.b64decode(stored["base64"]) if "base64" in stored else stored["value"]
