"""Writer of a Hugging Face folder: sharded safetensors with an index, config, generation config, tokenizer files.

A ``Scheme`` defines each quantized format by its entry in ``config.json``, and layers are written as this entry
describes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxquant.export.fused import Slice, join
from jaxquant.export.hf import CheckpointQuantization, LayerSpec, read_quantization
from jaxquant.export.layouts import row_chunks, to_host
from jaxquant.export.safetensors import SafetensorsWriter
from jaxquant.export.source import HEAD, Layout, Source, Vocabulary
from jaxquant.export.stored import read_layer, write_layer

SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
FLOATS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
"""Dtypes of unquantized tensors."""


class Row(NamedTuple):
    """One row of an exporter's summary: a written tensor, its format, shape, size in bytes, and SQNR in dB."""

    tensor: str
    format: str
    shape: tuple[int, ...]
    bytes: int
    sqnr: float


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One format of quantized linear layers in a Hugging Face folder.

    Attributes:
      name: name of the format.
      config: ``quantization_config``, or None for float layers.
      scalar: shape in which tensors of one element are stored.
      files: additional JSON files to write, by name.
    """

    name: str
    config: Mapping[str, Any] | None
    scalar: tuple[int, ...] = (1,)
    files: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def spec(self) -> LayerSpec | None:
        """Return the layer spec that a reader derives from ``config``, or None for float layers."""
        found = self.quantization()
        return None if found is None else found.specs[0]

    def quantization(self, layout: Layout | None = None) -> CheckpointQuantization | None:
        """Return the rules that a reader derives from ``config``, with the float layers of a model, or None."""
        config = self.config if layout is None else _with_ignored(self.config, layout)
        return None if config is None else read_quantization({"quantization_config": config})

    @property
    def multiple(self) -> int:
        """Return the tile size, which must divide the size of the contraction, or 1 if the format has no tiles."""
        free, tile = (self.spec and self.spec.weight.block_size) or (0, 1)
        return tile if free == 1 else 1


def write_folder(
    source: Source,
    out: str | Path,
    scheme: Scheme,
    *,
    dtype: str = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Write a model as a Hugging Face folder, tensor by tensor.

    Args:
      source: model to write.
      out: folder to write; it must not exist yet.
      scheme: format of the linear layers; embeddings, norms and the head stay in ``dtype``.
      dtype: a key of ``FLOATS``.
      shard_bytes: maximum size of a file in bytes; only a file with a single tensor may be larger.
      progress: function that is called with the ``Row`` of each written tensor, or None.

    Raises:
      FileExistsError: ``out`` exists.
      ValueError: ``dtype`` is unknown, the tile size does not divide a contraction, or a value is too large for its
        format.
    """
    out = Path(out)
    _check_layout(source.layout, scheme, dtype)
    with partial_path(out) as folder:
        folder.mkdir()
        rows = _write_tensors(source, folder, scheme, dtype, shard_bytes, progress)
        tokens = source.vocabulary.ids if source.vocabulary else {}
        config = {**source.layout.config, "torch_dtype": dtype, **{k: v for k, v in tokens.items() if v is not None}}
        if scheme.config is not None:
            config["quantization_config"] = scheme.config
        files = {"config.json": config, **scheme.files}
        files = {name: _with_ignored(contents, source.layout) for name, contents in files.items()}
        files = {name: json.dumps(contents, indent=2) + "\n" for name, contents in files.items()}
        for name, text in (files | tokenizer_files(source.vocabulary)).items():
            (folder / name).write_text(text, encoding="utf-8")
    return rows


def folder_tensors(source: Source, scheme: Scheme, dtype: str) -> dict[str, Any]:
    """Return the tensors that ``write_folder`` writes, by name; see ``jaxquant.export.named_tensors``.

    Args:
      source, scheme, dtype: same as for ``write_folder``.

    Raises:
      ValueError: ``dtype`` is unknown, or the tile size does not divide a contraction.
    """
    _check_layout(source.layout, scheme, dtype)
    layout, rules, found = source.layout, scheme.quantization(source.layout), {}
    experts = _Experts(layout)
    for name in layout.tensors:
        module, weight = name.removesuffix(".weight"), source.finite(name)
        spec, tensors = _encode(source, scheme, rules, name, weight)
        for end, array in tensors.items():
            ready = experts.add(f"{module}{end}", array, None if spec else FLOATS[dtype])
            found |= {stored: x if cast is None else x.astype(cast) for stored, x, cast in ready}
    return found


