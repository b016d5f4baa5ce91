"""Import of foreign checkpoints, into a run for further training or into a converted checkpoint for serving."""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import serving
from jaxquant.core.blocks import BlocksError, block_shape, scale_shape
from jaxquant.core.dtypes import element
from jaxquant.core.paths import leaves_by_path
from jaxquant.core.qtensor import QTensor, dequantize, make_qtensor, mark_stacked_axes
from jaxquant.core.typed import build as build_dataclass
from jaxquant.export import DecoderShape, HfFolder, Row, Source, check_export, open_gguf
from jaxquant.export.folder import sqnr, tokenizer_files
from jaxquant.export.layouts import check_finite
from jaxquant.serving.leaves import unflatten
from jaxquant.trace.kernels import LayerKernel
from jaxquant.training.checkpoint import Checkpoints, Readers, repeat_element, write_config
from jaxquant.training.config import TrainConfig
from jaxquant.training.conversion import cast_as_read, initial_variables, layer_config, require_new, save_served
from jaxquant.training.data import make_iterators
from jaxquant.training.exporting import Location, locate_tensors
from jaxquant.training.model import Decoder
from jaxquant.training.native_strings import native_fields
from jaxquant.training.step import Program, TrainState, build, decoder_of
from jaxquant.training.tokenizer import open_tokenizer

Changes = Mapping[str, Any] | None
"""Fields of ``TrainConfig`` that the checkpoint does not determine."""
Progress = Callable[[Row], object]
"""Callback for one ``Row``: first the tokenizer with its origin, then each tensor with its format, shape and bytes.

``Row.sqnr`` compares the written tensor with the decoded float32 tensor of the checkpoint, and is infinite if both are
equal.
"""


def open_checkpoint(path: str | Path, *, has_tokenizer: bool = False) -> tuple[Source, HfFolder | None]:
    """Open a GGUF file or a Hugging Face folder. If jaxquant exported it, check its checksums.

    Args:
      path: file or folder.
      has_tokenizer: whether to read the tokenizer.

    Raises:
      FileNotFoundError, ValueError, NotImplementedError: the checkpoint does not exist, is damaged, or is of an
        unsupported family.
    """
    path = Path(path)
    check_export(path)
    if path.is_dir():
        folder = HfFolder(path)
        return folder.source(has_tokenizer=has_tokenizer), folder
    if path.is_file():
        return open_gguf(path, has_tokenizer=has_tokenizer), None
    raise FileNotFoundError(f"{path} does not exist; pass a GGUF file or the folder of a Hugging Face model")


def imported_config(
    shape: DecoderShape, checkpoint: Path, tokenizer: Path | None, changes: dict[str, Any]
) -> TrainConfig:
    """Return the configuration of a run with an imported model, from its shape, tokenizer and requested changes.

    Raises:
      ValueError, TypeError: a requested field contradicts the shape, or a value is invalid.
    """
    fields = dataclasses.asdict(shape)
    if fixed := sorted(set(fields) & set(changes)):
        raise ValueError(f"{fixed[0]} is {fields[fixed[0]]} in {checkpoint} and cannot be changed; leave it out")
    for name in ("shared_experts", "kv_lora_rank"):
        if changes.get(name):
            raise ValueError(f"{name} is {changes[name]}, but {checkpoint} is a model without it; leave it out")
    if tokenizer:
        fields["tokenizer_path"] = str(tokenizer)
    config = build_dataclass(TrainConfig, fields | changes)
    if (tokens := open_tokenizer(config.tokenizer_path).vocab_size) > config.vocab_size:
        given = f"tokenizer_path {config.tokenizer_path!r} has {tokens} tokens"
        fix = "set tokenizer_path=FILE to the model's own tokenizer"
        raise ValueError(f"{given}, but the embedding of {checkpoint} has {config.vocab_size} rows; {fix}")
    return config


