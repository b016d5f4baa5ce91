"""Quantized checkpoints: written whole or not at all, verified, and restored straight into sharded quantized arrays.

A checkpoint is a folder with ``jaxquant.json`` (see ``manifest``) and ``params/``, which orbax writes: a folder for
each array of the parameters, four-bit elements packed two to a byte along their last axis, nothing compressed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.qtensor import QTensor
from jaxquant.core.tensor_spec import TensorSpec
from jaxquant.serving.arrays import open_array, read_sharded, save_args, shape_and_dtype
from jaxquant.serving.leaves import Stored, check_like, check_width, describe, flatten, unflatten
from jaxquant.serving.manifest import (
    ARRAYS,
    Manifest,
    Progress,
    as_json,
    check_files,
    list_files,
    read_manifest,
    write_manifest,
)
from jaxquant.serving.placement import ChooseSharding, automatic, choose_sharding, first_line, from_stored, to_stored
from jaxquant.serving.validation import check_store

__all__ = ["Checkpoint", "load", "read_manifest", "save"]

CHUNK_BYTES = 16 * 2**20
"""A chunk is read whole, also where a sharding cuts through it."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: nested dict of arrays and ``QTensor``, config of the quantization, the writer's extra."""

    params: dict[str, Any]
    config: dict[str, Any]
    extra: dict[str, Any]
    version: int


