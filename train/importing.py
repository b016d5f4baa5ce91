"""From a checkpoint of others to a run that trains on, or a converted checkpoint that serves."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant import serving
from jaxquant.config.loader import build as build_dataclass
from jaxquant.config.loader import to_mapping
from jaxquant.core.blocks import block_shape, scale_shape
from jaxquant.core.qtensor import QTensor, dequantize, make_qtensor
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.trees import leaves_by_path
from jaxquant.export import HfFolder, LlamaShape, Row, Source, open_gguf
from jaxquant.export.layouts import decode_scaled
from jaxquant.inject.converted import LayerKernel
from jaxquant.serving.leaves import unflatten
from train.checkpoint import Checkpoints, write_config
from train.config import TrainConfig
from train.conversion import of_layers, quantization_of, sums_of_files
from train.data import make_iterators
from train.llama import config_fields, from_hf, places
from train.model import Decoder
from train.step import build, model_config
from train.tokenizer import open_tokenizer

_FP8_BLOCK = (128, 128)
_SQNR_OF_COPY = float("inf")


@dataclasses.dataclass(frozen=True)
class Imported:
    """What an import wrote.

    Attributes:
      config: of the run, or that it is served with.
      rows: a line for each tensor; ``sqnr`` is infinite where no bit was lost.
    """

    config: TrainConfig
    rows: tuple[Row, ...]


def open_checkpoint(path: str | Path) -> tuple[Source, HfFolder | None]:
    """Open a GGUF file or a Hugging Face folder as a Llama.

    Raises:
      FileNotFoundError, ValueError, NotImplementedError: it is none, damaged, or no Llama.
    """
    path = Path(path)
    if path.is_dir():
        folder = HfFolder(path)
        return folder.source(), folder
    if path.is_file():
        return open_gguf(path), None
    raise FileNotFoundError(f"{path} does not exist; give a GGUF file or the folder of a Hugging Face model")


def imported_config(
    shape: LlamaShape, checkpoint: Path, tokenizer: Path | None, changes: Mapping[str, Any]
) -> TrainConfig:
    """Return the configuration of a run with an imported model: its shape, its tokenizer and what is asked for.

    Raises:
      ValueError, TypeError: a field of the shape that is asked for otherwise, or values that do not fit.
    """
    fields = config_fields(shape)
    if fixed := sorted(set(fields) & set(changes)):
        raise ValueError(f"{fixed[0]} is {fields[fixed[0]]} in {checkpoint}; it cannot be changed")
    if tokenizer is not None:
        fields["tokenizer_path"] = str(tokenizer)
    return build_dataclass(TrainConfig, {**fields, **changes})


def import_to_run(
    checkpoint: str | Path,
    run_dir: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    say: Callable[[str], None] = print,
    progress: Callable[[Row], None] | None = None,
) -> Imported:
    """Write a run whose step 0 has the parameters of a checkpoint, for ``python -m train`` to go on with.

    Quantized layers are decoded to float32, which each of their values is exactly or rounded once.

    Args:
      checkpoint: GGUF file, or Hugging Face folder.
      run_dir: folder of the run; it must not exist.
      changes: fields of ``TrainConfig``: data, optimizer, and the quantization to train with.
      say: told how far it is.
      progress: called with each tensor.

    Raises:
      FileNotFoundError, FileExistsError: no such checkpoint, or the run is there.
      ValueError, NotImplementedError: a checkpoint or configuration that does not fit.
    """
    checkpoint, run_dir = Path(checkpoint), Path(run_dir)
    if run_dir.exists():
        raise FileExistsError(f"{run_dir} exists; choose another folder or remove it")
    source, _ = open_checkpoint(checkpoint)
    try:
        run_dir.mkdir(parents=True)
        tokenizer = _copy_tokenizer(checkpoint, run_dir, changes or {})
        config = imported_config(source.shape, checkpoint, tokenizer, {**(changes or {}), "run_dir": str(run_dir)})
        data = make_iterators(config, config.batch_size)
        program = build(config, data.vocab_size)
        rows: list[Row] = []
        params = float_parameters(source, program.config, program.abstract_state.params, rows.append, progress)
        state = program.init()._replace(params=params)
        with Checkpoints(run_dir, program.config, say) as checkpoints:
            checkpoints.save(0, state, data.train.get_state())
        write_config(run_dir, program.config)
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    return Imported(program.config, tuple(rows))


def float_parameters(
    source: Source,
    config: TrainConfig,
    shapes: Any,
    note: Callable[[Row], object] = lambda row: None,
    progress: Callable[[Row], None] | None = None,
) -> dict[str, Any]:
    """Return a model's float32 parameters, each placed as its shape says.

    Args:
      source: the model.
      config: of the decoder.
      shapes: of its parameters.
      note, progress: called with each tensor.

    Raises:
      ValueError: a parameter that the model has nothing for.
    """
    wanted, leaves = leaves_by_path(shapes), {}
    for path, parts in _by_path(config, source.shape).items():
        leaf = wanted[path]
        array = np.empty(leaf.shape, np.float32)
        for module, layer in parts:
            at = ... if layer is None else layer
            value = source.read(f"{module}.weight")
            array[at] = from_hf(value, module, array[at].shape)
            row = Row(f"{module}.weight", "float32", value.shape, value.nbytes, _SQNR_OF_COPY)
            note(row)
            if progress is not None:
                progress(row)
        leaves[path] = jax.device_put(array, leaf.sharding)
    if missing := sorted(wanted.keys() - leaves.keys()):
        raise ValueError(f"the checkpoint has nothing for the parameter {missing[0]}")
    return unflatten(leaves)


def import_to_serve(
    checkpoint: str | Path,
    out: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    say: Callable[[str], None] = print,
    progress: Callable[[Row], None] | None = None,
) -> Imported:
    """Write a converted checkpoint that serves, of a checkpoint of others.

    Layers that the checkpoint has in fp8 blocks of 128 by 128 stay so under ``quantization=fp8_block``, and those in a
    format of GGML under its own string; both are what is asked for where nothing is. Anything else is converted from
    the decoded float.

    Args:
      checkpoint, say, progress: as for ``import_to_run``.
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
    changes.setdefault("quantization", _native_string(source, folder))
    if not changes["quantization"]:
        raise ValueError(
            f"{checkpoint} has no quantization that is kept; say how to serve it, as with quantization=int8"
        )
    beside = checkpoint / "tokenizer.json" if checkpoint.is_dir() else None
    tokenizer_path = beside.absolute() if beside is not None and beside.is_file() else None
    config = imported_config(source.shape, checkpoint, tokenizer_path, {**changes, "remat_policy": "none"})
    tokenizer = open_tokenizer(config.tokenizer_path)
    decoder = model_config(config, tokenizer.vocab_size)
    tokens = jnp.zeros((1, config.sequence_length), jnp.int32)
    layers = of_layers(config)
    shapes = jax.eval_shape(Decoder(decoder).init, jax.random.key(0), tokens)
    sites = serving.find_kernels(Decoder(decoder), layers, shapes, tokens)
    by_path, rows, tree = _by_path(config, source.shape), [], {}
    for path, leaf in leaves_by_path(shapes["params"]).items():
        layer = sites.get(path.removesuffix("/kernel")) if path.endswith("/kernel") else None
        parts = []
        for module, _ in by_path[path]:
            part, row = _served(
                source, folder, module, layer, leaf.shape, by_path[path][0][1] is not None, decoder.dtype
            )
            parts.append(part)
            rows.append(row)
            if progress is not None:
                progress(row)
        tree[path] = _stack(parts) if by_path[path][0][1] is not None else parts[0]
    served = dataclasses.replace(config, checkpoint_is_quantized=True)
    extra = {"train": to_mapping(served), "step": 0, "files": sums_of_files(served)}
    serving.save(out, unflatten(tree), quantization_of(served), extra=extra)
    return Imported(served, tuple(rows))