def import_to_run(
    checkpoint: str | Path, run_dir: str | Path, changes: Changes = None, progress: Progress = lambda row: None
) -> TrainConfig:
    """Write a run whose step 0 has the parameters of a checkpoint. ``jaxquant train`` continues the run.

    Quantized layers are decoded to float32, exactly or with one rounding. A run that quantizes these layers again uses
    the native backend, which reproduces the same integers (``TensorSpec.keeps_grid``), unless ``changes`` sets a
    backend. The default of ``learning_rate`` is 1e-5.

    Args:
      checkpoint: GGUF file, or Hugging Face folder.
      run_dir: folder of the run; it must not exist.
      changes: fields of ``TrainConfig``: data, optimizer, and the quantization to train with.
      progress: callback that receives a row for the tokenizer and for each tensor.

    Raises:
      FileNotFoundError, FileExistsError: the checkpoint does not exist, or the run exists.
      ValueError, NotImplementedError: the checkpoint is damaged or of an unsupported family, or the
        configuration is invalid.
    """
    # 1e-3, the default for a new model, spoils a trained one in ten steps.
    checkpoint, run_dir, changes = Path(checkpoint), require_new(run_dir), {"learning_rate": 1e-5} | dict(changes or {})
    source, folder, files = _open_with_tokenizer(checkpoint, changes, progress)
    is_quantized = any(map(source.quantized, source.layout.linears)) if folder is None else folder.quantization
    if is_quantized and changes.get("quantization") and not changes.get("use_qwix_quantization"):
        changes.setdefault("quant_backend", "native")
    try:
        run_dir.mkdir(parents=True)
        tokenizer = _write_tokenizer(files, run_dir)
        config = imported_config(source.shape, checkpoint, tokenizer, changes | {"run_dir": str(run_dir)})
        if config.weight_sparsity_n and not config.weight_sparsity_start_step:
            fix = "set weight_sparsity_start_step to 1 or more"
            raise ValueError(f"weight_sparsity_start_step 0 would compute the masks from random weights; {fix}")
        data = make_iterators(config, config.batch_size)
        program = build(config, data.vocab_size)
        readers = parameter_readers(source, program.config, program.abstract_state.params, progress)
        with Checkpoints(run_dir, program.config) as checkpoints:
            checkpoints.create(initial_state(program), data.train.get_state(), readers)
        write_config(run_dir, program.config)
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    return program.config


def initial_state(program: Program) -> TrainState:
    """Return the initial state with abstract parameters. Arrays of equal elements, such as moments, use no memory."""
    shapes, tree = jax.tree.flatten(program.abstract_state._replace(params=None))
    # XLA does not allocate the parameters, or constant arrays that only feed min and max.
    leaves = lambda: jax.tree.leaves(program.init()._replace(params=None))  # noqa: E731
    extremes = jax.jit(lambda: [(x.min(), x.max()) if x.size else (0, 1) for x in leaves()])()
    uniform = [bool(low == high) for low, high in extremes]
    others = iter(jax.jit(lambda: [x for x, is_uniform in zip(leaves(), uniform, strict=True) if not is_uniform])())
    rows = zip(shapes, extremes, uniform, strict=True)
    made = [repeat_element(low, x.shape) if is_uniform else next(others) for x, (low, _), is_uniform in rows]
    return jax.tree.unflatten(tree, made)._replace(params=program.abstract_state.params)


def _open_with_tokenizer(
    checkpoint: Path, changes: Mapping[str, Any], progress: Progress
) -> tuple[Source, HfFolder | None, dict[str, str]]:
    """Open a checkpoint. Also returns the tokenizer's files by name; there are none if ``tokenizer_path`` is set.

    Raises:
      ValueError: there is no tokenizer.
    """
    is_own = "tokenizer_path" not in changes
    source, folder = open_checkpoint(checkpoint, has_tokenizer=is_own)
    if is_own and source.vocabulary is None:
        fix = "set tokenizer_path=FILE to a tokenizer.json, or tokenizer_path= for bytes"
        raise ValueError(f"{checkpoint} has no tokenizer; {fix}")
    files = tokenizer_files(source.vocabulary)
    origin = source.vocabulary.origin if source.vocabulary else changes["tokenizer_path"] or "bytes"
    progress(Row("tokenizer", origin, (), sum(map(len, files.values())), math.nan))
    return source, folder, files


