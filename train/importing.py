"""From a checkpoint of others to a run that trains on, or a converted checkpoint that serves."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant import serving
from jaxquant.config.hf import to_recipe
from jaxquant.config.recipes import RECIPES
from jaxquant.core.blocks import block_shape, scale_shape
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import INPUT_SCALE, QTensor, dequantize, make_qtensor
from jaxquant.core.recipe import MatmulSpec, TensorSpec
from jaxquant.core.trees import leaves_by_path
from jaxquant.core.typed import build as build_dataclass
from jaxquant.export import HfFolder, LlamaShape, Row, Source, check_sums, open_gguf
from jaxquant.export.layouts import check_finite
from jaxquant.serving.leaves import unflatten
from jaxquant.state import merge
from jaxquant.trace.kernels import LayerKernel
from train.checkpoint import Checkpoints, write_config
from train.config import TrainConfig
from train.conversion import of_layers, save_served
from train.data import make_iterators
from train.exporting import FIELDS, from_hf, places
from train.frameworks import make_model
from train.model import Decoder
from train.step import build, decoder_of

Changes = Mapping[str, Any] | None
"""Fields of ``TrainConfig`` that are not the checkpoint's."""
Progress = Callable[[Row], object]
"""Called with each tensor, its format, shape and bytes; ``sqnr`` is infinite where no bit was lost."""


def open_checkpoint(path: str | Path) -> tuple[Source, HfFolder | None]:
    """Open a GGUF file or a Hugging Face folder as a Llama; one that jaxquant exported is compared with its sums.

    Raises:
      FileNotFoundError, ValueError, NotImplementedError: it is none, damaged, or no Llama.
    """
    path = Path(path)
    check_sums(path)
    if path.is_dir():
        folder = HfFolder(path)
        return folder.source(), folder
    if path.is_file():
        return open_gguf(path), None
    raise FileNotFoundError(f"{path} does not exist; give a GGUF file or the folder of a Hugging Face model")


def imported_config(
    shape: LlamaShape, checkpoint: Path, tokenizer: Path | None, changes: dict[str, Any]
) -> TrainConfig:
    """Return the configuration of a run with an imported model: its shape, its tokenizer and what is asked for.

    Raises:
      ValueError, TypeError: a field of the shape that is asked for otherwise, or values that do not fit.
    """
    fields = {ours: getattr(shape, theirs) for ours, theirs in FIELDS.items()}
    if fixed := sorted(set(fields) & set(changes)):
        raise ValueError(f"{fixed[0]} is {fields[fixed[0]]} in {checkpoint}; it cannot be changed")
    for name in ("num_experts", "shared_experts", "kv_lora_rank"):
        if changes.get(name):
            raise ValueError(f"{name} is {changes[name]}, and {checkpoint} is a Llama, which has none; leave it out")
    return build_dataclass(TrainConfig, fields | ({"tokenizer_path": str(tokenizer)} if tokenizer else {}) | changes)


def _modules_by_path(config: TrainConfig, shape: LlamaShape) -> dict[str, list[str]]:
    """Return the modules of a Llama that make up each parameter, layer by layer where layers are stacked."""
    found: dict[str, list[str]] = {}
    for module, place in places(config, shape).items():
        found.setdefault(place.path, []).append(module)
    return found


def import_to_run(
    checkpoint: str | Path, run_dir: str | Path, changes: Changes = None, progress: Progress = lambda row: None
) -> TrainConfig:
    """Write a run whose step 0 has the parameters of a checkpoint, for ``python -m train`` to go on with.

    Quantized layers are decoded to float32, which each of their values is exactly or rounded once.

    Args:
      checkpoint: GGUF file, or Hugging Face folder.
      run_dir: folder of the run; it must not exist.
      changes: fields of ``TrainConfig``: data, optimizer, and the quantization to train with.
      progress: called with each tensor.

    Raises:
      FileNotFoundError, FileExistsError: no such checkpoint, or the run is there.
      ValueError, NotImplementedError: a checkpoint or configuration that does not fit.
    """
    checkpoint, run_dir, changes = Path(checkpoint), Path(run_dir), dict(changes or {})
    if run_dir.exists():
        raise FileExistsError(f"{run_dir} exists; choose another folder or remove it")
    source, _ = open_checkpoint(checkpoint)
    try:
        run_dir.mkdir(parents=True)
        tokenizer = None if "tokenizer_path" in changes else _tokenizer_of(checkpoint)
        if tokenizer:
            tokenizer = Path(shutil.copyfile(tokenizer, run_dir.absolute() / "tokenizer.json"))
        config = imported_config(source.shape, checkpoint, tokenizer, changes | {"run_dir": str(run_dir)})
        data = make_iterators(config, config.batch_size)
        program = build(config, data.vocab_size)
        params = float_parameters(source, program.config, program.abstract_state.params, progress)
        state = program.init()._replace(params=params)
        with Checkpoints(run_dir, program.config) as checkpoints:
            checkpoints.save(0, state, data.train.get_state())
        write_config(run_dir, program.config)
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    return program.config


