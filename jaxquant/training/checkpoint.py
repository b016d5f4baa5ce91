"""Checkpoints of a run: saved in the background, committed atomically, and passed over when they do not load."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
import yaml

from jaxquant.core.typed import to_mapping
from jaxquant.export.sums import check_sums, write_whole
from jaxquant.serving.placement import first_line
from jaxquant.training import processes, sums
from jaxquant.training.config import ADJUSTABLE, RUN_CONTROL, TrainConfig
from jaxquant.training.step import TrainState


def write_config(run_dir: Path, config: TrainConfig) -> None:
    """Write the resolved configuration as ``config.yml``, whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / "config.yml", yaml.safe_dump(to_mapping(config), sort_keys=False))


def finished(run_dir: Path, config: TrainConfig) -> float | None:
    """Return the held-out loss of a run that is complete, from its files alone; None if steps are left.

    Args:
      run_dir: folder of the run.
      config: configuration of the run.

    Raises:
      ValueError: the newest checkpoint is of another run.
    """
    folder = run_dir.resolve() / "checkpoints"
    step = max(ocp.utils.checkpoint_steps(folder), default=0) if folder.is_dir() else 0
    unreadable = (ValueError, OSError, TypeError, KeyError, RecursionError)  # restoring handles it
    try:
        made_with = sums.config_of(folder / str(step))
    except unreadable:
        return None
    _compare(made_with, config, folder, step)
    try:
        check_sums(run_dir, ["summary.json"], required=False)
        summary = json.loads((run_dir / "summary.json").read_bytes())
        if not step == summary["steps"] == config.steps:
            return None
        sums.check_checkpoint_sums(folder / str(step))
        return float(summary["held_out_loss"])
    except unreadable:
        return None


def _compare(made_with: TrainConfig, config: TrainConfig, folder: Path, step: int) -> dict[str, tuple[Any, Any]]:
    message = f"checkpoint {step} in {folder} is of another run; choose another run_dir or undo"
    return sums.compare(made_with, config, message, "asked")


class Checkpoints:
    """The ``checkpoints`` folder of a run. A context manager: leaving it waits for what is being written.

    Attributes:
      changes: of each field of ``ADJUSTABLE`` in which the configuration is not that of the checkpoint that was
        restored, the value there and the one asked.

    Raises:
      ValueError: what has its name is no folder.
    """

    def __init__(self, run_dir: Path, config: TrainConfig):
        self._config, self._folder = config, run_dir.resolve() / "checkpoints"
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"{self._folder} is not a folder; move it away, or choose another run_dir")
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
        self._saving, stored = step, state._asdict()
        # In chunks, so that `jaxquant.training.conversion` reads a layer of stacked ones without the others.
        arrays = ocp.args.StandardSave(stored, save_args=jax.tree.map(save_args, stored))
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
            finally:
                self._saving = None

    @property
    def newest(self) -> int | None:
        """Step of the newest checkpoint that is whole on disk; None where there is none."""
        return max((step for step in ocp.utils.checkpoint_steps(self._folder) if step != self._saving), default=None)

    def _sum(self) -> None:
        for folder in self._folder.glob(f"{self._saving}{ocp.utils.TMP_DIR_SUFFIX}*"):
            sums.write_checkpoint_sums(folder)

    def restore(self, abstract_state: TrainState, say: Callable[[str], Any] = print) -> tuple[TrainState, Any] | None:
        """Load the newest checkpoint that is whole; None where there is none at all.

        A checkpoint that is damaged or does not load is moved to ``unreadable_checkpoints`` with a message, and the one
        before it is tried.

        Args:
          abstract_state: shapes and shardings.
          say: told what is passed over, and which fields are others than the checkpoint was made with.

        Raises:
          ValueError: there are checkpoints and none of them loads, or the first that is whole is of another run.
        """
        broken: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            failure = self._damage(step)
            if failure is None:
                different = _compare(sums.config_of(self._folder / str(step)), self._config, self._folder, step)
                found, failure = self._load(step, abstract_state)
                # What one process cannot read no process goes on from.
                if processes.all_agree(found is not None):
                    self.changes = {name: pair for name, pair in different.items() if name in ADJUSTABLE}
                    for name, (before, now) in different.items():
                        if name in RUN_CONTROL:
                            say(f"{name} is {now!r}, it was {before!r} when checkpoint {step} was made")
                    self._discard(broken, say)
                    return found
            broken[step] = failure or "it does not load in another process"
            say(f"checkpoint {step} does not load ({broken[step]}); trying the one before it")
        if broken:
            found = f"none of the checkpoints {[*broken]} in {self._folder} loads ({next(iter(broken.values()))})"
            if self._config.optimizer_state != "float32":
                found += "; where TPUs made its optimizer state in 8 bits, set optimizer_state_axis=rows, else =last"
            raise ValueError(f"{found}; choose another run_dir or delete that folder to start over")
        return None

    def _damage(self, step: int) -> str | None:
        """Return what a process found wrong with the files of a checkpoint, each of which one process reads."""
        damage = None
        try:
            sums.check_checkpoint_sums(self._folder / str(step), None, jax.process_index(), jax.process_count())
        except (ValueError, OSError) as error:
            damage = str(error)
            if not processes.is_main():  # whose ``say`` is heard
                print(f"checkpoint {step} is damaged: {damage}", file=sys.stderr)
        if processes.all_agree(damage is None):
            return None
        return damage or "damage found by another process; see its output"

    def _load(self, step: int, abstract: TrainState) -> tuple[tuple[TrainState, Any] | None, str | None]:
        """Return the state and data position of a checkpoint, or what is wrong with it."""
        try:
            shapes = ocp.args.StandardRestore(abstract._asdict())
            found = self._manager.restore(step, args=ocp.args.Composite(state=shapes, data=ocp.args.JsonRestore()))
            state, data_state = TrainState(**found["state"]), found["data"]["value"]
        except Exception as error:
            # Orbax reports metadata with ValueError, KeyError or TypeError, missing files with OSError, and an array
            # that cannot be read with a bare Exception. Anything else (out of memory) is no fault of the files.
            if not isinstance(error, (ValueError, KeyError, TypeError, OSError)) and type(error) is not Exception:
                raise
            return None, first_line(error)
        return (state, data_state), None

    def _discard(self, steps: Collection[int], say: Any) -> None:
        discarded = self._folder.with_name("unreadable_checkpoints")
        for step in steps if processes.is_main() else ():
            discarded.mkdir(exist_ok=True)
            target = discarded / str(step)
            while target.exists():
                target = target.with_name(target.name + "+")
            os.replace(self._folder / str(step), target)
            say(f"moved checkpoint {step} to {target}")
        if steps:
            processes.wait_for_all("broken checkpoints moved")
            self._manager.reload()


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


