"""Checkpoints of a run: saved in the background, committed atomically, and passed over when they do not load."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import yaml

from jaxquant import state as quantization_state
from jaxquant.core.typed import to_mapping
from jaxquant.serving.arrays import save_args_of
from jaxquant.serving.placement import first_line
from train import processes, sums
from train.config import ADJUSTABLE, RUN_CONTROL, TrainConfig
from train.step import TrainState


def write_config(run_dir: Path, config: TrainConfig) -> None:
    """Write the resolved configuration as ``config.yml``, whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    sums.write_whole(run_dir / "config.yml", yaml.safe_dump(to_mapping(config), sort_keys=False))


def check_config(run_dir: Path, config: TrainConfig) -> None:
    """Refuse to go on with a run under another configuration.

    Raises:
      ValueError: listing every field that differs from the run's ``config.yml`` and may not, or saying that this file
        is damaged.
    """
    if there := sums.read_config(run_dir):
        message = f"the configuration does not match the run in {run_dir}; choose another run_dir or undo"
        sums.refuse(sums.differing(there, config), message, "in the run", "asked")


class Checkpoints:
    """The ``checkpoints`` folder of a run. A context manager: leaving it waits for what is being written.

    Attributes:
      changes: of each field of ``ADJUSTABLE`` in which the configuration is not that of the checkpoint that was
        restored, the value there and the one asked. config.yml has the former until a checkpoint has the latter.
    """

    def __init__(self, run_dir: Path, config: TrainConfig, say: Callable[[str], None] = print):
        self._run_dir, self._config = run_dir, config
        self._folder = run_dir.resolve() / "checkpoints"
        self._discarded = run_dir.resolve() / "unreadable_checkpoints"
        if processes.is_main() and self._folder.exists() and not self._folder.is_dir():
            say(f"{self._folder} is no folder, moved to {self._move_away(self._folder)}")
        processes.wait_for_all("checkpoints a folder")
        _silence_failed_saves()
        self._saving: int | None = None  # begun, and not known to be whole
        self.changes: dict[str, tuple[Any, Any]] = {}
        # In the first process, when all have written their parts and before the folder gets its name.
        summed = ocp.AsyncOptions(post_finalization_callback=self._sum)
        keep = {"max_to_keep": config.checkpoint_keep, "cleanup_tmp_directories": True, "async_options": summed}
        self._manager = ocp.CheckpointManager(self._folder, options=ocp.CheckpointManagerOptions(**keep))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.wait()
        except OSError:
            if kind is None:  # else what ended the run is the news
                raise
        finally:
            self._manager.close()

    def save(self, step: int, state: TrainState, data_state: Any) -> None:
        """Save in the background, unless this step is saved already.

        Raises:
          OSError: the save before this one, or what of this one is not done in the background, cannot be written.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        if not self._folder.is_dir():
            raise OSError(f"{self._folder} is gone")
        self._saving, stored = step, _stored(state)
        # In chunks, so that `train.conversion` reads a layer of stacked ones without the others.
        arrays = ocp.args.StandardSave(stored, save_args=save_args_of(stored))
        position = ocp.args.JsonSave({"value": data_state} | sums.record(self._config))
        with _failures():
            self._manager.save(step, args=ocp.args.Composite(state=arrays, data=position), force=True)

    def wait(self) -> None:
        """Return when all that was saved is on disk.

        Raises:
          OSError: it cannot be written; the checkpoints before it are as they were.
        """
        with _failures():
            try:
                self._manager.wait_until_finished()
                if self._saving is not None and processes.is_main():
                    sums.seal(self._folder / str(self._saving))
                    if self.changes:
                        write_config(self._run_dir, self._config)
                        self.changes = {}
            finally:
                self._saving = None

    @property
    def newest(self) -> int | None:
        """Step of the newest checkpoint that is whole on disk; None where there is none."""
        return max((step for step in ocp.utils.checkpoint_steps(self._folder) if step != self._saving), default=None)

    def _sum(self) -> None:
        for folder in self._folder.glob(f"{self._saving}{ocp.utils.TMP_DIR_SUFFIX}*"):
            sums.write_sums(folder)

    def restore(
        self, abstract_state: TrainState, say: Any = print, refuse: Any = lambda state, data_state: None
    ) -> tuple[TrainState, Any] | None:
        """Load the newest checkpoint that is whole; None where there is none at all.

        A checkpoint that is damaged, does not load or is refused is moved to ``unreadable_checkpoints`` with a message,
        and the one before it is tried.

        Args:
          abstract_state: shapes and shardings.
          say: told what is passed over.
          refuse: (state, data position) that load -> what is wrong with them, None if nothing is.

        Raises:
          ValueError: there are checkpoints and none of them loads, or the first that does is of another run.
        """
        broken: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            found, failure = self._load(step, abstract_state)
            # What one process cannot read no process goes on from.
            if not processes.all_agree(found is not None):
                found, failure = None, failure or "it does not load in another process"
            failure = failure if found is None else refuse(*found)
            if found is not None and failure is None:
                self._check_origin(step, say)
                self._discard(broken, say)
                return found
            broken[step] = failure or ""
            say(f"checkpoint {step} does not load ({failure}); trying the one before it")
        if broken:
            found = f"none of the checkpoints {[*broken]} in {self._folder} loads ({next(iter(broken.values()))})"
            raise ValueError(f"{found}; choose another run_dir or delete that folder to start over")
        return None

    def _check_origin(self, step: int, say: Any) -> None:
        """Refuse a checkpoint of another configuration than the one asked, and tell what differs and may."""
        made_with, there = sums.recorded(self._folder / str(step)), sums.read_config(self._run_dir)
        different = sums.differing(made_with, self._config)
        in_file = sums.differing(made_with, there) if there else {}
        in_file = {name: pair for name, pair in in_file.items() if name not in RUN_CONTROL}
        message = (
            f"checkpoint {step} in {self._folder} is of another run; put its own back, choose another run_dir or undo"
        )
        sums.refuse(different, message, "in the checkpoint", "asked", sums.FREE - in_file.keys())
        for name, (before, now) in different.items():
            if name in RUN_CONTROL:
                say(f"{name} is {now!r}, it was {before!r} when checkpoint {step} was made")
        for name, (before, other) in in_file.items():
            say(f"config.yml has {name} {other!r}, and checkpoint {step} was made with {before!r}, as is asked")
        self.changes = {name: pair for name, pair in different.items() if name in ADJUSTABLE}

    def _load(self, step: int, abstract: TrainState) -> tuple[tuple[TrainState, Any] | None, str | None]:
        """Return the state and data position of a checkpoint, or what is wrong with it."""
        folder = self._folder / str(step)
        damage = None
        try:
            sums.check_sums(folder, *processes.share())
        except (ValueError, OSError) as error:
            damage = str(error)
        if not processes.all_agree(damage is None):  # loading is done together, or not at all
            return None, damage
        try:
            shapes = ocp.args.StandardRestore(_stored(abstract))
            found = self._manager.restore(step, args=ocp.args.Composite(state=shapes, data=ocp.args.JsonRestore()))
            state, data_state = TrainState(**found["state"]), found["data"]["value"]
            whole = quantization_state.with_bins(state.quant_state, abstract.quant_state)
        except Exception as error:
            # Orbax reports metadata with ValueError, KeyError or TypeError, missing files with OSError, and an array
            # that cannot be read with a bare Exception. Anything else (out of memory) is no fault of the files.
            if not isinstance(error, (ValueError, KeyError, TypeError, OSError)) and type(error) is not Exception:
                raise
            return None, first_line(error)
        return (state._replace(quant_state=whole), data_state), None

    def _discard(self, steps: Collection[int], say: Any) -> None:
        for step in steps if processes.is_main() else ():
            say(f"moved checkpoint {step} to {self._move_away(self._folder / str(step))}")
        if steps:
            processes.wait_for_all("broken checkpoints moved")
            self._manager.reload()

    def _move_away(self, path: Path) -> Path:
        self._discarded.mkdir(exist_ok=True)
        target = self._discarded / path.name
        while target.exists():
            target = target.with_name(target.name + "+")
        os.replace(path, target)
        return target


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raise what the file system refused as the OSError that it was; tensorstore has its errors as ValueError."""
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def reason_of(error: OSError) -> str:
    """Return what the file system refused, with the file where it is named."""
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _stored(state: TrainState) -> dict[str, Any]:
    """Return what is written of a state, of arrays or their shapes: the bins of quant state are zeros between steps."""
    return state._asdict() | {"quant_state": quantization_state.strip_bins(state.quant_state)}