class _Experts:
    """Tensors of single experts, until the tensor in which they are stored together is complete."""

    def __init__(self, layout: Layout):
        self._count = layout.config["num_local_experts"] if layout.has_fused_experts else 0
        self._parts: dict[str, dict[Slice, Any]] = {}

    def add(self, name: str, array: Any, cast: Any) -> list[tuple[str, Any, Any]]:
        """Return name, array and the dtype to cast it to, if the stored tensor with this part is complete.

        Args:
          name: name of the tensor.
          array: tensor, which can be a part of a stored tensor.
          cast: dtype in which the tensor is stored, or None for the dtype of the array.
        """
        part = Slice.of(name) if self._count else None
        if part is None:
            return [(name, array, cast)]
        parts = self._parts.setdefault(part.stored, {})
        parts[part] = array if cast is None else array.astype(cast)
        is_complete = len(parts) == part.step * self._count
        return [(part.stored, join(self._parts.pop(part.stored)), None)] if is_complete else []


def _check_layout(layout: Layout, scheme: Scheme, dtype: str) -> None:
    """Raise if a format cannot store the tensors of a model; see ``write_folder``."""
    if dtype not in FLOATS:
        raise ValueError(f"dtype {dtype!r} is not supported; use one of {', '.join(FLOATS)}")
    if scheme.config is not None and layout.has_fused_experts != (scheme.name == "mxfp4"):
        known = "hf, mxfp4 or a GGUF format" if layout.has_fused_experts else "another format"
        model = layout.config.get("architectures", ["this model"])[0]
        raise NotImplementedError(f"{model} cannot be stored as {scheme.name}; use {known}")
    for name, (_, depth) in layout.linears.items():
        if depth % scheme.multiple:
            block = f"the block size {scheme.multiple} of {scheme.name}"
            raise ValueError(f"{name} contracts {depth} elements, but {block} does not divide that; use another format")


@contextlib.contextmanager
def partial_path(out: Path) -> Iterator[Path]:
    """Yield the path ``OUT.partial``; rename it to OUT after the ``with`` block, or delete it if the block raises.

    Raises:
      FileExistsError: ``out`` exists.
    """
    partial = out.with_name(f"{out.name}.partial")
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another name or remove it")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)


def _with_ignored(contents: Any, layout: Layout) -> Any:
    """Return JSON contents in which each list ``[HEAD]`` of layers that are not quantized has all such layers."""
    if isinstance(contents, Mapping):
        return {key: _with_ignored(value, layout) for key, value in contents.items()}
    return layout.float_linears if contents == [HEAD] else contents


def _write_tensors(
    source: Source, folder: Path, scheme: Scheme, dtype: str, limit: int, progress: Callable[[Row], None] | None
) -> list[Row]:
    layout, rules = source.layout, scheme.quantization(source.layout)
    shards, experts, rows, places = _ShardWriter(folder, limit, 5 * len(layout.tensors)), _Experts(layout), [], {}
    for name in layout.tensors:
        module, weight = name.removesuffix(".weight"), source.finite(name)
        spec, tensors = _encode(source, scheme, rules, name, weight)
        format, back, cast = dtype, weight, np.dtype(FLOATS[dtype])
        if spec is not None:
            format, back, cast = scheme.name, read_layer(spec, tensors, weight.shape).decode(), None
        check_fits(name, weight, back, cast, format, "export with dtype float32" if cast else "use another format")
        size = sum(array.size * (cast or array.dtype).itemsize for array in tensors.values())
        for end, array in sorted(tensors.items(), key=lambda pair: -pair[1].itemsize):
            # The writer casts chunk by chunk, so that a large embedding is not in memory twice.
            places |= {ready[0]: shards.add(*ready) for ready in experts.add(f"{module}{end}", array, cast)}
        rows.append(Row(name, format, weight.shape, size, sqnr(weight, back, cast)))
        if progress is not None:
            progress(rows[-1])
    shards.finish(places)
    return rows


