"""Quantized checkpoints: written whole or not at all, verified, and restored straight into sharded quantized arrays.

A checkpoint is a folder of three files. ``model.safetensors`` holds the arrays by name, four-bit elements packed two to
a byte along their last axis. ``jaxquant.json`` holds the config and a row for each leaf. ``SHA256SUMS`` has their sums.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.qtensor import QTensor
from jaxquant.core.tensor_spec import TensorSpec
from jaxquant.core.typed import build, convert, show
from jaxquant.export.safetensors import SafetensorsFile, SafetensorsWriter
from jaxquant.export.sums import NAME as SUMS
from jaxquant.export.sums import check_sums, write_sums
from jaxquant.serving.leaves import Leaf, check_like, describe, flatten, unflatten
from jaxquant.serving.placement import ChooseSharding, choose_sharding, place, to_stored

__all__ = ["Checkpoint", "load", "read_manifest", "save"]

FORMAT, VERSION = "jaxquant-quantized", 2
NAME, ARRAYS = "jaxquant.json", "model.safetensors"
_REPLACE = "copy the checkpoint again or convert the run again"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: nested dict of arrays and ``QTensor``, config of the quantization, the writer's extra."""

    params: dict[str, Any]
    config: dict[str, Any]
    extra: dict[str, Any]
    version: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of ``jaxquant.json``.

    Attributes:
      config: config of the quantization.
      extra: values that the writer added.
      leaves: leaves of the parameters, in order of their paths.
      version: version of the format.
    """

    config: dict[str, Any]
    extra: dict[str, Any]
    leaves: tuple[Leaf, ...]
    version: int = VERSION

    @property
    def bytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.bytes for leaf in self.leaves)


def save(
    directory: str | Path,
    params: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a quantized checkpoint, whole or not at all.

    It is written in ``DIRECTORY.jaxquant-partial``, which is then renamed; a folder of that name from a killed process
    is replaced. Every process of a run calls this with the same global arrays. The first process gathers one array at a
    time and writes it.

    Args:
      directory: must not exist.
      params: nested dict of arrays and ``QTensor``.
      config: config of the quantization; plain values, as ``to_mapping`` gives them.
      extra: more plain values to keep, such as the model's shape.
      files: texts of more files by name, such as a tokenizer.

    Raises:
      FileExistsError: the directory exists.
      ValueError: the whole variables instead of their "params", or a kernel that no recipe of the config makes.
      ValueError, TypeError: something that a checkpoint does not keep, named.
    """
    directory = Path(directory).resolve()
    if taken := sorted({NAME, ARRAYS, SUMS} & set(files or {})):
        raise ValueError(f"files has {taken[0]!r}, which the checkpoint writes itself; choose another name")
    if isinstance(params, Mapping) and isinstance(params.get("params"), Mapping):
        raise ValueError("params has the collection 'params', so it is the whole variables; save variables['params']")
    leaves = flatten(params)
    _check_made_by(leaves, config)
    rows = [describe(path, leaf) for path, leaf in leaves.items()]
    contents = {"format": FORMAT, "version": VERSION}
    contents |= {"config": _as_json("config", config), "extra": _as_json("extra", extra or {})}
    contents |= {"leaves": [row.as_row() for row in rows]}
    if directory.exists():
        raise FileExistsError(f"{directory} exists; give a folder that does not, or remove that one")
    partial, is_main = directory.with_name(directory.name + ".jaxquant-partial"), jax.process_index() == 0
    try:
        writer = None
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            writer = SafetensorsWriter(partial / ARRAYS, sum(len(row.arrays()) for row in rows), {})
        for row in rows:
            leaf = leaves[row.path]
            parts = list(leaf.parts.values()) if isinstance(leaf, QTensor) else [leaf]
            for stored, array in zip(row.arrays().values(), parts, strict=True):
                if isinstance(array, jax.Array) and not array.is_fully_addressable:
                    array = multihost_utils.process_allgather(array, tiled=True)
                if writer is not None:
                    writer.add(stored.path, to_stored(stored, array))
        if writer is not None:
            writer.close()
            for name, text in {NAME: json.dumps(contents, indent=1) + "\n", **(files or {})}.items():
                (partial / name).write_text(text, encoding="utf-8")
            write_sums(partial)
            os.rename(partial, directory)
    finally:
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoint saved")


