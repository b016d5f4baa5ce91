"""Import of foreign checkpoints, into a run for further training or into a converted checkpoint for serving."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import serving
from jaxquant.config.recipes import RECIPES
from jaxquant.core.blocks import BlocksError, block_shape, scale_shape
from jaxquant.core.dtypes import element
from jaxquant.core.paths import leaves_by_path
from jaxquant.core.qtensor import QTensor, dequantize, make_qtensor, mark_stacked_axes
from jaxquant.core.recipe import MatmulSpec, TensorSpec
from jaxquant.core.typed import build as build_dataclass
from jaxquant.export import DecoderShape, HfFolder, Row, Source, check_export, open_gguf
from jaxquant.export.families import tensors_of
from jaxquant.export.folder import sqnr, tokenizer_files
from jaxquant.export.gguf_file import GgufFile
from jaxquant.export.hf import LayerSpec, to_recipe
from jaxquant.export.layouts import check_finite
from jaxquant.export.source import HEAD
from jaxquant.serving.leaves import unflatten
from jaxquant.trace.kernels import LayerKernel
from jaxquant.training.checkpoint import Checkpoints, write_config
from jaxquant.training.config import TrainConfig
from jaxquant.training.conversion import cast_as_read, initial_variables, layer_config, require_new, save_served
from jaxquant.training.data import make_iterators
from jaxquant.training.exporting import Location, locate_tensors
from jaxquant.training.model import Decoder
from jaxquant.training.step import build, decoder_of
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
    backend.

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
    checkpoint, run_dir, changes = Path(checkpoint), require_new(run_dir), dict(changes or {})
    source, folder, files = _open_with_tokenizer(checkpoint, changes, progress)
    is_quantized = any(map(source.quantized, source.layout.linears)) if folder is None else folder.quantization
    if is_quantized and changes.get("quantization") and not changes.get("use_qwix_quantization"):
        changes.setdefault("quant_backend", "native")
    try:
        run_dir.mkdir(parents=True)
        tokenizer = _write_tokenizer(files, run_dir)
        config = imported_config(source.shape, checkpoint, tokenizer, changes | {"run_dir": str(run_dir)})
        data = make_iterators(config, config.batch_size)
        program = build(config, data.vocab_size)
        state = program.init()._replace(params=None)  # frees the initial parameters before the others are read
        params = float_parameters(source, program.config, program.abstract_state.params, progress)
        state = state._replace(params=params)
        with Checkpoints(run_dir, program.config) as checkpoints:
            checkpoints.save(0, state, data.train.get_state())
        write_config(run_dir, program.config)
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    return program.config


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


def float_parameters(
    source: Source, config: TrainConfig, shapes: Any, progress: Progress = lambda row: None
) -> dict[str, Any]:
    """Return a model's parameters with the dtypes and shardings of ``shapes``.

    Args:
      source: model to read.
      config: configuration of the decoder.
      shapes: parameters of the decoder, as shapes.
      progress: callback with each tensor.
    """
    wanted = leaves_by_path(shapes)

    def make(path: str, places: Places) -> np.ndarray:
        value = _read_parameter(source, places, wanted[path], path)
        made = value.astype(wanted[path].dtype, copy=False)
        for index, (name, place) in enumerate(places):
            part = ... if place.tensor.expert is None else index
            ratio = sqnr(value[part], made[part], made.dtype)
            progress(Row(name, made.dtype.name, place.tensor.shape, made[part].nbytes, ratio))
        return made

    layers = _places_by_path(source, config)
    made = ((path, _make_parameter(path, places, make)) for path, places in layers.items())
    return unflatten({path: jax.device_put(array, wanted[path].sharding) for path, array in made})


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
        changes |= _native_fields(checkpoint, source, folder, changes)
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


def _native_fields(
    checkpoint: Path, source: Source, folder: HfFolder | None, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config fields that keep the weights of a checkpoint and quantize inputs as the checkpoint does.

    The most frequent config string of the layers is ``quantization``, and rules select the others. A layer stays in
    float if it is float in the checkpoint, or if no config string has its GGML type.

    Raises:
      ValueError: no config string keeps the weights of a layer, or ``changes`` enables ``scan_layers`` but a type
        differs between blocks of the decoder.
    """
    shape, linears = source.shape, source.layout.linears
    own: dict[str, str | None] = {}  # config string by module
    strings: dict[str, str] = {}
    if folder is None:
        stored = GgufFile(checkpoint).tensors
        strings = {name: f"ggml_{stored[tensor.gguf].kind.lower()}" for name, tensor in tensors_of(shape).items()}
        for module in (*linears, HEAD):
            if (string := strings.get(f"{module}.weight")) is not None and (module != HEAD or string in RECIPES):
                own[module] = string if string in RECIPES else None
    else:
        by_spec = {spec: spec and _native_string(checkpoint, spec) for spec in {folder.spec(name) for name in linears}}
        own = {module: by_spec[folder.spec(module)] for module in linears}
    if not any(own.values()):
        is_float = folder is not None or set(strings.values()) <= {"ggml_f32", "ggml_f16", "ggml_bf16"}
        problem = "is a float checkpoint" if is_float else "stores its layers in types that no config string has"
        raise ValueError(f"{checkpoint} {problem}; pass the quantization to serve it with, such as quantization=int8")

    def strings_by_path(is_scanned: bool) -> dict[str, set[str | None]]:
        found: dict[str, set[str | None]] = {}
        for name, place in locate_tensors(TrainConfig(scan_layers=is_scanned), shape).items():
            if (module := name.removesuffix(".weight")) in own:
                found.setdefault(place.path.removesuffix("/kernel"), set()).add(own[module])
        return found

    mixed = [path for path, strings in strings_by_path(True).items() if len(strings) > 1]
    is_scanned = changes.get("scan_layers", not mixed)
    if mixed and is_scanned:
        problem = f"{checkpoint} stores the layers {mixed[0]} in several types, but scanned layers have one"
        raise ValueError(f"{problem}; leave out scan_layers")
    base, rules = collections.Counter(filter(None, own.values())).most_common(1)[0][0], {}
    for path, (string,) in strings_by_path(is_scanned).items():
        if string != base or path == "logits_dense":  # the head stays in float without a rule
            rules.setdefault(string, []).append(path)
    found = [{"path": "|".join(paths), "recipe": string} for string, paths in rules.items()]
    return {"quantization": base, "rules": [*changes.get("rules", ()), *found], "scan_layers": is_scanned}