def _write_tokenizer(files: Mapping[str, str], folder: str | Path) -> Path | None:
    """Write the files of a tokenizer; returns the path of its ``tokenizer.json``, or None without files."""
    for name, text in files.items():
        (Path(folder) / name).write_text(text, encoding="utf-8")
    return Path(folder).absolute() / "tokenizer.json" if files else None


Places = list[tuple[str, Location]]
"""Tensors of a checkpoint that make one parameter of one layer: one tensor, or one for each expert."""


def _places_by_path(source: Source, config: TrainConfig) -> dict[str, list[Places]]:
    """Return the tensors of each parameter by its path, for each of the layers that are stacked in the parameter."""
    layers = {}
    for name, place in locate_tensors(config, source.shape).items():
        layers.setdefault(place.path, {}).setdefault(place.tensor.layer, []).append((name, place))
    return {path: list(places.values()) for path, places in layers.items()}


def _make_parameter(path: str, layers: list[Places], make: Callable[[str, Places], Any]) -> Any:
    """Return a parameter, stacked if layers are stacked; ``make(path, places)`` returns the part of one layer."""
    if not _is_stacked(path):
        return make(path, layers[0])
    whole: Any = None
    for index, places in enumerate(layers):
        part = make(path, places)
        if whole is None:
            whole = jax.tree.map(lambda x: np.empty((len(layers), *x.shape), x.dtype), part)
        for into, x in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
            into[index] = x
    return mark_stacked_axes(whole, [0]) if isinstance(whole, QTensor) else whole


def _is_stacked(path: str) -> bool:
    return path.startswith("layers/")


def _read_parameter(source: Source, places: Places, leaf: Any, path: str) -> np.ndarray:
    """Return a float parameter of one layer; ``leaf`` has the parameter's shape."""
    shape = leaf.shape[_is_stacked(path) :]
    if places[0][1].tensor.expert is None:
        name, place = places[0]
        return place.from_hf(source.read(name), shape)
    return np.stack([place.from_hf(source.read(name), shape[1:]) for name, place in places])


def parameter_readers(
    source: Source, config: TrainConfig, shapes: Any, progress: Progress = lambda row: None
) -> Readers:
    """Return functions that read a model's parameters in parts, with the dtypes of ``shapes``.

    Args:
      source: model to read.
      config: configuration of the decoder.
      shapes: parameters of the decoder, as shapes.
      progress: callback with each tensor.

    Raises:
      NotImplementedError: the decoder has other parameters than the model.
    """
    wanted, layers = leaves_by_path(shapes), _places_by_path(source, config)
    if others := sorted(wanted.keys() ^ layers.keys()):
        raise NotImplementedError(f"the parameter {others[0]} belongs only to the decoder or only to the checkpoint")

    def make(path: str, places: Places) -> np.ndarray:
        value = _read_parameter(source, places, wanted[path], path)
        made = value.astype(wanted[path].dtype, copy=False)
        for index, (name, place) in enumerate(places):
            part = ... if place.tensor.expert is None else index
            ratio = sqnr(value[part], made[part], made.dtype)
            progress(Row(name, made.dtype.name, place.tensor.shape, made[part].nbytes, ratio))
        return made

    def parts(path: str, length: int) -> Iterator[tuple[slice, np.ndarray]]:
        for start in range(0, len(layers[path]), length):
            where = slice(start, start + length) if _is_stacked(path) else slice(None)
            yield where, _make_parameter(path, layers[path][where], make)

    return {path: functools.partial(parts, path) for path in layers}


