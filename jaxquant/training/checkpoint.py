"""Checkpoints of a run: saved asynchronously and committed atomically; a checkpoint that does not load is skipped."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
import yaml

from jaxquant.core.typed import to_mapping
from jaxquant.export.sums import check_sums, write_atomically, write_sums
from jaxquant.serving.placement import first_line
from jaxquant.training import processes, sums
from jaxquant.training.config import ADJUSTABLE, RUN_CONTROL, TrainConfig
from jaxquant.training.step import TrainState


def write_config(run_dir: Path, config: TrainConfig) -> None:
    """Write the resolved configuration atomically as ``config.yml``."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir / "config.yml", yaml.safe_dump(to_mapping(config), sort_keys=False))


def read_final_loss(run_dir: Path, config: TrainConfig) -> float | None:
    """Return the held-out loss of a run from its files, or None if the run is not complete.

    Args:
      run_dir: folder of the run.
      config: configuration of the run.

    Raises:
      ValueError: the newest checkpoint belongs to another run.
    """
    folder = run_dir.resolve() / "checkpoints"
    step = max(ocp.utils.checkpoint_steps(folder), default=0) if folder.is_dir() else 0
    unreadable = (ValueError, OSError, TypeError, KeyError, RecursionError)  # ``restore`` reports the error
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
    message = f"checkpoint {step} in {folder} belongs to another run; choose another run_dir or undo these changes"
    return sums.compare_configs(made_with, config, message, "now")


