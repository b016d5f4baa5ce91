"""The parameters that a run saved, one at a time: no optimizer state, and no more in memory than what is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jaxquant import state
from jaxquant.core.trees import leaves_by_path, map_by_path
from jaxquant.serving.arrays import list_arrays, open_array, shape_and_dtype
from jaxquant.serving.placement import first_line
from train.config import TrainConfig
from train.sums import check_sums, config_of

KINDS = ("params", "quant_state")
"""Parts of a training state that are read here."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What a checkpoint of a run holds for the model.

    Attributes:
      step: of the checkpoint.
      config: that made it.
      shapes: the trees "params" and "quant_state" of the training state, with a shape and dtype for each array.
      stores: "params/..." or "quant_state/..." -> the array, not read yet.
    """

    step: int
    config: TrainConfig
    shapes: dict[str, Any]
    stores: dict[str, ts.TensorStore] = dataclasses.field(repr=False)
    _folder: Path = dataclasses.field(repr=False)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the decoder, as shapes."""
        return state.merge(self.shapes["params"], self.shapes["quant_state"])

    def read(self, path: str, *index: int) -> np.ndarray:
        """Read one array, or the part of it that an index of its leading axes names.

        Raises:
          ValueError: files that cannot be read.
        """
        try:
            return np.asarray(self.stores[path][index].read().result())
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{path} in {self._folder} cannot be read ({first_line(error)}); use another step of the run"
            ) from error


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
    if step not in (None, *steps):
        raise ValueError(f"run {run_dir} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    for number in reversed(steps) if step is None else [step]:
        try:
            shapes, stores = _open(folder, number)
        except ValueError as error:
            if step is not None:
                raise
            say(f"{error}; trying the one before it")
        else:
            return Parameters(number, config_of(run_dir, number), shapes, stores, folder / str(number) / "state")
    raise ValueError(f"none of the checkpoints {steps} in {folder} opens; give another run, or train this one again")


def _open(folder: Path, step: int) -> tuple[dict[str, Any], dict[str, ts.TensorStore]]:
    state = folder / str(step) / "state"
    try:
        check_sums(folder / str(step))
        # Orbax opens all arrays side by side and leaves what it has begun where one fails; so the index comes first.
        if not list_arrays(state):
            raise ValueError(f"there are no arrays in {state}")
        tree: Any = ocp.PyTreeCheckpointHandler().metadata(epath.Path(state)).tree
        trees = {kind: tree[kind] for kind in KINDS}
        stores = {path: open_array(state, node.name, chunks_at_once=1) for path, node in leaves_by_path(trees).items()}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"checkpoint {step} in {folder} does not open ({first_line(error)})") from error
    return map_by_path(lambda path, _: _shape(stores[path]), trees), stores


def _shape(store: ts.TensorStore) -> jax.ShapeDtypeStruct:
    shape, dtype = shape_and_dtype(store)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