# -- single arrays -----------------------------------------------------------------------------------------------------

CHUNK_BYTES = 64 * 2**20
"""Largest chunk, which is what a reader holds beside the part that it asked for."""

SLICE_BYTES = 2**20
"""A leading axis is cut in single slices only where a slice is at least this large."""

_ONE = {"limit": 1}
_CONTEXT = ts.Context(
    {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": _ONE, "data_copy_concurrency": _ONE}
)
"""Bounds the memory beside the part that is read: nothing is cached, and one chunk is read at a time."""


def save_args(array: Any) -> ocp.SaveArgs:
    """Choose how orbax cuts an array: in chunks of at most 64 MiB, along leading axes where that is sensible.

    An array below the limit stays in one chunk (or one a device). A larger one of stacked layers or experts is cut
    into its slices, a large matrix along its longest axis.

    Args:
      array: with shape and dtype; its sharding, where it has one, is a cut that orbax makes anyway.
    """
    sharding = getattr(array, "sharding", None)
    shape = tuple(array.shape if sharding is None else sharding.shard_shape(array.shape))
    sizes, axes = [math.prod(shape[axis:]) * array.dtype.itemsize for axis in range(len(shape) + 1)], 0
    # No reader asks for single rows of a matrix.
    while sizes[axes] > CHUNK_BYTES and axes < len(shape) - 2 and sizes[axes + 1] >= SLICE_BYTES:
        axes += 1
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=tuple(range(axes)))


def open_array(folder: Path, name: str) -> ts.TensorStore:
    """Open an array of a tree that orbax wrote in one OCDBT store, for reading.

    Raises:
      ValueError: from tensorstore, where it cannot be read.
    """
    base: Any = {"driver": "file", "path": f"{folder.resolve()}/"}
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True, context=_CONTEXT).result()


def list_arrays(folder: Path) -> list[str]:
    """Return the names of the arrays of a tree that orbax wrote in one OCDBT store; none where there is no store.

    Raises:
      ValueError: from tensorstore, where its index cannot be read.
    """
    store: Any = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.resolve()}/"}}
    keys = ts.KvStore.open(store).result().list().result()
    return sorted(key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray"))
