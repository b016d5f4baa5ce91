"""Parameters of a run, read one at a time or one layer at a time, without the optimizer state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxquant.core.paths import leaves_by_path
from jaxquant.training.checkpoint import CHUNK_BYTES, Checkpoints, make_save_args
from jaxquant.training.config import TrainConfig
from jaxquant.training.conversion import open_parameters
from jaxquant.training.step import build
from tests.train.conftest import STEPS, quantized


def test_every_leaf_is_what_the_run_itself_restores_bit_for_bit(finished: Any, tiny: TrainConfig):
    config = quantized(tiny, "fp8")
    with Checkpoints(finished("fp8"), config) as checkpoints:
        found = checkpoints.restore(build(config, 320).abstract_state)
    assert found is not None
    expected = leaves_by_path({"params": found[0].params, "quant_state": found[0].quant_state})
    parameters = open_parameters(finished("fp8"))
    assert (parameters.step, parameters.stores.keys()) == (STEPS, expected.keys())
    shapes = {path: (x.shape, x.dtype) for path, x in leaves_by_path(parameters.shapes).items()}
    assert shapes == {path: (x.shape, x.dtype) for path, x in expected.items()}
    for path, leaf in expected.items():
        assert parameters.read(path).tobytes() == np.asarray(leaf).tobytes(), path


def test_reading_a_part_changes_nothing_and_a_leaf_that_cannot_be_read_is_named(copy: Path):
    before = sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*"))
    parameters, messages, path = open_parameters(copy), [], "params/layers/mlp/wi_0/kernel"
    for index in ((1,), (1, 3)):
        np.testing.assert_array_equal(parameters.read(path, *index), parameters.read(path)[index])
    assert sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*")) == before
    for file in (copy / f"checkpoints/{STEPS}/state").glob("ocdbt.process_*/d/*"):
        if file.stat().st_size > 8192:  # files of arrays: parameters and optimizer state; the index is smaller
            os.truncate(file, file.stat().st_size // 10)
    for path in parameters.stores:
        try:
            parameters.read(path)
        except ValueError as error:
            messages.append(str(error))
            assert messages[-1].startswith(f"{path} in {copy}/checkpoints/{STEPS}/state cannot be read")
    assert messages


def test_large_arrays_are_cut_along_leading_axes():
    for shape, axes in (((32, 256, 512), ()), ((32, 4096, 14336), (0,)), ((32, 8, 4096, 14336), (0, 1))):
        args = make_save_args(jax.ShapeDtypeStruct(shape, np.dtype("float32")))
        assert (args.shard_axes, args.chunk_byte_size) == (axes, CHUNK_BYTES)