class Checkpoints:
    """The ``checkpoints`` folder of a run; a context manager whose exit waits for pending writes.

    Attributes:
      changes: fields of ``ADJUSTABLE`` that differ from the restored checkpoint, with both values.

    Raises:
      ValueError: the path of the folder is not a folder.
    """

    def __init__(self, run_dir: Path, config: TrainConfig):
        self._config, self._folder = config, run_dir.resolve() / "checkpoints"
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"{self._folder} is not a folder; move it away, or choose another run_dir")
        _silence_failed_saves()
        self._saving: int | None = None  # step of a save that may not be complete
        self.changes: dict[str, tuple[Any, Any]] = {}
        # Runs in the first process, after all processes have written their parts and before the folder is renamed.
        summed = ocp.AsyncOptions(post_finalization_callback=self._write_sums)
        keep = {"max_to_keep": config.checkpoint_keep, "cleanup_tmp_directories": True, "async_options": summed}
        self._manager = ocp.CheckpointManager(self._folder, options=ocp.CheckpointManagerOptions(**keep))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.wait()
        except OSError:
            if kind is None:  # otherwise the exception that ended the run is reported
                raise
        finally:
            self._manager.close()

    def save(self, step: int, state: TrainState, data_state: Any) -> None:
        """Save asynchronously, unless this step is already saved.

        Raises:
          OSError: the previous save, or the synchronous part of this save, cannot be written.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        if not self._folder.is_dir():
            raise OSError(f"{self._folder} is gone")
        self._saving = step
        self._save(step, state, data_state)

    def create(self, state: TrainState, data_state: Any, readers: Readers) -> None:
        """Save step 0, with parameters that are written part by part, so that memory never holds all of them.

        Args:
          state: state to save; of ``params``, only shapes and dtypes are used.
          data_state: position of the data.
          readers: functions that read the parts of each parameter.

        Raises:
          OSError: the checkpoint cannot be written.
        """
        zeros = jax.tree.map(lambda x: repeat_element(np.zeros((), x.dtype), x.shape), state.params)
        folder = self._folder / "0"
        self._save(0, state._replace(params=zeros), data_state)
        with _raise_os_errors():
            # ``_saving`` is None, so this save has no checksums and no program uses the zeros.
            self._manager.wait_until_finished()
            for path, read in readers.items():
                array = open_array(folder / "state", f"params/{path}".replace("/", "."), write=True)
                for where, part in read(array.spec().to_json()["metadata"]["chunks"][0]):
                    array[where].write(part).result()
        write_sums(folder)

    def _save(self, step: int, state: TrainState, data_state: Any) -> None:
        stored = state._asdict()
        # In chunks, so that `jaxquant.training.conversion` can read one layer of stacked layers without the others.
        arrays = ocp.args.StandardSave(stored, save_args=jax.tree.map(make_save_args, stored))
        position = ocp.args.JsonSave({"value": data_state} | sums.make_record(self._config))
        with _raise_os_errors():
            self._manager.save(step, args=ocp.args.Composite(state=arrays, data=position), force=True)

    def wait(self) -> None:
        """Block until all saves are on disk.

        Raises:
          OSError: a save cannot be written; earlier checkpoints are unchanged.
        """
        with _raise_os_errors():
            try:
                self._manager.wait_until_finished()
                if self._saving is not None and processes.is_main():
                    sums.add_late_sums(self._folder / str(self._saving))
            finally:
                self._saving = None

    @property
    def newest(self) -> int | None:
        """Step of the newest complete checkpoint on disk, or None if there is no complete checkpoint."""
        return max((step for step in ocp.utils.checkpoint_steps(self._folder) if step != self._saving), default=None)

    def _write_sums(self) -> None:
        if self._saving is None:
            return
        for folder in self._folder.glob(f"{self._saving}{ocp.utils.TMP_DIR_SUFFIX}*"):
            sums.write_checkpoint_sums(folder)

    def restore(self, abstract_state: TrainState, say: Callable[[str], Any] = print) -> tuple[TrainState, Any] | None:
        """Load the newest complete checkpoint; return None if there is no checkpoint.

        A checkpoint that is damaged or does not load is moved to ``unreadable_checkpoints`` with a message, and the
        previous checkpoint is tried.

        Args:
          abstract_state: shapes and shardings.
          say: function that prints skipped checkpoints and fields that differ from the restored checkpoint.

        Raises:
          ValueError: no checkpoint loads, or the newest complete checkpoint belongs to another run.
        """
        broken: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            failure = self._find_damage(step)
            if failure is None:
                different = _compare(sums.config_of(self._folder / str(step)), self._config, self._folder, step)
                restored, failure = self._load(step, abstract_state)
                # If one process cannot read a checkpoint, no process resumes from it.
                if processes.all_agree(restored is not None):
                    self.changes = {name: pair for name, pair in different.items() if name in ADJUSTABLE}
                    for name, (before, now) in different.items():
                        if name in RUN_CONTROL:
                            say(f"{name} is {now!r}, it was {before!r} when checkpoint {step} was saved")
                    self._discard(broken, say)
                    return restored
            broken[step] = failure or "it does not load in another process"
            say(f"checkpoint {step} does not load ({broken[step]}); trying the previous one")
        if broken:
            restored = f"none of the checkpoints {[*broken]} in {self._folder} loads ({next(iter(broken.values()))})"
            if self._config.optimizer_state != "float32":
                restored += "; if TPUs saved this 8-bit optimizer state, set optimizer_state_axis=rows, otherwise =last"
            raise ValueError(f"{restored}; choose another run_dir or delete that folder to start over")
        return None

    def _find_damage(self, step: int) -> str | None:
        """Return the damage in a checkpoint's files as text, or None. Each process checks a share of the files."""
        damage = None
        try:
            sums.check_checkpoint_sums(self._folder / str(step), None, jax.process_index(), jax.process_count())
        except (ValueError, OSError) as error:
            damage = str(error)
            if not processes.is_main():  # only the main process prints
                print(f"checkpoint {step} is damaged: {damage}", file=sys.stderr)
        if processes.all_agree(damage is None):
            return None
        return damage or "damage found by another process; see its output"

    def _load(self, step: int, abstract: TrainState) -> tuple[tuple[TrainState, Any] | None, str | None]:
        """Return the state and data position of a checkpoint, or the reason why the checkpoint does not load."""
        try:
            shapes = ocp.args.StandardRestore(abstract._asdict())
            restored = self._manager.restore(step, args=ocp.args.Composite(state=shapes, data=ocp.args.JsonRestore()))
            state, data_state = TrainState(**restored["state"]), restored["data"]["value"]
        except Exception as error:
            # Orbax raises ValueError, KeyError or TypeError for damaged metadata, OSError for missing files, and a bare
            # Exception for an array that it cannot read. Other errors (such as out of memory) are not caused by the
            # files.
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
def _raise_os_errors() -> Iterator[None]:
    """Re-raise errors of the file system as OSError; tensorstore reports them as ValueError."""
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def reason_of(error: OSError) -> str:
    """Return the reason of an OSError, with the file if the error names a file."""
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