def _native_string(source: Source, folder: HfFolder | None) -> str:
    """Return the config string that keeps what a checkpoint has, "" where there is none."""
    name = next(iter(source.shape.linears()))
    if folder is None:
        tensor = source.packed(name)
        return "" if tensor is None else f"ggml_{tensor.codec}"
    spec = folder.spec(name)
    return "fp8_block" if spec is not None and spec.weight.block_size == _FP8_BLOCK else ""


def _served(
    source: Source,
    folder: HfFolder | None,
    module: str,
    layer: LayerKernel | None,
    shape: tuple[int, ...],
    is_stacked: bool,
    dtype: str,
) -> tuple[Any, Row]:
    """Return a parameter of one layer as it is served, in host memory."""
    size = source.shape.tensors()[f"{module}.weight"]
    own = shape[1:] if is_stacked else shape
    if layer is None:
        array = from_hf(source.read(f"{module}.weight"), module, own)
        kind = "float32" if array.ndim == 1 or dtype == "float32" else dtype
        array = array.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32)
        return array, Row(f"{module}.weight", kind, size, array.nbytes, _SQNR_OF_COPY)
    spec = layer.recipe.resolve("fwd", "rhs")
    assert spec is not None
    kept = _kept(source, folder, module, spec, own, layer.axes)
    if kept is not None:
        nbytes = sum(part.nbytes for part in kept.parts.values())
        return kept, Row(f"{module}.weight", f"{spec.codec or spec.dtype}, kept", size, nbytes, _SQNR_OF_COPY)
    array = from_hf(source.read(f"{module}.weight"), module, own)
    tensor = jax.tree.map(np.asarray, layer.convert(jnp.asarray(array), {})[0])
    nbytes = sum(part.nbytes for part in tensor.parts.values())
    return tensor, Row(f"{module}.weight", layer.recipe.name, size, nbytes, float("nan"))


