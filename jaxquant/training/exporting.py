"""Export of runs and converted checkpoints to checkpoints of other frameworks, and the mapping of their tensors.

The decoder's kernels are [in…, out…]; a checkpoint has them as [out, in], with heads concatenated. Norms and the
embedding have the same layout in both, but Gemma stores the weight of a norm minus 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.paths import leaves_by_path
from jaxquant.core.qtensor import QTensor, is_tensor
from jaxquant.core.quant_state import HISTORY
from jaxquant.core.typed import build, to_mapping
from jaxquant.export import STATIC_INPUTS, DecoderShape, Row, Source, export, layout_of
from jaxquant.export.families import Tensor, family_of, tensors_of
from jaxquant.export.layouts import transpose
from jaxquant.export.source import layer_slice, quantized_matrix, to_float
from jaxquant.export.vocabulary import byte_vocabulary, read_tokenizer
from jaxquant.state import rows_of
from jaxquant.training.config import TrainConfig
from jaxquant.training.conversion import calibrate_run, open_parameters, quant_fields, require_new, trained_kernels
from jaxquant.training.serving import open_served
from jaxquant.training.step import decoder_of


class Location(NamedTuple):
    """Position of a tensor in the parameters.

    Attributes:
      path: path of the array.
      index: index of the layer if layers are stacked, and of the expert if the array has all experts.
      tensor: the tensor in the checkpoint.
      offset: number that the parameter has in addition to the checkpoint's tensor.
    """

    path: str
    index: tuple[int, ...]
    tensor: Tensor
    offset: float

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        """Return a parameter in the layout of the checkpoint: kernels are transposed to [out, in]."""
        shape = self.tensor.shape
        if len(shape) == 1 or self.path == "token_embedder/embedding":
            return array.reshape(shape) - np.float32(self.offset)
        return transpose(array.reshape(shape[1], shape[0]))

    def from_hf(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return a checkpoint's array in the layout of the parameter, which has ``shape``; the inverse of ``to_hf``."""
        if len(array.shape) == 1 or self.path == "token_embedder/embedding":
            return array.reshape(shape) + np.float32(self.offset)
        return transpose(array).reshape(shape)


Read = Callable[[str, tuple[int, ...]], Any]
"""Function (path of a parameter, index of a layer and of an expert) -> its array, or a ``QTensor``, or None."""


def decoder_shape(config: TrainConfig) -> DecoderShape:
    """Return the shape of a run's decoder, as in the checkpoints of other frameworks."""
    decoder = decoder_of(config)[1]
    shape = DecoderShape(**{field.name: getattr(decoder, field.name) for field in dataclasses.fields(DecoderShape)})
    return dataclasses.replace(shape, max_position_embeddings=shape.max_position_embeddings or config.sequence_length)


def locate_tensors(config: TrainConfig, shape: DecoderShape) -> dict[str, Location]:
    """Return, for each tensor of a checkpoint, its position in the parameters."""
    found, norm_offset = {}, family_of(shape).norm_offset
    for name, tensor in tensors_of(shape).items():
        path, index = tensor.path, () if tensor.expert is None else (tensor.expert,)
        if tensor.layer is not None:
            path = f"layers/{path}" if config.scan_layers else f"layers_{tensor.layer}/{path}"
            index = (tensor.layer, *index) if config.scan_layers else index
        found[name] = Location(path, index, tensor, norm_offset if path.endswith("/scale") else 0.0)
    return found


def export_run(
    directory: str | Path,
    out: str | Path,
    format: str,
    *,
    step: int | None = None,
    say: Callable[[str], None] = print,
    **written: Any,
) -> list[Row]:
    """Export a checkpoint of a run, or a converted checkpoint.

    Args:
      directory: folder of a run or of a converted checkpoint. Kernels that are already converted to the requested
        format keep their bytes; other converted kernels are dequantized first.
      out: folder or file to write; it must not exist.
      format: format of the checkpoint, see ``jaxquant.export.FORMATS``.
      step: step of a run's checkpoint; None selects the newest.
      say: function that prints the progress.
      written: arguments ``dtype``, ``shard_bytes`` and ``progress`` of ``jaxquant.export.export``.

    Raises:
      FileNotFoundError, FileExistsError: the folder does not exist, or ``out`` exists.
      ValueError, NotImplementedError: the format does not support the model or tokenizer.
    """
    require_new(out)
    source = open_source(directory, step, format in STATIC_INPUTS, say)
    return export(source, out, format, **written)


def open_source(
    directory: str | Path, step: int | None = None, measures: bool = False, say: Callable[[str], None] = print
) -> Source:
    """Open a run or a converted checkpoint with Hugging Face's names of its family, read tensor by tensor.

    Args:
      directory, step, say: same as for ``export_run``.
      measures: whether to measure the input amaxes of linear layers on held-out text.
    """
    folder = Path(directory)
    if (folder / "config.yml").is_file():
        return _open_run(folder, step, measures, say)
    if not (folder / "jaxquant.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.yml or jaxquant.json; pass a run or a converted checkpoint")
    if measures:
        raise ValueError(f"{folder} is converted, but this format stores scales of inputs; export the run instead")
    return _open_converted(folder)