def _tokenizer_of(checkpoint: Path) -> Path | None:
    beside = checkpoint.absolute() / "tokenizer.json"
    return beside if beside.is_file() else None


def float_parameters(
    source: Source, config: TrainConfig, shapes: Any, progress: Progress = lambda row: None
) -> dict[str, Any]:
    """Return a model's parameters, each of the dtype and in the place that its shape says.

    Args:
      source: the model.
      config: of the decoder.
      shapes: of its parameters.
      progress: called with each tensor.

    Raises:
      ValueError: a parameter that the model has nothing for.
    """
    wanted, leaves = leaves_by_path(shapes), {}
    for path, modules in _modules_by_path(config, source.shape).items():
        leaf = wanted[path]
        array = np.empty(leaf.shape, leaf.dtype)
        for index, module in enumerate(modules):
            at = index if path.startswith("layers/") else ...
            value = source.read(f"{module}.weight")
            array[at] = from_hf(value, module, array[at].shape)
            progress(Row(f"{module}.weight", "float32", value.shape, value.nbytes, math.inf))
        leaves[path] = jax.device_put(array, leaf.sharding)
    if missing := sorted(wanted.keys() - leaves.keys()):
        raise ValueError(f"the checkpoint has nothing for the parameter {missing[0]}")
    return unflatten(leaves)


def import_to_serve(
    checkpoint: str | Path, out: str | Path, changes: Changes = None, progress: Progress = lambda row: None
) -> TrainConfig:
    """Write a converted checkpoint that serves, of a checkpoint of others.

    Layers keep the elements and scales of the checkpoint under every string whose weights are of their type and
    granularity: fp8, fp8_full, fp8_block, mxfp8, mxfp4, int8, int8w, the strings of GGML's formats and others. Where
    nothing is asked for, it is the string that quantizes weights and inputs as the checkpoint says. Anything else is
    converted from the decoded float.

    Args:
      checkpoint, progress: as for ``import_to_run``.
      out: folder to write; it must not exist.
      changes: fields of ``TrainConfig``, such as ``quantization`` and ``dtype``.

    Raises:
      FileNotFoundError, FileExistsError: no such checkpoint, or ``out`` is there.
      ValueError, NotImplementedError: a checkpoint or configuration that does not fit.
    """
    checkpoint, out, changes = Path(checkpoint), Path(out), dict(changes or {})
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another folder or remove it")
    source, folder = open_checkpoint(checkpoint)
    if not changes.get("quantization"):
        changes["quantization"] = _native_string(checkpoint, source, folder)
    config = imported_config(source.shape, checkpoint, _tokenizer_of(checkpoint), changes | {"remat_policy": "none"})
    _, decoder, tokens = decoder_of(config)
    layers = of_layers(config)
    linen = make_model(dataclasses.replace(layers, framework="linen", checkpoint_is_quantized=False), decoder, tokens)
    shapes = jax.eval_shape(lambda: merge(*linen.init(jax.random.key(0))))
    sites = serving.find_kernels(Decoder(decoder), layers, shapes, tokens)
    by_path, tree = _modules_by_path(config, source.shape), {}
    for path, leaf in leaves_by_path(shapes["params"]).items():
        layer = sites.get(path.removesuffix("/kernel")) if path.endswith("/kernel") else None
        is_stacked = path.startswith("layers/")
        parts, scales = [], []
        for module in by_path[path]:
            own = leaf.shape[1:] if is_stacked else leaf.shape
            scales.append(None if layer is None else _input_scale(source, module, layer))  # or an error of its own
            part, kind, sqnr = _served(source, folder, module, layer, own, decoder.dtype)
            parts.append(part)
            name, size = f"{module}.weight", sum(each.nbytes for each in jax.tree.leaves(part))
            progress(Row(name, kind, source.shape.tensors()[name], size, sqnr))
        for place, each in ((path, parts), (f"{path.rpartition('/')[0]}/{INPUT_SCALE}", scales)):
            if each[0] is not None:
                whole = jax.tree.map(lambda *arrays: np.stack(arrays), *each) if is_stacked else each[0]
                if is_stacked and isinstance(whole, QTensor):  # which knows of the axis
                    block = None if whole.block is None else (0, *whole.block)
                    whole = QTensor.of_parts(whole.parts, block, whole.codec)
                tree[place] = whole
    return save_served(out, unflatten(tree), config, step=0)


def _native_string(checkpoint: Path, source: Source, folder: HfFolder | None) -> str:
    """Return the config string that keeps the weights of a checkpoint and quantizes inputs as it says.

    Raises:
      ValueError: there is none; names those that keep the weights.
    """
    names, kept = list(source.shape.linears()), []
    if folder is None and (tensor := source.quantized(names[0])) is not None:
        return f"ggml_{tensor.codec}"
    specs = set() if folder is None else {folder.spec(name) for name in names}
    if len(specs) == 1 and (spec := specs.pop()) is not None:
        recipes = {name: row.recipe for name, row in RECIPES.items() if row.recipe is not None}
        wanted = None
        try:
            weight = _numbers(to_recipe(dataclasses.replace(spec, input=None), "").fwd)[1]
            kept = [name for name, recipe in recipes.items() if _numbers(recipe.fwd)[1] == weight]
            wanted = _numbers(to_recipe(spec, "").fwd)
        except NotImplementedError:  # no recipe says it
            pass
        for name in kept:
            if _numbers(recipes[name].fwd) == wanted:
                return name
    keeping = f"{', '.join(kept)} would keep its weights; " if kept else ""
    fix = f"say how to serve it, as with quantization={kept[0] if kept else 'int8'}"
    raise ValueError(f"{checkpoint} has no quantization that a config string computes; {keeping}{fix}")