def import_to_serve(
    checkpoint: str | Path, out: str | Path, changes: Changes = None, progress: Progress = lambda row: None
) -> TrainConfig:
    """Write a converted checkpoint for serving from a foreign checkpoint.

    Layers keep the elements and scales of the checkpoint if the config string has weights of the same type and
    granularity: fp8, fp8_full, fp8_block, mxfp8, mxfp4, int8, int8w, the config strings of GGML's formats and others.
    If no quantization is requested, the config string is selected that quantizes weights and inputs like the
    checkpoint. For a GGUF file with several types, rules select a config string for each layer.
    Other layers are converted from the decoded float weights.

    Args:
      checkpoint, progress: same as for ``import_to_run``.
      out: folder to write; it must not exist.
      changes: fields of ``TrainConfig``, such as ``quantization`` and ``dtype``.

    Raises:
      FileNotFoundError, FileExistsError: the checkpoint does not exist, or ``out`` exists.
      ValueError, NotImplementedError: the checkpoint is damaged or of an unsupported family, or the
        configuration is invalid.
    """
    checkpoint, out, changes = Path(checkpoint), require_new(out), dict(changes or {})
    source, folder, files = _open_with_tokenizer(checkpoint, changes, progress)
    if not changes.get("quantization"):
        changes |= native_fields(checkpoint, source, folder, changes)
    with tempfile.TemporaryDirectory() as place:
        tokenizer, changes = _write_tokenizer(files, place), changes | {"remat_policy": "none"}
        config = imported_config(source.shape, checkpoint, tokenizer, changes)
        _, decoder, tokens = decoder_of(config)
    shapes = jax.eval_shape(lambda: initial_variables(config, decoder, tokens))
    sites = serving.find_kernels(Decoder(decoder), shapes, layer_config(config), tokens)
    leaves = leaves_by_path(shapes["params"])

    def make(path: str, places: Places) -> Any:
        layer, modules = sites.get(path.removesuffix("/kernel")), [name.removesuffix(".weight") for name, _ in places]
        scale = None if layer is None else _input_scale(source, modules, layer)
        part = None if layer is None else _keep_weights(source, folder, modules, layer)
        array = None if part is not None and part.codec else _read_parameter(source, places, leaves[path], path)
        if part is not None:
            kind = f"{part.codec or part.qvalue.dtype.name}, kept"
        elif layer is not None:
            part, kind = jax.tree.map(np.asarray, layer.convert(jnp.asarray(array), None)), layer.recipe.name
        else:
            part = cast_as_read(path, array, decoder)
            kind = part.dtype.name
        ratio = math.inf  # codec bytes are copied
        if array is not None:
            back = np.asarray(dequantize(part) if isinstance(part, QTensor) else part)
            ratio = sqnr(array, back, back.dtype)
        size = sum(each.nbytes for each in jax.tree.leaves(part)) // len(places)
        for name, place in places:
            progress(Row(name, kind, place.tensor.shape, size, ratio))
        if layer is not None:
            part = dataclasses.replace(part, input_scale=scale, dtype=layer.made.dtype, read_as=layer.dtype)
        return part

    def shape_of(path: str) -> Any:
        layer = sites.get(path.removesuffix("/kernel"))
        return jax.eval_shape(lambda x: cast_as_read(path, x, decoder), leaves[path]) if layer is None else layer.made

    layers = _places_by_path(source, config)
    read = lambda path: _make_parameter(path, layers[path], make)  # noqa: E731
    return save_served(out, unflatten({path: shape_of(path) for path in layers}), config, 0, files, read)


