"""Quantized checkpoints: atomic save, verification, and loading directly into sharded quantized arrays.

A checkpoint is a folder of three files. ``model.safetensors`` holds the arrays by name; four-bit elements are packed in
pairs along the last axis. ``jaxquant.json`` holds the config and a row for each leaf. ``SHA256SUMS`` holds checksums.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
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
from jaxquant.serving.placement import ChooseSharding, choose_sharding, read_array, to_stored

__all__ = ["Checkpoint", "load", "read_manifest", "save"]

FORMAT, VERSION = "jaxquant-quantized", 2
NAME, ARRAYS = "jaxquant.json", "model.safetensors"
_REPLACE = "copy the checkpoint again or convert the run again"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: nested dict of arrays and ``QTensor``, quantization config, and extra values."""

    params: dict[str, Any]
    config: dict[str, Any]
    extra: dict[str, Any]
    version: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of ``jaxquant.json``.

    Attributes:
      config: quantization config.
      extra: values that the writer added.
      leaves: leaves of the parameters, sorted by path.
      version: version of the format.
    """

    config: dict[str, Any]
    extra: dict[str, Any]
    leaves: tuple[Leaf, ...]
    version: int = VERSION

    @property
    def bytes(self) -> int:
        """Total bytes of the leaves."""
        return sum(leaf.bytes for leaf in self.leaves)


def save(
    directory: str | Path,
    params: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    read: Callable[[str], Any] | None = None,
) -> None:
    """Write a quantized checkpoint atomically.

    The files are written to ``DIRECTORY.jaxquant-partial``, which is then renamed; an existing folder of that name is
    replaced. Every process of a run calls this with the same global arrays. The first process gathers and writes one
    array at a time.

    Args:
      directory: folder to create; it must not exist.
      params: nested dict of arrays and ``QTensor``.
      config: quantization config as plain values, see ``to_mapping``.
      extra: more plain values to store, such as the model's shape.
      files: contents of additional text files by name, such as a tokenizer.
      read: function from the path of a leaf to its array or ``QTensor``, for parameters that do not fit in memory
        together. ``params`` then has their shapes.

    Raises:
      FileExistsError: the directory exists.
      ValueError: ``params`` is the whole variables dict, or has a kernel that no recipe of the config produces.
      ValueError, TypeError: a value cannot be stored in a checkpoint; the message names the value.
    """
    directory = Path(directory).resolve()
    if taken := sorted({NAME, ARRAYS, SUMS} & set(files or {})):
        raise ValueError(f"files has {taken[0]!r}, which is a file of every checkpoint; choose another name")
    if isinstance(params, Mapping) and isinstance(params.get("params"), Mapping):
        raise ValueError("params must be the parameters, got a dict with 'params'; pass variables['params']")
    leaves = flatten(params)
    _check_produced_by(leaves, config)
    rows = [describe(path, leaf) for path, leaf in leaves.items()]
    contents = {"format": FORMAT, "version": VERSION}
    contents |= {"config": _to_json_values("config", config), "extra": _to_json_values("extra", extra or {})}
    contents |= {"leaves": [row.as_row() for row in rows]}
    if directory.exists():
        raise FileExistsError(f"{directory} already exists; choose another folder, or remove {directory}")
    partial, is_main = directory.with_name(directory.name + ".jaxquant-partial"), jax.process_index() == 0
    try:
        writer = None
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            writer = SafetensorsWriter(partial / ARRAYS, sum(len(row.arrays()) for row in rows), {})
        for row in rows:
            leaf = leaves[row.path] if read is None else read(row.path)
            if read is not None and describe(row.path, leaf) != row:
                raise ValueError(f"{row.path} was read as {describe(row.path, leaf)}, but params has {row}")
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


def _to_json_values(name: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping as ``json.loads`` will return it, or raise if it cannot be written."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{name} must be a dict of plain values, got {type(mapping).__name__}")
    try:
        return json.loads(json.dumps(dict(mapping), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} cannot be written as JSON ({error}); pass plain finite values") from None


def _check_produced_by(leaves: Mapping[str, Any], config: Any) -> None:
    """Raise if a kernel has a format that no recipe of the config produces; warn if no kernel is converted."""
    if not isinstance(config, Mapping) or "quantization" not in config:
        return
    recipes = resolver.recipes if (resolver := QuantConfig.from_any(config).resolver()) else ()
    produced = [spec.codec or spec.dtype for each in recipes if isinstance(spec := each.fwd.rhs, TensorSpec)]
    if produced and not any(isinstance(leaf, QTensor) for leaf in leaves.values()):
        warnings.warn("params has no converted kernel; pass the result of jaxquant.convert", stacklevel=3)
    for path, leaf in leaves.items():
        if isinstance(leaf, QTensor) and (kind := leaf.codec or leaf.qvalue.dtype.name) not in produced:
            raise ValueError(
                f"params has {path!r} in {kind}, but quantization {config['quantization']!r} produces "
                f"{', '.join(produced) or 'no quantized kernels'}; pass the config that converted the parameters"
            )


def read_manifest(directory: str | Path) -> Manifest:
    """Read ``jaxquant.json`` of a quantized checkpoint, without its arrays.

    Raises:
      FileNotFoundError: the directory does not exist.
      ValueError: the directory is not a quantized checkpoint of a supported version, or ``jaxquant.json`` is damaged.
    """
    directory = Path(directory)
    path = directory / NAME
    if not directory.exists():
        raise FileNotFoundError(f"checkpoint {directory} does not exist; pass a folder that `jaxquant convert` wrote")
    if not path.is_file():
        raise ValueError(f"{directory} is not a quantized checkpoint; pass a folder with the file {NAME}")
    try:
        contents = convert(dict[str, Any], json.loads(path.read_bytes()), "the file")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid JSON object ({error}); {_REPLACE}") from None
    version = contents.get("version")
    if contents.get("format") == FORMAT and version == 1:
        raise ValueError(
            f"checkpoint {directory} has format version 1, which only commit a87bb9a of jaxquant reads; convert "
            f"the run again, or load the checkpoint with that commit and save the arrays as {ARRAYS}"
        )
    if contents.get("format") == FORMAT and type(version) is int and version > VERSION:
        raise ValueError(
            f"checkpoint {directory} has format version {version}, but this jaxquant reads version {VERSION}; "
            "install a newer jaxquant, or convert the run again with this jaxquant"
        )
    check_sums(directory, [NAME])
    if contents.get("format") != FORMAT or version != VERSION:
        problem = f"got format {show(contents.get('format'))}, version {show(version)}"
        raise ValueError(f"{path} is not from a quantized checkpoint: {problem}; choose another folder, or {_REPLACE}")
    try:
        parts = {name: convert(dict[str, Any], contents.get(name), name) for name in ("config", "extra")}
        rows = convert(list[Any], contents.get("leaves"), "leaves")
        leaves = tuple(_read_leaf(row, f"leaves[{index}]") for index, row in enumerate(rows))
        paths = [leaf.path for leaf in leaves]
        if paths != sorted(set(paths)):
            raise ValueError("leaves must be sorted by path, each path once")
        unflatten(dict.fromkeys(paths, ()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}; {_REPLACE}") from None
    return Manifest(**parts, leaves=leaves)


def _read_leaf(row: Any, place: str) -> Leaf:
    """Build a leaf from a row of the manifest, and check that it describes valid arrays."""
    if isinstance(row, Mapping) and isinstance(row.get("path"), str):
        place = f"leaf {show(row['path'])}"
    leaf = build(Leaf, row, place)
    if leaf.role == "quantized" and leaf.codec is None and None in (leaf.scale_shape, leaf.scale_dtype):
        raise ValueError(f"{place} has role 'quantized' but no scale")
    arrays = leaf.arrays().items()
    like = {path: jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype)) for path, array in arrays}
    if describe(leaf.path, leaf.assemble(like)) != leaf or any(n < 1 for array in like.values() for n in array.shape):
        raise ValueError(f"{place} does not describe valid arrays: {show(row)}")
    return leaf


def load(
    directory: str | Path,
    *,
    like: Mapping[str, Any] | None = None,
    sharding: Sharding | ChooseSharding | None = None,
    verify: bool = True,
) -> Checkpoint:
    """Load a quantized checkpoint directly into device arrays; each device reads its own shard.

    The host holds one shard of one array at a time. Four-bit elements are unpacked on the devices, and kernels are
    never stored in float.

    Args:
      directory: folder that ``save`` wrote.
      like: tree that the model expects, with ``jax.ShapeDtypeStruct`` for arrays, also inside ``QTensor``. Shardings
        in this tree are ignored.
      sharding: sharding of all arrays, or a function (path, shape, dtype name) -> sharding that is called for each
        array. The parts of a ``QTensor`` have the paths ``PATH/qvalue``, ``PATH/scale``, ``PATH/zero_point``,
        ``PATH/outer_scale`` and ``PATH/input_scale``; shape and dtype are the shape and dtype in the
        model. None selects the default device.
      verify: whether to compare the files with their checksums. Names, shapes and dtypes are always checked.

    Raises:
      FileNotFoundError: the directory does not exist.
      ValueError: the directory is not a quantized checkpoint of a supported version, is damaged or does not match
        ``like``, or a sharding is not valid for an array. The message names the directory, file or leaf.
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
        raise ValueError(f"there is no file {directory / ARRAYS}; {_REPLACE}")
    file = SafetensorsFile(directory / ARRAYS)
    actual = {name: (entry.array_shape, file[name].dtype.name) for name, entry in file.entries.items()}
    expected = {path: (array.stored_shape, array.stored_dtype) for path, array in wanted.items()}
    if actual != expected:
        name = min(path for path in actual.keys() | expected.keys() if actual.get(path) != expected.get(path))
        listed, present = (show(each.get(name, "nothing")) for each in (expected, actual))
        raise ValueError(f"{directory}: {NAME} lists {show(name)} as {listed}, but {ARRAYS} has {present}; {_REPLACE}")
    leaves = {
        leaf.path: leaf.assemble({path: read_array(x, file, shardings[path]) for path, x in leaf.arrays().items()})
        for leaf in manifest.leaves
    }
    return Checkpoint(unflatten(leaves), manifest.config, manifest.extra, manifest.version)