def save(
    directory: str | Path,
    params: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a quantized checkpoint, whole or not at all.

    It is written beside, in ``DIRECTORY.jaxquant-partial``, and renamed; what a killed process left there goes. Every
    process of a run calls this with the same global arrays and a directory that all of them see.

    Args:
      directory: must not exist.
      params: nested dict of arrays and ``QTensor``.
      config: of the quantization; plain values, as ``to_mapping`` gives them.
      extra: more plain values to keep, such as the model's shape.
      files: texts of more files by name, such as a tokenizer.
      progress: called now and then, by every process.

    Raises:
      FileExistsError: the directory exists.
      ValueError: the whole variables instead of their "params", or a kernel that no recipe of the config makes.
      ValueError, TypeError: something that a checkpoint does not keep, named.
    """
    directory = Path(directory).resolve()
    leaves = flatten(params)
    if isinstance(params.get("params"), Mapping):
        raise ValueError("params has the collection 'params', so it is the whole variables; save variables['params']")
    _check_made_by(leaves, config)
    manifest = Manifest(
        config=as_json("config", config),
        extra=as_json("extra", extra or {}),
        leaves=tuple(describe(path, leaf) for path, leaf in leaves.items()),
        files={},
    )
    if directory.exists():
        raise FileExistsError(f"{directory} exists; give a folder that does not, or remove that one")
    arrays = {}
    for leaf in manifest.leaves:
        for stored, array in zip(leaf.arrays().values(), _parts(leaves[leaf.path]), strict=True):
            arrays[stored.name] = to_stored(stored, array)
    partial = directory.with_name(directory.name + ".jaxquant-partial")
    with _written(partial) as is_main:
        report = progress or (lambda *_: None)
        report(0, manifest.bytes, "writing")
        # OCDBT, orbax's default, keeps small arrays in index nodes that it writes anew with every commit: it made 2.3
        # MB of 150 layers of 9 KB. A folder for each array also tells which leaf a damaged file is of.
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_compression=False, type_handler_registry=_without_copies()
        )
        with _without_ocdbt_warning(), ocp.Checkpointer(handler) as checkpointer:
            cut = {name: save_args(array, CHUNK_BYTES) for name, array in arrays.items()}
            checkpointer.save(partial / ARRAYS, args=ocp.args.PyTreeSave(arrays, save_args=cut))
        report(manifest.bytes, manifest.bytes, "writing")
        if is_main:
            for name, text in (files or {}).items():
                (partial / name).write_text(text, encoding="utf-8")
            write_manifest(partial, dataclasses.replace(manifest, files=list_files(partial, progress)))
            os.rename(partial, directory)
    _wait("checkpoint saved")


def _without_copies() -> ocp.type_handlers.TypeHandlerRegistry:
    """Make orbax write host arrays from where they lie; by itself it copies them all until the save has ended."""
    return ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )


def _check_made_by(leaves: Mapping[str, Any], config: Any) -> None:
    """Refuse kernels of another element type or format than the recipes of a config make, where it names one."""
    if not isinstance(config, Mapping) or "quantization" not in config:
        return
    resolver = QuantConfig.from_any(config).resolver()
    specs = [recipe.fwd.rhs for recipe in ([] if resolver is None else resolver.recipes)]
    made = [spec.codec or spec.dtype for spec in specs if isinstance(spec, TensorSpec)]
    for path, leaf in leaves.items():
        if isinstance(leaf, QTensor) and (leaf.codec or leaf.qvalue.dtype.name) not in made:
            raise ValueError(
                f"params has {path!r} in {leaf.codec or leaf.qvalue.dtype.name}, and quantization "
                f"{config['quantization']!r} makes {', '.join(made) or 'no quantized kernels'}; give the config with "
                "which the parameters were converted"
            )


@contextlib.contextmanager
def _without_ocdbt_warning() -> Iterator[None]:
    """Keep orbax from warning that there is no OCDBT store to merge where none was asked for."""

    def wanted(record: logging.LogRecord) -> bool:
        return "Skipping merge of OCDBT" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


@contextlib.contextmanager
def _written(partial: Path) -> Iterator[bool]:
    """Make a folder to write in, and remove it where that fails. Gives whether this is the process that finishes."""
    is_main = jax.process_index() == 0
    _wait("checkpoint begun")
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _wait("checkpoint folder made")
    try:
        yield is_main
    finally:
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)


def load(
    directory: str | Path,
    *,
    like: Mapping[str, Any] | None = None,
    sharding: Sharding | ChooseSharding | None = None,
    verify: bool = True,
    progress: Progress | None = None,
) -> Checkpoint:
    """Load a quantized checkpoint straight into device arrays, each device reading its own part.

    The host holds one part of one array at a time. Four-bit elements are read packed and unpacked on the devices; no
    float array of a kernel is made.

    Args:
      directory: that ``save`` wrote.
      like: the tree that the model expects, with ``jax.ShapeDtypeStruct`` for arrays, inside ``QTensor`` too. Its
        shardings are not read.
      sharding: of every array; or a function of (path, shape, dtype name) that gives it, called for each array, those
        of a ``QTensor`` as ``PATH/qvalue``, ``PATH/scale`` and ``PATH/zero_point``, with the shape and dtype that they
        have in the model. None is the default device.
      verify: whether the bytes of all files are compared with their sums. Names, sizes, shapes and dtypes always are.
      progress: called now and then.

    Raises:
      FileNotFoundError: nothing is there.
      ValueError: it is no quantized checkpoint, of a newer format, damaged, does not fit ``like``, or a sharding does
        not fit an array. Names the directory, file or leaf.
    """
    directory = Path(directory).resolve()
    manifest = read_manifest(directory)
    if like is not None:
        check_like(directory, manifest.leaves, like)
    stored = {path: array for leaf in manifest.leaves for path, array in leaf.arrays().items()}
    for array in stored.values():
        check_width(array.path, array.dtype)
    shardings = {path: choose_sharding(array, sharding) for path, array in stored.items()}
    check_files(directory, manifest.files, verify, progress)
    stores = _open_arrays(directory, stored.values())
    leaves: dict[str, Any] = {}
    done = 0
    for leaf in manifest.leaves:
        arrays = {path: _read(directory, stored[path], stores[path], shardings[path]) for path in leaf.arrays()}
        leaves[leaf.path] = leaf.assemble(arrays)
        done += leaf.bytes
        if progress is not None:
            progress(done, manifest.bytes, "loading")
    return Checkpoint(unflatten(leaves), manifest.config, manifest.extra, manifest.version)


def _wait(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _parts(leaf: Any) -> list[Any]:
    return list(leaf.parts.values()) if isinstance(leaf, QTensor) else [leaf]


def _open_arrays(directory: Path, expected: Iterable[Stored]) -> dict[str, ts.TensorStore]:
    """Open every array and compare what is stored with the table of leaves."""
    folder = directory / ARRAYS
    names = {array.name: array for array in expected}
    for path in sorted(path.parent for path in folder.glob("*/.zarray")):
        if path.name not in names:
            raise ValueError(f"{path} is no leaf of the checkpoint; convert the run again")
    opened = {}
    for name, array in names.items():
        if not (folder / name / ".zarray").is_file():
            raise ValueError(f"leaf {array.path} is missing in {folder}; convert the run again")
        with _naming(directory, array):
            opened[array.path] = open_array(folder / name)
        found, wanted = shape_and_dtype(opened[array.path]), (array.stored_shape, array.stored_dtype)
        if found != wanted:
            raise ValueError(
                f"leaf {array.path} is stored as {found[1]}{found[0]} in {folder / name}, and jaxquant.json says "
                f"{wanted[1]}{wanted[0]}; convert the run again"
            )
    for name, array in names.items():
        check_store(folder / name, array)
    return opened


def _read(directory: Path, stored: Stored, store: ts.TensorStore, sharding: Sharding) -> jax.Array:
    with _naming(directory, stored):
        array = read_sharded(store, automatic(sharding))
    return from_stored(stored, array, sharding)


@contextlib.contextmanager
def _naming(directory: Path, stored: Stored) -> Iterator[None]:
    """Add the leaf's name to what tensorstore raises, of which a verified checkpoint gives it no reason."""
    try:
        yield
    except (ValueError, OSError) as error:
        where = directory / ARRAYS / stored.name
        raise ValueError(
            f"leaf {stored.path} in {where} cannot be read ({first_line(error)}); copy the checkpoint again"
        ) from error
