"""Parameters of a run read one at a time, a layer at a time, without the optimizer state."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxquant.core.paths import leaves_by_path
from tests.train.conftest import STEPS
from train.checkpoint import CHUNK_BYTES, Checkpoints, save_args
from train.config import TrainConfig
from train.conversion import open_parameters
from train.step import TrainState, build


@pytest.fixture(scope="module")
def state(finished: Any, tiny: TrainConfig) -> TrainState:
    """The last state of the fp8 run, restored as a run restores it."""
    config = TrainConfig(**{**vars(tiny), "quantization": "fp8"})
    with Checkpoints(finished("fp8"), config) as checkpoints:
        found = checkpoints.restore(build(config, 320).abstract_state)
    assert found is not None
    return found[0]


def _flat(state: TrainState) -> dict[str, np.ndarray]:
    trees = {"params": state.params, "quant_state": state.quant_state}
    return {path: np.asarray(leaf) for path, leaf in leaves_by_path(trees).items()}


def test_every_leaf_is_listed_and_read_bit_for_bit(finished: Any, state: TrainState):
    parameters = open_parameters(finished("fp8"))
    expected = _flat(state)
    assert parameters.step == STEPS
    assert parameters.stores.keys() == expected.keys()
    shapes = {path: (x.shape, x.dtype) for path, x in leaves_by_path(parameters.shapes).items()}
    assert shapes == {path: (x.shape, x.dtype) for path, x in expected.items()}
    for path in parameters.stores:
        assert parameters.read(path).tobytes() == expected[path].tobytes(), path


@pytest.mark.parametrize("index", [(0,), (1,), (1, 3)])
def test_a_part_is_the_same_part(finished: Any, state: TrainState, index: tuple[Any, ...]):
    path = "params/layers/mlp/wi_0/kernel"
    np.testing.assert_array_equal(open_parameters(finished("fp8")).read(path, *index), _flat(state)[path][index])


def _data(folder: Path) -> list[Path]:
    """Give the files that hold arrays, parameters and optimizer state; those of the index are smaller."""
    return [path for path in folder.glob("ocdbt.process_*/d/*") if path.stat().st_size > 8192]


def _cut(path: Path) -> None:
    """Leave a tenth: a third of the bytes are parameters, and in which part of a file they lie is orbax's choice."""
    os.truncate(path, path.stat().st_size // 10)


@pytest.mark.parametrize("damage", [_cut, Path.unlink, lambda path: os.truncate(path, 0)])
def test_a_leaf_that_cannot_be_read_is_named(copy: Path, damage: Callable[[Path], Any]):
    parameters = open_parameters(copy)
    for file in _data(copy / f"checkpoints/{STEPS}/state"):
        damage(file)
    messages = []
    for path in parameters.stores:
        try:
            parameters.read(path)
        except ValueError as error:
            messages.append(str(error))
            assert messages[-1].startswith(f"{path} in {copy}/checkpoints/{STEPS}/state cannot be read")
    assert messages


def test_reading_changes_nothing_in_the_run(copy: Path):
    unfinished = copy / "checkpoints/27.orbax-checkpoint-tmp"
    unfinished.mkdir()
    before = sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*"))
    assert open_parameters(copy).step == STEPS
    assert sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*")) == before


# How arrays are cut.

FLOAT32 = np.dtype("float32")
CUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "small": ((32, 256, 512), ()),
    "stacked layers": ((32, 4096, 14336), (0,)),
    "stacked experts": ((32, 8, 4096, 14336), (0, 1)),
    "stacked experts, small and few": ((32, 16, 512, 1024), (0,)),
    "stacked heads": ((32, 4096, 32, 128), (0,)),
    "an embedding": ((128256, 4096), ()),
}


@pytest.mark.parametrize("case", CUTS)
def test_large_arrays_are_cut_along_leading_axes(case: str):
    shape, axes = CUTS[case]
    args = save_args(jax.ShapeDtypeStruct(shape, FLOAT32))
    assert (args.shard_axes, args.chunk_byte_size) == (axes, CHUNK_BYTES)
