"""From a training run or a converted checkpoint to the checkpoints that others serve."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxquant import serving
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.trees import leaves_by_path
from jaxquant.core.typed import build, to_mapping
from jaxquant.export import STATIC_INPUTS, Row, Source, export
from jaxquant.export.vocabulary import byte_vocabulary, of_tokenizer_json
from train.config import TrainConfig
from train.conversion import CALIBRATION_BATCHES, calibrate_run, quantization_of, trained_kernels
from train.llama import Place, check_parameters, llama_shape, places, quantized_to_hf, to_hf
from train.origin import check_files
from train.parameters import Parameters, open_parameters
from train.step import decoder_of

_HISTORY = "input_amax_history"


def export_run(
    directory: str | Path,
    out: str | Path,
    format: str,
    *,
    step: int | None = None,
    dtype: str = "bfloat16",
    shard_bytes: int = 0,
    calibration_batches: int = CALIBRATION_BATCHES,
    say: Callable[[str], None] = print,
    progress: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Export a checkpoint of a run, or a converted one.

    Args:
      directory: folder of a run, or one that ``scripts/convert.py`` wrote. Kernels that are converted to the format
        asked for keep their bytes, others are dequantized first.
      out: folder or file to write; it must not exist.
      format: see ``jaxquant.export.FORMATS``.
      step: of the checkpoint of a run; None is the newest.
      dtype: of what stays in float, in a Hugging Face folder.
      shard_bytes: of a file at most; 0 is the default.
      calibration_batches: held-out batches that give static input scales, where the format has them.
      say: told how far it is.
      progress: called with each tensor that is written.

    Raises:
      FileNotFoundError, FileExistsError: no such folder, or ``out`` is there.
      ValueError, NotImplementedError: a model or tokenizer that the format does not take.
    """
    if Path(out).exists():
        raise FileExistsError(f"{out} exists; choose another name or remove it")
    source = open_source(directory, step, calibration_batches if format in STATIC_INPUTS else 0, say)
    more: dict[str, Any] = {"shard_bytes": shard_bytes} if shard_bytes else {}
    return export(source, out, format, dtype=dtype, progress=progress, **more)


def open_source(
    directory: str | Path, step: int | None = None, batches: int = 0, say: Callable[[str], None] = print
) -> Source:
    """Open a run or a converted checkpoint as a Llama with Hugging Face's names, read tensor by tensor.

    Args:
      directory, step, say: as for ``export_run``.
      batches: of held-out text on which inputs are measured; 0 measures nothing.
    """
    folder = Path(directory)
    if (folder / "config.yml").is_file():
        return _of_run(folder, step, batches, say)
    if (folder / "jaxquant.json").is_file():
        if batches:
            raise ValueError(f"{folder} is converted, and this format stores scales of inputs; export the run itself")
        return _of_converted(folder)
    raise FileNotFoundError(f"{folder} is neither the folder of a run nor one that scripts/convert.py wrote")


def _of_run(folder: Path, step: int | None, batches: int, say: Callable[[str], None]) -> Source:
    stored = open_parameters(folder, step, say)
    kernels = functools.cache(lambda: trained_kernels(stored, decoder_of(stored.config)[1]))

    def quantized(path: str, index: tuple[int, ...]) -> QTensor | None:
        convert = kernels().get(path.removesuffix("/kernel"))
        return None if convert is None else convert(index)

    source, found = _llama(
        stored.config,
        leaves_by_path(stored.shapes["params"]),
        lambda path, index: stored.read(f"params/{path}", *index),
        quantized,
    )
    return dataclasses.replace(source, input_amax=_measure(stored, found, batches, say)) if batches else source


def _measure(stored: Parameters, found: Mapping[str, Place], batches: int, say: Any) -> dict[str, float]:
    """Measure the largest magnitude of the input of each linear layer on held-out text, the parameters in float."""
    plain = quantization_of(QuantConfig(quantization="fp8", quant_backend="native"))
    fields = to_mapping(stored.config) | plain | {"framework": "linen", "remat_policy": "none"}
    calibrated: TrainConfig = build(TrainConfig, fields)
    state = leaves_by_path(calibrate_run(stored, calibrated, decoder_of(calibrated)[1], batches, say))
    amax = {}
    for module, place in found.items():
        layer = place.path.removesuffix("/kernel")
        histories = [leaf for path, leaf in state.items() if path.startswith(f"{layer}/") and path.endswith(_HISTORY)]
        if histories:
            history = np.asarray(histories[0])
            amax[module] = float(np.max(history[place.index] if history.ndim > 1 else history))
    return amax


def _of_converted(folder: Path) -> Source:
    found = serving.load(folder)
    check_files(folder, found.extra["train"], found.extra.get("files", {}))
    leaves = leaves_by_path(found.params, is_leaf=lambda node: isinstance(node, QTensor))
    leaves = {path: leaf for path, leaf in leaves.items() if not path.endswith("/input_scale")}

    def at(path: str, index: tuple[int, ...]) -> Any:
        # A loop over the stacked axis takes the 0 that stands for it out of the block.
        return jax.tree.map(lambda part: part[index], leaves[path]) if index else leaves[path]

    def read(path: str, index: tuple[int, ...]) -> np.ndarray:
        leaf = at(path, index)
        return np.asarray(dequantize(leaf) if isinstance(leaf, QTensor) else leaf, np.float32)

    def quantized(path: str, index: tuple[int, ...]) -> QTensor | None:
        leaf = at(path, index)
        return leaf if isinstance(leaf, QTensor) else None

    return _llama(build(TrainConfig, found.extra["train"]), leaves, read, quantized)[0]


def _llama(
    config: TrainConfig,
    paths: Iterable[str],
    read: Callable[[str, tuple[int, ...]], np.ndarray],
    quantized: Callable[[str, tuple[int, ...]], QTensor | None],
) -> tuple[Source, dict[str, Place]]:
    """Return a decoder as a Llama, and where the parameters of that are; both functions take a path and an index."""
    tokenizer, decoder, _ = decoder_of(config)
    shape = llama_shape(decoder, config.sequence_length)
    found, tensors = places(config, shape), shape.tensors()
    check_parameters(paths, found)

    def tensor(name: str) -> np.ndarray:
        module = name.removesuffix(".weight")
        return to_hf(read(*found[module]), module, tensors[name])

    def kernel(module: str) -> QTensor | None:
        value = quantized(*found[module])
        return None if value is None else quantized_to_hf(value, tensors[f"{module}.weight"])

    vocabulary = byte_vocabulary(shape.vocab_size)
    if config.tokenizer_path:
        data = json.loads(Path(config.tokenizer_path).read_bytes())
        vocabulary = of_tokenizer_json(data, tokenizer.bos, tokenizer.eos, tokenizer.pad)
    return Source(shape, tensor, vocabulary, quantized=kernel), found