def _native_string(checkpoint: Path, spec: LayerSpec) -> str:
    """Return the config string that keeps the weights of a layer and quantizes its input as the checkpoint does.

    Raises:
      ValueError: there is no such config string; the message names the config strings that keep the weights.
    """
    recipes, kept = {name: row.recipe for name, row in RECIPES.items() if row.recipe is not None}, []
    with contextlib.suppress(NotImplementedError):  # no matching recipe
        weight = _comparable_specs(to_recipe(dataclasses.replace(spec, input=None), "").fwd)[1]
        kept = [name for name, recipe in recipes.items() if _comparable_specs(recipe.fwd)[1] == weight]
        wanted = _comparable_specs(to_recipe(spec, "").fwd)
        if found := next((name for name in kept if _comparable_specs(recipes[name].fwd) == wanted), None):
            return found
    keeping = f"{', '.join(kept)} would keep its weights; " if kept else ""
    fix = f"pass the quantization to serve it with, such as quantization={kept[0] if kept else 'int8'}"
    raise ValueError(f"{checkpoint} has a quantization that no config string computes; {keeping}{fix}")


def _comparable_specs(forward: MatmulSpec) -> tuple[Any, ...]:
    """Return the parts of a forward matmul that a checkpoint also describes.

    Recipes with delayed scales compare equal to recipes with static scales.
    """

    def plain(operand: Any, is_input: bool) -> Any:
        if not isinstance(operand, TensorSpec):
            return None
        bare = dataclasses.replace(operand, scaling="dynamic", reciprocal=False, keeps_grid=False)
        return bare, is_input and operand.scaling != "dynamic"

    return plain(forward.lhs, True), plain(forward.rhs, False)


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
    scale, outer = layer.levels or (layer.scale, None)
    own = scale.astype(spec.scale_dtype)
    is_kept = layer.zero_point is None and (outer is not None) == spec.outer_scale
    is_kept &= fits and np.array_equal(own.astype(np.float32), scale.astype(np.float32))
    if not is_kept or math.prod(scale_shape(shape, block)) != math.prod(grid):
        return None
    check_finite(layer.decode(), f"{module}.weight")
    parts: Any = (layer.elements.astype(spec.dtype, copy=False), np.broadcast_to(own, grid))
    outer_scale: Any = None if outer is None else outer.reshape(1, 1)
    try:
        tensor = make_qtensor(*parts, outer_scale=outer_scale, block=wanted).transpose((1, 0)).reshape(shape)
    except BlocksError:
        tensor = None
    if tensor is None or tensor.blocks != block:
        raise ValueError(f"{module} has scales that span several heads, {shape}; import a run and convert it instead")
    return tensor
