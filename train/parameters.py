"""The parameters that a run saved, one at a time: no optimizer state, and no more in memory than what is asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jaxquant.core.trees import leaves_by_path, map_by_path
from jaxquant.serving.arrays import list_arrays, open_array, shape_and_dtype
from train.checkpoint import first_line
from train.config import TrainConfig
from train.origin import config_of
from train.sums import check_sums

KINDS = ("params", "quant_state")
"""Parts of a training state that are read here."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One stored array, not read yet.

    Attributes:
      path: "params/…" or "quant_state/…", the keys joined by "/".
      shape, dtype: of the array; the dtype by name.
      chunk_shape: what is read at least, whatever is asked for.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    _store: ts.TensorStore = dataclasses.field(repr=False, compare=False)
    _folder: Path = dataclasses.field(repr=False, compare=False)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self._store.dtype.numpy_dtype).itemsize

    def read(self, *index: int | slice) -> np.ndarray:
        """Read the array, or the part of it that an index of its leading axes names: ``read(3)``, ``read(slice(4))``.

        Raises:
          IndexError: more axes than there are, or an index out of range.
          ValueError: a slice with a step, or files that cannot be read.
        """
        if len(index) > self.ndim:
            raise IndexError(f"{self.path} has shape {self.shape}, and an index of {len(index)} axes was given")
        spans = tuple(self._span(axis, part) for axis, part in enumerate(index))
        try:
            return np.asarray(self._store[spans].read().result() if spans else self._store.read().result())
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{self.path} in {self._folder} cannot be read ({first_line(error)}); use another step of the run"
            ) from error

    def _span(self, axis: int, part: int | slice) -> int | slice:
        size = self.shape[axis]
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step != 1:
                raise ValueError(f"{self.path} is read in slices without a step, got a step of {step}")
            return slice(start, max(start, stop))
        if not -size <= part < size:
            raise IndexError(f"{self.path} has {size} along axis {axis}, index {part} is out of range")
        return part % size


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What a checkpoint of a run holds for the model.

    Attributes:
      step: of the checkpoint.
      config: that made it.
      params, quant_state: the trees of the training state, with a ``Leaf`` for each array.
    """

    step: int
    config: TrainConfig
    params: dict[str, Any]
    quant_state: dict[str, Any]

    @property
    def leaves(self) -> dict[str, Leaf]:
        """Path -> leaf, of both trees."""
        return leaves_by_path({kind: getattr(self, kind) for kind in KINDS})

    def read(self, path: str, *index: int | slice) -> np.ndarray:
        """Read one leaf, or the part of it that an index of its leading axes names.

        Args:
          path: of the leaf, "params/…" or "quant_state/…".
          index: as ``Leaf.read`` takes it.

        Raises:
          KeyError: no such leaf.
          IndexError, ValueError: see ``Leaf.read``.
        """
        leaves = self.leaves
        if path not in leaves:
            raise KeyError(f"step {self.step} has no leaf {path!r}; it has {', '.join(leaves)}")
        return leaves[path].read(*index)


def open_parameters(run_dir: str | Path, step: int | None = None, say: Callable[[str], Any] = print) -> Parameters:
    """Open the parameters and the quant state of a run: every byte of the checkpoint is compared with its sums.

    Nothing in the folder is changed, so that the run may be going on.

    Args:
      run_dir: folder of the run.
      step: of the checkpoint; None is the newest that opens.
      say: told of those that do not and are passed over.

    Raises:
      FileNotFoundError: no such folder.
      ValueError: no checkpoint, none of this step, none that opens, named, or one that is not of the run's config.yml.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"run folder {run_dir} does not exist; give a folder that `python -m train` wrote")
    folder = run_dir.resolve() / "checkpoints"
    steps = sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []
    if not steps:
        raise ValueError(
            f"run {run_dir} has no checkpoint; let it save one, or give a folder that `python -m train` wrote"
        )
    if step is not None:
        if step not in steps:
            raise ValueError(f"run {run_dir} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
        trees = _open(folder, step, say)
        return Parameters(step, config_of(run_dir, step), **trees)
    for newest in reversed(steps):
        try:
            trees = _open(folder, newest, say)
        except ValueError as error:
            say(f"{error}; trying the one before it")
        else:
            return Parameters(newest, config_of(run_dir, newest), **trees)
    raise ValueError(f"none of the checkpoints {steps} in {folder} opens; give another run, or train this one again")


def _open(folder: Path, step: int, say: Callable[[str], Any]) -> dict[str, Any]:
    state = folder / str(step) / "state"
    try:
        check_sums(folder / str(step))
        # Orbax opens all arrays side by side and leaves what it has begun where one fails; so the index comes first.
        if not list_arrays(state):
            raise ValueError(f"there are no arrays in {state}")
        tree: Any = ocp.PyTreeCheckpointHandler().metadata(epath.Path(state)).tree
        return map_by_path(lambda path, node: _leaf(state, path, node), {kind: tree[kind] for kind in KINDS})
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"checkpoint {step} in {folder} does not open ({first_line(error)})") from error


def _leaf(state: Path, path: str, metadata: Any) -> Leaf:
    store = open_array(state, metadata.name, chunks_at_once=1)
    chunk: Any = store.chunk_layout.read_chunk.shape
    return Leaf(path, *shape_and_dtype(store), tuple(chunk or ()), store, state)