_RAISED_TOO = {
    "absl": ("_SignalingThread.run() raised", "Failed to run", "Save Finalize thread"),
    "asyncio": ("exception was never retrieved",),  # of the writes beside the one that failed first
}
"""By logger, what the records of a failed save hold that orbax and tensorstore write, and then raise."""


@functools.cache
def _silence_failed_saves() -> None:
    """Keep the tracebacks of a failed save from standard error, where it is told in a sentence; all else is printed."""

    def is_wanted(record: logging.LogRecord) -> bool:
        words = _RAISED_TOO[record.name]
        return record.levelno < logging.ERROR or not any(each in record.getMessage() for each in words)

    def but_late(hook: Any, error_of: Callable[..., Any]) -> Any:
        # A write of tensorstore's threads may end after the event loop that gave up on it.
        late = (RuntimeError, "Event loop is closed")
        is_late = lambda error: (type(error), str(error)) == late  # noqa: E731
        return lambda *given: None if is_late(error_of(*given)) else hook(*given)

    for name in _RAISED_TOO:
        logging.getLogger(name).addFilter(is_wanted)
    sys.excepthook = but_late(sys.excepthook, lambda kind, value, trace: value)
    sys.unraisablehook = but_late(sys.unraisablehook, lambda what: what.exc_value)