def _input_scale(source: Source, modules: list[str], layer: LayerKernel) -> np.ndarray | None:
    """Return the static scale of a layer's input, or None if the recipe has a dynamic scale; experts share a scale."""
    spec = layer.recipe.resolve("fwd", "lhs")
    if spec is None or spec.scaling == "dynamic":
        return None
    if missing := [module for module in modules if module not in source.input_amax]:
        problem = f"{missing[0]} has no static scale of its input, but {layer.recipe.name!r} requires this scale"
        fix = "use a string with dynamic scales, such as fp8_current, or import a run and convert that run"
        raise ValueError(f"{problem}; {fix}")
    amax = max(source.input_amax[module] for module in modules)
    return np.full((1,) * len(layer.shape), np.float32(amax / element(spec.dtype).bound))


def _keep_weights(source: Source, folder: HfFolder | None, modules: list[str], kernel: LayerKernel) -> QTensor | None:
    """Return a layer's weight with the checkpoint's own values, or None if the recipe has another format.

    Args:
      source, folder: the checkpoint.
      modules: the layer's name, or the names of its experts.
      kernel: layer of the decoder.

    Raises:
      ValueError: a scale covers parts of several heads, or a value is not finite.
    """
    if len(kernel.shape) < 3 or ".experts." not in modules[0]:
        return _keep_weight(source, folder, modules[0], kernel, kernel.shape, kernel.axes)
    if kernel.recipe.shares_experts:
        return None
    axes = tuple(axis - 1 for axis in kernel.axes)
    parts = [_keep_weight(source, folder, module, kernel, kernel.shape[1:], axes) for module in modules]
    if any(part is None for part in parts):
        return None
    whole: QTensor = jax.tree.map(lambda *arrays: np.stack(arrays), *parts)
    return dataclasses.replace(whole, block=kernel.made.block and kernel.made.block[len(kernel.stacked) :])


def _keep_weight(
    source: Source,
    folder: HfFolder | None,
    module: str,
    kernel: LayerKernel,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
) -> QTensor | None:
    """Return the weight of a layer or of one expert, which has a shape and contraction axes in the decoder."""
    spec = kernel.recipe.resolve("fwd", "rhs")
    assert spec is not None
    if spec.codec is not None:
        tensor = source.quantized(module)
        if tensor is None or tensor.codec != spec.codec:
            return None
        block = tuple(size if axis in axes else 1 for axis, size in enumerate(shape))
        stored = [1 if axis in axes else size for axis, size in enumerate(shape)]
        stored[max(axis for axis in axes if shape[axis] > 1)] = tensor.qvalue.shape[1]
        data = np.ascontiguousarray(np.asarray(tensor.qvalue).T).reshape(stored)
        return QTensor(data, block=block, codec=spec.codec)  # pyright: ignore[reportArgumentType]
    found = None if folder is None else folder.spec(module)
    if folder is None or found is None or found.weight.dtype != spec.dtype:
        return None
    layer = folder.layer(module)
    assert layer is not None
    size, block = layer.elements.shape, block_shape(shape, spec, axes)
    wanted = block_shape(size, spec, (1,))
    grid = scale_shape(size, wanted)
    # One scale of the whole tensor can be repeated for each block.
    fits = layer.scale.size == 1 or tuple(map(min, layer.block, size)) == wanted
    whole, (scale, _) = layer.to_qtensor(spec), layer.levels or (layer.scale, None)
    is_kept = whole.zero_point is None and (whole.outer_scale is not None) == spec.outer_scale
    is_kept &= fits and np.array_equal(np.asarray(whole.scale, np.float32), scale.astype(np.float32))
    if not is_kept or math.prod(scale_shape(shape, block)) != math.prod(grid):
        return None
    check_finite(layer.decode(), f"{module}.weight")
    scales: Any = np.broadcast_to(np.asarray(whole.scale), grid)
    try:
        tensor = make_qtensor(whole.qvalue, scales, outer_scale=whole.outer_scale, block=wanted)
        tensor = tensor.transpose((1, 0)).reshape(shape)
    except BlocksError:
        tensor = None
    if tensor is None or tensor.blocks != block:
        raise ValueError(f"{module} has scales that span several heads, {shape}; import a run and convert it instead")
    return tensor