def _numbers(forward: MatmulSpec) -> tuple[Any, ...]:
    """Return what of a forward matmul a checkpoint's config says too; a delayed scale is a static one when served."""

    def plain(operand: Any, is_input: bool) -> Any:
        if not isinstance(operand, TensorSpec):
            return None
        bare = dataclasses.replace(operand, scaling="dynamic", reciprocal=False)
        return bare, is_input and operand.scaling != "dynamic"

    return plain(forward.lhs, True), plain(forward.rhs, False)


def _served(
    source: Source, folder: HfFolder | None, module: str, layer: LayerKernel | None, shape: tuple[int, ...], dtype: str
) -> tuple[Any, str, float]:
    """Return a parameter of one layer as it is served, in host memory, what it is in, and its SQNR."""
    if layer is None:
        array = from_hf(source.read(f"{module}.weight"), module, shape)
        kind = "float32" if array.ndim == 1 or dtype == "float32" else dtype
        return array.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32), kind, math.inf
    spec = layer.recipe.resolve("fwd", "rhs")
    assert spec is not None
    kept = _kept(source, folder, module, spec, shape, layer.axes)
    if kept is not None:
        return kept, f"{spec.codec or spec.dtype}, kept", math.inf
    array = from_hf(source.read(f"{module}.weight"), module, shape)
    return jax.tree.map(np.asarray, layer.convert(jnp.asarray(array))[0]), layer.recipe.name, math.nan


def _input_scale(source: Source, module: str, layer: LayerKernel) -> np.ndarray | None:
    """Return the static scale of a layer's input, None where the recipe's is dynamic."""
    spec = layer.recipe.resolve("fwd", "lhs")
    if spec is None or spec.scaling == "dynamic":
        return None
    if module not in source.input_amax:
        lack = f"{module} has no static scale of its input, and {layer.recipe.name!r} serves with one"
        fix = "choose a string whose scales are dynamic, such as fp8_current, or import a run and convert that"
        raise ValueError(f"{lack}; {fix}")
    scale = np.float32(source.input_amax[module] / element(spec.dtype).bound)
    return np.full((1,) * len(layer.shape), scale)


def _kept(
    source: Source, folder: HfFolder | None, module: str, spec: TensorSpec, shape: tuple[int, ...], axes: Any
) -> QTensor | None:
    """Return a layer's weight with the checkpoint's own values, None where the recipe has another format."""
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
    blocks = {"per_tile": (1, spec.tile_size), "per_block": (spec.free_size, spec.tile_size), "per_channel": (1, None)}
    wanted = _clipped(blocks.get(spec.granularity, (None, None)), layer.elements.shape)
    grid = tuple(-(-size // step) for size, step in zip(layer.elements.shape, wanted, strict=True))
    # One scale of the whole tensor may stand for each of its blocks.
    fits = layer.scale.size == 1 or _clipped(layer.block, layer.elements.shape) == wanted
    block = block_shape(shape, spec, axes, 1, ())
    counts, scale = scale_shape(shape, block), layer.scale.astype(spec.scale_dtype)
    if layer.zero_point is not None or not fits or math.prod(counts) != math.prod(grid):
        return None
    outer = None
    if layer.levels is not None:  # a product of both, where the checkpoint may divide by a reciprocal
        scale, outer = layer.levels
        layer = dataclasses.replace(layer, scale=scale.astype(np.float32) * outer)
    elif not np.array_equal(scale.astype(np.float32), layer.scale):
        return None
    if (outer is not None) != spec.outer_scale:
        return None
    tensor = make_qtensor(
        from_hf(layer.elements.astype(spec.dtype, copy=False), module, shape),  # pyright: ignore[reportArgumentType]
        np.ascontiguousarray(np.broadcast_to(scale, grid).T).reshape(counts),  # pyright: ignore[reportArgumentType]
        outer_scale=None if outer is None else outer.reshape((1,) * len(shape)),  # pyright: ignore[reportArgumentType]
        block=block,
    )
    # The scales of several heads have to be where the checkpoint has them.
    expected = from_hf(check_finite(layer.decode(), f"{module}.weight"), module, shape)
    if not np.array_equal(np.asarray(dequantize(tensor.replace(lambda _, part: jnp.asarray(part)))), expected):
        raise ValueError(
            f"{module} does not keep its values over heads of {shape}; import it into a run and convert that"
        )
    return tensor


def _clipped(block: tuple[int | None, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a block, all of an axis where it is None or larger."""
    return tuple(size if step is None else min(step, size) for step, size in zip(block, shape, strict=True))