def _kept(
    source: Source, folder: HfFolder | None, module: str, spec: TensorSpec, shape: tuple[int, ...], axes: Any
) -> QTensor | None:
    """Return a layer's weight with the checkpoint's own values, None where the recipe has another format."""
    if spec.codec is not None:
        tensor = source.packed(module)
        if tensor is None or tensor.codec != spec.codec:
            return None
        block = tuple(size if axis in axes else 1 for axis, size in enumerate(shape))
        stored = [1 if axis in axes else size for axis, size in enumerate(shape)]
        stored[max(axis for axis in axes if shape[axis] > 1)] = tensor.qvalue.shape[1]
        data = np.ascontiguousarray(np.asarray(tensor.qvalue).T).reshape(stored)
        return QTensor(data, block=block, codec=spec.codec)  # pyright: ignore[reportArgumentType]
    found = None if folder is None else folder.spec(module)
    is_block = (spec.dtype, spec.granularity, spec.tile_size, spec.free_size) == (
        "float8_e4m3fn",
        "per_block",
        *_FP8_BLOCK,
    )
    if folder is None or found is None or not is_block or found.weight.block_size != _FP8_BLOCK:
        return None
    tensors = folder.tensors(module)
    weight, scale = tensors[".weight"], tensors.get(".weight_scale_inv", tensors.get(".weight_scale"))
    if scale is None or weight.dtype != ml_dtypes.float8_e4m3fn or found.weight.power_of_two_scale:
        return None
    qvalue = from_hf(weight, module, shape)
    block = block_shape(shape, spec, axes, 1, ())
    counts = scale_shape(shape, block)
    if np.prod(counts) != scale.size:
        return None
    tensor = make_qtensor(
        qvalue,  # pyright: ignore[reportArgumentType]
        np.ascontiguousarray(scale.astype(np.float32).T).reshape(counts),  # pyright: ignore[reportArgumentType]
        block=block,
    )
    _check_same(tensor, decode_scaled(weight, scale, _FP8_BLOCK), module, shape)
    return tensor


def _check_same(tensor: QTensor, expected: np.ndarray, module: str, shape: tuple[int, ...]) -> None:
    """Make sure that blocks of several heads are where the checkpoint has them."""
    device = tensor.replace(lambda _, part: jnp.asarray(part))
    if not np.array_equal(np.asarray(dequantize(device)), from_hf(expected, module, shape)):
        raise ValueError(f"{module} in blocks of {_FP8_BLOCK} does not keep its values over heads of {shape}")


def _stack(parts: list[Any]) -> Any:
    """Stack the layers of a parameter; a quantized one knows of the axis."""
    if not isinstance(parts[0], QTensor):
        return np.stack(parts)
    whole = jax.tree.map(lambda *arrays: np.stack(arrays), *parts)
    block = None if whole.block is None else (0, *whole.block)
    return QTensor.of_parts(whole.parts, block, whole.codec)


def _by_path(config: TrainConfig, shape: LlamaShape) -> dict[str, list[tuple[str, int | None]]]:
    """Return the modules that make up each parameter, with their layer."""
    found: dict[str, list[tuple[str, int | None]]] = {}
    for module, place in places(config, shape).items():
        found.setdefault(place.path, []).append((module, place.layer))
    return found


def _copy_tokenizer(checkpoint: Path, run_dir: Path, changes: Mapping[str, Any]) -> Path | None:
    beside = checkpoint / "tokenizer.json" if checkpoint.is_dir() else None
    if beside is None or not beside.is_file() or "tokenizer_path" in changes:
        return None
    target = run_dir.absolute() / "tokenizer.json"
    shutil.copyfile(beside, target)
    return target