def _open_run(folder: Path, step: int | None, measures: bool, say: Callable[[str], None]) -> Source:
    stored = open_parameters(folder, step, say)
    kernels = functools.cache(lambda: trained_kernels(stored, decoder_of(stored.config)[1]))
    depth = stored.config.scan_layers  # number of axes of stacked layers

    @functools.lru_cache(3)  # all experts of a layer are converted together, and read one after another
    def converted(path: str, index: tuple[int, ...]) -> QTensor | None:
        convert = kernels().get(path.removesuffix("/kernel"))
        return None if convert is None else convert(index)

    def quantized(path: str, index: tuple[int, ...]) -> QTensor | None:
        tensor, rest = converted(path, index[:depth]), index[depth:]
        return layer_slice(tensor, rest)

    read = lambda path, index: stored.read(f"params/{path}", *index)  # noqa: E731
    source = _as_source(stored.config, leaves_by_path(stored.shapes["params"]), read, quantized)
    if not measures:
        return source
    # Measure the amax of each linear layer's input on held-out text, with the parameters in float.
    plain = quant_fields(QuantConfig(quantization="fp8", quant_backend="native"))
    fields = to_mapping(stored.config) | plain
    calibrated: TrainConfig = build(TrainConfig, fields)
    state = rows_of(calibrate_run(stored, calibrated, decoder_of(calibrated)[1], say))
    inputs = {row.rsplit("/", 2)[0]: fields[HISTORY] for row, fields in state.items() if row.endswith("/input")}
    amax = {}
    for name, place in locate_tensors(stored.config, decoder_shape(stored.config)).items():
        if (history := inputs.get(place.path.removesuffix("/kernel"))) is not None:
            index = place.index[: history.ndim - 1]
            amax[name.removesuffix(".weight")] = float(np.max(history[index]))
    return dataclasses.replace(source, input_amax=amax)


def _open_converted(folder: Path) -> Source:
    found = open_served(folder)
    return decoder_source(found.config, found.params, found.params)


def decoder_source(config: TrainConfig, params: Mapping[str, Any], converted: Mapping[str, Any]) -> Source:
    """Return the parameters of a run's decoder as a ``Source`` with Hugging Face's names of its family.

    Args:
      config: configuration of the run.
      params: parameters; arrays, ``QTensor`` leaves, or tracers of either.
      converted: parameters from ``convert``, whose ``QTensor`` leaves are stored as they are if the format can store
        them. Other kernels of ``params`` are quantized.

    Raises:
      NotImplementedError: no supported family of checkpoints has these parameters.
    """
    leaves, kernels = (leaves_by_path(tree, is_leaf=is_tensor) for tree in (params, converted))
    read = lambda path, index: to_float(layer_slice(leaves[path], index))  # noqa: E731

    def quantized(path: str, index: tuple[int, ...]) -> QTensor | None:
        return layer_slice(kernels[path], index) if is_tensor(kernels[path]) else None

    return _as_source(config, leaves, read, quantized)


def _as_source(config: TrainConfig, leaves: Mapping[str, Any], read: Read, quantized: Read) -> Source:
    """Return a decoder as a ``Source`` whose tensors have the names of its family.

    Raises:
      NotImplementedError: no supported family of checkpoints has these parameters.
    """
    shape, tokenizer = decoder_shape(config), decoder_of(config)[0]
    found = locate_tensors(config, shape)
    if others := sorted(leaves.keys() ^ {place.path for place in found.values()}):
        why = f"has the parameter {others[0]}" if others[0] in leaves else f"has no parameter {others[0]}"
        raise NotImplementedError(f"no supported checkpoint stores this model, which {why}; use `jaxquant serve`")

    def kernel(module: str) -> QTensor | None:
        place = found[f"{module}.weight"]
        value = quantized(place.path, place.index)
        return None if value is None else quantized_matrix(value, place.tensor.shape)

    vocabulary = byte_vocabulary(shape.vocab_size)
    if config.tokenizer_path:
        ids = {"bos_token_id": tokenizer.bos, "eos_token_id": [*tokenizer.ends], "pad_token_id": tokenizer.pad or None}
        vocabulary = read_tokenizer(Path(config.tokenizer_path), ids | {"vocab_size": shape.vocab_size})
        vocabulary = dataclasses.replace(vocabulary, adds_bos=tokenizer.bos is not None)
    tensor = lambda name: found[name].to_hf(read(found[name].path, found[name].index))  # noqa: E731
    return Source(layout_of(shape), tensor, vocabulary, quantized=kernel)