_REDUNDANT_RECORDS = {
    "absl": ("_SignalingThread.run() raised", "Failed to run", "Save Finalize thread"),
    "asyncio": ("exception was never retrieved",),  # other writes of the same save
}
"""Text of log records that orbax and tensorstore write for a failed save before they raise, by logger."""


@functools.cache
def _silence_failed_saves() -> None:
    """Hide the tracebacks of a failed save, which the program reports in one sentence; keep other log records."""

    def is_wanted(record: logging.LogRecord) -> bool:
        words = _REDUNDANT_RECORDS[record.name]
        return record.levelno < logging.ERROR or not any(each in record.getMessage() for each in words)

    def ignore_late(hook: Any, error_of: Callable[..., Any]) -> Any:
        # A write in a thread of tensorstore may end after its event loop was closed.
        late = (RuntimeError, "Event loop is closed")
        is_late = lambda error: (type(error), str(error)) == late  # noqa: E731
        return lambda *args: None if is_late(error_of(*args)) else hook(*args)

    for name in _REDUNDANT_RECORDS:
        logging.getLogger(name).addFilter(is_wanted)
    sys.excepthook = ignore_late(sys.excepthook, lambda kind, value, trace: value)
    sys.unraisablehook = ignore_late(sys.unraisablehook, lambda unraisable: unraisable.exc_value)


# -- single arrays -----------------------------------------------------------------------------------------------------

Readers = Mapping[str, Callable[[int], Iterator[tuple[slice, np.ndarray]]]]
"""Functions by the path of a parameter: length of a chunk along the first axis -> parts with their slices of this axis.

Each slice starts at a multiple of the length, because a chunk is written whole.
"""

CHUNK_BYTES = 64 * 2**20
"""Bytes of the largest chunk; a reader holds one chunk in memory in addition to the requested part."""

SLICE_BYTES = 2**20
"""Smallest size in bytes for which a slice along a leading axis is a separate chunk."""

_ONE = {"limit": 1}
_CONTEXT = ts.Context(
    {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": _ONE, "data_copy_concurrency": _ONE}
)
"""Limits memory: no cache, and one chunk at a time."""


class _Repeated(np.ndarray):
    """An array of one repeated element, which takes no memory, also when orbax copies the array before a save."""

    def __deepcopy__(self, memo: Any) -> _Repeated:
        return self


def repeat_element(element: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array [shape] for saving that repeats one element and takes no memory."""
    return np.broadcast_to(np.asarray(element), shape).view(_Repeated)


def make_save_args(array: Any) -> ocp.SaveArgs:
    """Return orbax options that split an array into chunks of at most 64 MiB, preferably along leading axes.

    An array below the limit is one chunk, or one chunk per device. A larger array of stacked layers or experts is split
    into its slices, a large matrix along its longest axis.

    Args:
      array: array with shape and dtype. Orbax also splits an array with a sharding by shard.
    """
    sharding = getattr(array, "sharding", None)
    shape = tuple(array.shape if sharding is None else sharding.shard_shape(array.shape))
    sizes, axes = [math.prod(shape[axis:]) * array.dtype.itemsize for axis in range(len(shape) + 1)], 0
    # No reader reads single rows of a matrix.
    while sizes[axes] > CHUNK_BYTES and axes < len(shape) - 2 and sizes[axes + 1] >= SLICE_BYTES:
        axes += 1
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=tuple(range(axes)))


def open_array(folder: Path, name: str, *, write: bool = False) -> ts.TensorStore:
    """Open an array of an OCDBT store that orbax wrote, for reading, and for writing if ``write``.

    Raises:
      ValueError: tensorstore cannot read the array.
    """
    base: Any = {"driver": "file", "path": f"{folder.resolve()}/"}
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    # Orbax stores chunks of zeros, and can refuse an array with a missing chunk.
    spec = {"driver": "zarr", "kvstore": store, "store_data_equal_to_fill_value": True}
    return ts.open(spec, open=True, read=True, write=write, context=_CONTEXT).result()


def list_arrays(folder: Path) -> list[str]:
    """Return the names of the arrays in an OCDBT store that orbax wrote; empty if there is no store.

    Raises:
      ValueError: tensorstore cannot read the index of the store.
    """
    store: Any = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.resolve()}/"}}
    keys = ts.KvStore.open(store).result().list().result()
    return sorted(key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray"))