def _encode(
    source: Source, scheme: Scheme, rules: CheckpointQuantization | None, name: str, weight: Any
) -> tuple[LayerSpec | None, dict[str, Any]]:
    """Return the quantization of a tensor, or None for float, and its stored tensors by the end of their name."""
    module = name.removesuffix(".weight")
    spec = rules.spec(module) if rules is not None and module in source.layout.linears else None
    if spec is None:
        return None, {name.removeprefix(module): weight}
    tensors = write_layer(spec, source, module, weight)
    return spec, {end: to_host(part if part.ndim else part.reshape(scheme.scalar)) for end, part in tensors.items()}


@np.errstate(over="ignore")
def check_fits(name: str, x: np.ndarray, back: np.ndarray, cast: Any, format: str, way_out: str) -> None:
    """Raise if a finite tensor becomes infinite in its format; ``back`` is the decoded tensor, cast as in ``sqnr``.

    Raises:
      ValueError: the tensor overflows; the message has its largest magnitude and the format.
    """
    ends = np.array([back.min(), back.max()]).astype(cast or back.dtype)
    if not np.isfinite(ends).all():
        raise ValueError(f"{name} has magnitude {max(x.max(), -x.min()):g}, which is too large for {format}; {way_out}")


def sqnr(x: np.ndarray, back: np.ndarray, cast: np.dtype[Any] | None = None) -> float:
    """Return ``10 · log10(Σ x² / Σ (x − back)²)`` in dB, summed in float64 chunk by chunk.

    ``back`` is the decoded tensor. If ``cast`` is a dtype, ``back`` is cast to it first.
    """
    signal = noise = 0.0
    flat, other = x.reshape(-1), back.reshape(-1)
    for chunk in row_chunks(flat.shape):
        part, restored = flat[chunk].astype(np.float64), other[chunk]
        signal += float(part @ part)
        part -= restored if cast is None else restored.astype(cast).astype(np.float64)
        noise += float(part @ part)
    return math.inf if noise == 0 else -math.inf if signal == 0 else 10 * math.log10(signal / noise)


class _ShardWriter:
    """Writer of safetensors files of at most ``limit`` bytes each; a single file has no number in its name."""

    def __init__(self, folder: Path, limit: int, names: int):
        self._folder, self._limit, self._names = folder, limit, names
        self._files: list[SafetensorsWriter] = []

    def add(self, name: str, array: np.ndarray, cast: np.dtype[Any] | None = None) -> int:
        """Write a tensor, optionally cast; return the index of its file."""
        size = array.size * (cast or array.dtype).itemsize
        if not self._files or (self._files[-1].bytes and self._files[-1].bytes + size > self._limit):
            if self._files:
                self._files[-1].close()
            path = self._folder / f"part-{len(self._files)}"
            self._files.append(SafetensorsWriter(path, self._names, {"format": "pt"}))
        self._files[-1].add(name, array, cast=cast)
        return len(self._files) - 1

    def finish(self, places: Mapping[str, int]) -> None:
        """Rename the files to their final names, and write the index if there are several files."""
        self._files[-1].close()
        count = len(self._files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        for file, name in zip(self._files, names, strict=True):
            file.path.rename(self._folder / name)
        if count > 1:
            total = sum(file.bytes for file in self._files)
            index = {"metadata": {"total_size": total}, "weight_map": {name: names[at] for name, at in places.items()}}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def tokenizer_files(vocabulary: Vocabulary | None) -> dict[str, str]:
    """Return the tokenizer's files and the generation config as texts, by file name; copied files stay as they are."""
    if vocabulary is None:
        return {}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.adds_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
    config |= {f"{kind}_token": vocabulary.tokens[ids[0]] for kind, ids in vocabulary.special.items() if ids}
    generation = {key: value for key, value in vocabulary.ids.items() if value is not None}
    made = {
        "tokenizer.json": vocabulary.tokenizer_json,
        "tokenizer_config.json": config,
        "generation_config.json": {"_from_model_config": True, **generation},
    }
    return {name: json.dumps(contents, indent=2) + "\n" for name, contents in made.items()} | dict(vocabulary.files)
