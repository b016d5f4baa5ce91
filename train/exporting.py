"""From a training run or a converted checkpoint to the checkpoints that others serve."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxquant import serving
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.trees import leaves_by_path
from jaxquant.core.typed import build, to_mapping
from jaxquant.export import STATIC_INPUTS, Row, Source, Vocabulary, export
from jaxquant.export.vocabulary import byte_vocabulary, of_tokenizer_json
from train.config import TrainConfig
from train.conversion import calibrate_run, quantization_of, trained_kernels
from train.llama import Place, check_parameters, llama_shape, places, quantized_to_hf, to_hf
from train.origin import check_files
from train.parameters import Parameters, open_parameters
from train.step import decoder_of
from train.tokenizer import Tokenizer

CALIBRATION_BATCHES = 8
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
    config = stored.config
    tokenizer, decoder, _ = decoder_of(config)
    shape = llama_shape(decoder, config.sequence_length)
    found, tensors = places(config, shape), shape.tensors()
    check_parameters(leaves_by_path(stored.shapes["params"]), found)

    def read(name: str) -> np.ndarray:
        module = name.removesuffix(".weight")
        place = found[module]
        array = stored.read(f"params/{place.path}", *(() if place.layer is None else (place.layer,)))
        return to_hf(array, module, tensors[name])

    kernels = functools.cache(lambda: trained_kernels(stored, decoder))

    def quantized(module: str) -> QTensor | None:
        place = found[module]
        convert = kernels().get(place.path.removesuffix("/kernel"))
        if convert is None:
            return None
        return quantized_to_hf(convert(() if place.layer is None else (place.layer,)), tensors[f"{module}.weight"])

    amax = _measure(stored, config, decoder, found, batches, say) if batches else {}
    return Source(shape, read, _vocabulary(tokenizer, config, shape.vocab_size), amax, quantized)


def _measure(
    stored: Parameters, config: TrainConfig, decoder: Any, found: Mapping[str, Place], batches: int, say: Any
) -> dict[str, float]:
    """Measure the largest magnitude of the input of each linear layer on held-out text, the parameters in float."""
    plain = quantization_of(QuantConfig(quantization="fp8", quant_backend="native"))
    fields = to_mapping(config) | plain | {"framework": "linen", "remat_policy": "none"}
    calibrated: TrainConfig = build(TrainConfig, fields)
    state = leaves_by_path(calibrate_run(stored, calibrated, decoder, batches, say))
    amax = {}
    for module, place in found.items():
        layer = place.path.removesuffix("/kernel")
        histories = [leaf for path, leaf in state.items() if path.startswith(f"{layer}/") and path.endswith(_HISTORY)]
        if histories:
            history = np.asarray(histories[0])
            amax[module] = float(np.max(history if place.layer is None or history.ndim == 1 else history[place.layer]))
    return amax


def _of_converted(folder: Path) -> Source:
    found = serving.load(folder)
    check_files(folder, found.extra["train"], found.extra.get("files", {}))
    config: TrainConfig = build(TrainConfig, found.extra["train"])
    tokenizer, decoder, _ = decoder_of(config)
    shape = llama_shape(decoder, config.sequence_length)
    where, tensors = places(config, shape), shape.tensors()
    leaves = leaves_by_path(found.params, is_leaf=lambda node: isinstance(node, QTensor))
    leaves = {path: leaf for path, leaf in leaves.items() if not path.endswith("/input_scale")}
    check_parameters(leaves, where)

    def at(module: str) -> Any:
        place, leaf = where[module], leaves[where[module].path]
        if place.layer is None:
            return leaf
        # A loop over the stacked axis takes the 0 that stands for it out of the block.
        return jax.tree.map(lambda part: part[place.layer], leaf)

    def read(name: str) -> np.ndarray:
        module = name.removesuffix(".weight")
        leaf = at(module)
        array = dequantize(leaf) if isinstance(leaf, QTensor) else leaf
        return to_hf(np.asarray(array, np.float32), module, tensors[name])

    def quantized(module: str) -> QTensor | None:
        leaf = at(module)
        return quantized_to_hf(leaf, tensors[f"{module}.weight"]) if isinstance(leaf, QTensor) else None

    return Source(shape, read, _vocabulary(tokenizer, config, shape.vocab_size), {}, quantized)


def _vocabulary(tokenizer: Tokenizer, config: TrainConfig, size: int) -> Vocabulary:
    """Return a tokenizer on its way into files, for an embedding of ``size`` rows."""
    if not config.tokenizer_path:
        return byte_vocabulary(size)
    data = json.loads(Path(config.tokenizer_path).read_bytes())
    return of_tokenizer_json(data, tokenizer.bos, tokenizer.eos, tokenizer.pad)