def _as_json(name: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping as it will be read back."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{name} is {type(mapping).__name__}, not a mapping; give a dict of plain values")
    try:
        return json.loads(json.dumps(dict(mapping), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} cannot be written as JSON ({error}); give plain finite values") from None


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


def read_manifest(directory: str | Path) -> Manifest:
    """Read ``jaxquant.json`` of a quantized checkpoint, without its arrays.

    Raises:
      FileNotFoundError: nothing is there.
      ValueError: it is no quantized checkpoint, one of another version, or its ``jaxquant.json`` is damaged.
    """
    directory = Path(directory)
    path = directory / NAME
    if not directory.exists():
        raise FileNotFoundError(f"checkpoint {directory} does not exist; give a folder that `train convert` wrote")
    if not path.is_file():
        raise ValueError(f"{directory} is not a quantized checkpoint, it has no {NAME}; convert a run into it first")
    try:
        contents = convert(dict[str, Any], json.loads(path.read_bytes()), "the file")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON of a checkpoint ({error}); {_REPLACE}") from None
    version = contents.get("version")
    if contents.get("format") == FORMAT and version == 1:
        raise ValueError(
            f"checkpoint {directory} is of format version 1, which commit a87bb9a of jaxquant reads; convert the run "
            f"again, or load it there and save it as {ARRAYS}"
        )
    if contents.get("format") == FORMAT and type(version) is int and version > VERSION:
        raise ValueError(
            f"checkpoint {directory} is of format version {version} and this jaxquant reads version {VERSION}; "
            "install a newer jaxquant, or convert the run again with this one"
        )
    check_sums(directory, [NAME])
    if contents.get("format") != FORMAT or version != VERSION:
        found = f"its format is {show(contents.get('format'))}, version {show(version)}"
        raise ValueError(f"{path} is not of a quantized checkpoint: {found}; give another folder, or {_REPLACE}")
    try:
        parts = {name: convert(dict[str, Any], contents.get(name), name) for name in ("config", "extra")}
        rows = convert(list[Any], contents.get("leaves"), "leaves")
        leaves = tuple(_read_leaf(row, f"leaves[{index}]") for index, row in enumerate(rows))
        paths = [leaf.path for leaf in leaves]
        if paths != sorted(set(paths)):
            raise ValueError("leaves must be in order of their paths, each once")
        unflatten(dict.fromkeys(paths, ()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}; {_REPLACE}") from None
    return Manifest(**parts, leaves=leaves)


def _read_leaf(row: Any, place: str) -> Leaf:
    """Build a leaf of a manifest; it must be the description of arrays that there can be."""
    if isinstance(row, Mapping) and isinstance(row.get("path"), str):
        place = f"leaf {show(row['path'])}"
    leaf = build(Leaf, row, place)
    if leaf.role == "quantized" and leaf.codec is None and None in (leaf.scale_shape, leaf.scale_dtype):
        raise ValueError(f"{place} is of role 'quantized' and has no scale")
    arrays = leaf.arrays().items()
    like = {path: jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype)) for path, array in arrays}
    if describe(leaf.path, leaf.assemble(like)) != leaf or any(n < 1 for array in like.values() for n in array.shape):
        raise ValueError(f"{place} does not describe the arrays of a leaf, got {show(row)}")
    return leaf


def load(
    directory: str | Path,
    *,
    like: Mapping[str, Any] | None = None,
    sharding: Sharding | ChooseSharding | None = None,
    verify: bool = True,
) -> Checkpoint:
    """Load a quantized checkpoint straight into device arrays, each device reading its own part.

    The host holds one part of one array at a time. Four-bit elements are read packed and unpacked on the devices; no
    float array of a kernel is made.

    Args:
      directory: folder that ``save`` wrote.
      like: the tree that the model expects, with ``jax.ShapeDtypeStruct`` for arrays, inside ``QTensor`` too. Its
        shardings are not read.
      sharding: of every array; or a function of (path, shape, dtype name) that gives it, called for each array, those
        of a ``QTensor`` as ``PATH/qvalue``, ``PATH/scale``, ``PATH/zero_point``, ``PATH/outer_scale`` and
        ``PATH/input_scale``, with the shape and dtype that they have in the model. None is the default device.
      verify: whether the bytes of all files are compared with their sums. Names, shapes and dtypes always are.

    Raises:
      FileNotFoundError: nothing is there.
      ValueError: it is no quantized checkpoint, of another version, damaged, does not fit ``like``, or a sharding does
        not fit an array. Names the directory, file or leaf.
    """
    directory = Path(directory).resolve()
    manifest = read_manifest(directory)
    if like is not None:
        check_like(directory, manifest.leaves, like)
    wanted = {path: array for leaf in manifest.leaves for path, array in leaf.arrays().items()}
    shardings = {path: choose_sharding(array, sharding) for path, array in wanted.items()}
    if verify:
        check_sums(directory)
    if not (directory / ARRAYS).is_file():
        raise ValueError(f"{directory / ARRAYS} is gone, or no file; {_REPLACE}")
    file = SafetensorsFile(directory / ARRAYS)
    found = {name: (entry.array_shape, file[name].dtype.name) for name, entry in file.entries.items()}
    expected = {path: (array.stored_shape, array.stored_dtype) for path, array in wanted.items()}
    if found != expected:
        name = min(path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path))
        here, there = (show(each.get(name, "nothing")) for each in (expected, found))
        raise ValueError(
            f"{directory}: {NAME} says that {show(name)} is {here}, and {ARRAYS} has {there}; convert the run again"
        )
    leaves = {
        leaf.path: leaf.assemble({path: place(array, file, shardings[path]) for path, array in leaf.arrays().items()})
        for leaf in manifest.leaves
    }
    return Checkpoint(unflatten(leaves), manifest.config, manifest.extra, manifest.version)
