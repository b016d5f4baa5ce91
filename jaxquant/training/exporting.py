"""Export of runs and converted checkpoints to Llama checkpoints of other frameworks, and the mapping of their tensors.

The decoder's kernels are [in…, out…]; a Llama checkpoint has them as [out, in], with heads concatenated. Norms and the
embedding have the same layout in both.
Both models use the half-split rotary embedding and compute ``silu(gate) · up``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.blocks import BlocksError
from jaxquant.core.paths import leaves_by_path
from jaxquant.core.qtensor import QTensor, dequantize, is_tensor
from jaxquant.core.quant_state import HISTORY
from jaxquant.core.typed import build, to_mapping
from jaxquant.export import STATIC_INPUTS, LlamaShape, Row, Source, export
from jaxquant.export.vocabulary import byte_vocabulary, read_tokenizer
from jaxquant.state import rows_of
from jaxquant.training.config import TrainConfig
from jaxquant.training.conversion import calibrate_run, open_parameters, quant_fields, require_new, trained_kernels
from jaxquant.training.serving import open_served
from jaxquant.training.step import decoder_of

_LAYER_TENSORS = {
    "pre_self_attention_layer_norm/scale": "input_layernorm",
    "self_attention/query/kernel": "self_attn.q_proj",
    "self_attention/key/kernel": "self_attn.k_proj",
    "self_attention/value/kernel": "self_attn.v_proj",
    "self_attention/out/kernel": "self_attn.o_proj",
    "post_self_attention_layer_norm/scale": "post_attention_layernorm",
    "mlp/wi_0/kernel": "mlp.gate_proj",
    "mlp/wi_1/kernel": "mlp.up_proj",
    "mlp/wo/kernel": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embedder/embedding": "model.embed_tokens",
    "decoder_norm/scale": "model.norm",
    "logits_dense/kernel": "lm_head",
}
FIELDS = {
    **{"vocab_size": "vocab_size", "emb_dim": "hidden", "mlp_dim": "intermediate", "num_layers": "layers"},
    **{"num_query_heads": "heads", "num_kv_heads": "kv_heads", "head_dim": "head_dim", "rope_theta": "rope_theta"},
    **{"norm_epsilon": "norm_epsilon", "logits_via_embedding": "tied"},
}
"""Field of ``TrainConfig`` -> field of ``LlamaShape``."""


class Location(NamedTuple):
    """Position of a tensor in the parameters: path of its array, and index of its layer if layers are stacked."""

    path: str
    index: tuple[int, ...] = ()


Read = Callable[[str, tuple[int, ...]], Any]
"""Function (path of a parameter, index of a layer) -> its array, or a ``QTensor``, or None."""


def locate_tensors(config: TrainConfig, shape: LlamaShape) -> dict[str, Location]:
    """Return, for each module of a Llama, the position of its tensor in the parameters."""
    found = {name: Location(path) for path, name in _OTHER_TENSORS.items() if name != "lm_head" or not shape.tied}
    for index in range(shape.layers):
        for path, name in _LAYER_TENSORS.items():
            place = Location(f"layers/{path}", (index,)) if config.scan_layers else Location(f"layers_{index}/{path}")
            found[f"model.layers.{index}.{name}"] = place
    return found


def to_hf(array: np.ndarray, module: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a parameter in the layout of a checkpoint, with ``shape``: kernels are transposed to [out, in]."""
    if len(shape) == 1 or module == "model.embed_tokens":
        return array.reshape(shape)
    return np.ascontiguousarray(array.reshape(shape[1], shape[0]).T)


def from_hf(array: np.ndarray, module: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a checkpoint's array in the layout of the parameter, which has ``shape``; the inverse of ``to_hf``."""
    if len(array.shape) == 1 or module == "model.embed_tokens":
        return array.reshape(shape)
    return np.ascontiguousarray(array.T).reshape(shape)


def _quantized_to_hf(tensor: QTensor, shape: tuple[int, ...]) -> QTensor | None:
    """Return a quantized kernel as [out, in] or [out, bytes], or None if its blocks cannot be transposed."""
    if tensor.codec is None:
        try:
            return tensor.reshape(shape[::-1]).transpose((1, 0))
        except BlocksError:
            return None
    contraction = [axis for axis, size in enumerate(tensor.blocks) if size > 1]
    if contraction != list(range(contraction[-1] + 1)):
        return None
    data = np.asarray(tensor.qvalue).reshape(-1, shape[0]).T
    return QTensor(data, block=(1, shape[1]), codec=tensor.codec)  # pyright: ignore[reportArgumentType]


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
    """Open a run or a converted checkpoint as a Llama with Hugging Face's names, read tensor by tensor.

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

    def quantized(path: str, index: tuple[int, ...]) -> QTensor | None:
        convert = kernels().get(path.removesuffix("/kernel"))
        return None if convert is None else convert(index)

    read = lambda path, index: stored.read(f"params/{path}", *index)  # noqa: E731
    source = _as_llama(stored.config, leaves_by_path(stored.shapes["params"]), read, quantized)
    if not measures:
        return source
    # Measure the amax of each linear layer's input on held-out text, with the parameters in float.
    plain = quant_fields(QuantConfig(quantization="fp8", quant_backend="native"))
    fields = to_mapping(stored.config) | plain
    calibrated: TrainConfig = build(TrainConfig, fields)
    state = rows_of(calibrate_run(stored, calibrated, decoder_of(calibrated)[1], say))
    inputs = {row.rsplit("/", 2)[0]: fields[HISTORY] for row, fields in state.items() if row.endswith("/input")}
    amax = {}
    for module, place in locate_tensors(stored.config, source.shape).items():
        if (history := inputs.get(place.path.removesuffix("/kernel"))) is not None:
            amax[module] = float(np.max(history[place.index] if history.ndim > 1 else history))
    return dataclasses.replace(source, input_amax=amax)


def _open_converted(folder: Path) -> Source:
    found = open_served(folder)
    leaves = leaves_by_path(found.params, is_leaf=is_tensor)

    def at(path: str, index: tuple[int, ...]) -> Any:
        # Indexing removes the axis of stacked layers; ``QTensor`` removes it from the block shape, too.
        return jax.tree.map(lambda part: part[index], leaves[path]) if index else leaves[path]

    def read(path: str, index: tuple[int, ...]) -> np.ndarray:
        leaf = at(path, index)
        return np.asarray(dequantize(leaf) if isinstance(leaf, QTensor) else leaf, np.float32)

    def quantized(path: str, index: tuple[int, ...]) -> QTensor | None:
        leaf = at(path, index)
        return leaf if isinstance(leaf, QTensor) else None

    return _as_llama(found.config, leaves, read, quantized)


def _as_llama(config: TrainConfig, leaves: Mapping[str, Any], read: Read, quantized: Read) -> Source:
    """Return a decoder as a ``Source`` whose tensors have the names of a Llama.

    Raises:
      NotImplementedError: the decoder and a Llama do not have the same parameters.
    """
    tokenizer, decoder, _ = decoder_of(config)
    sizes = {theirs: getattr(decoder, ours) for ours, theirs in FIELDS.items()}
    shape = LlamaShape(**sizes, max_length=config.sequence_length)
    found, tensors = locate_tensors(config, shape), shape.tensors()
    if others := sorted(leaves.keys() ^ {place.path for place in found.values()}):
        why = f"parameter {others[0]}, which {'no Llama has' if others[0] in leaves else 'is missing'}"
        raise NotImplementedError(f"the model is not a Llama: {why}; serve it with `jaxquant serve`")

    def tensor(name: str) -> np.ndarray:
        module = name.removesuffix(".weight")
        return to_hf(read(*found[module]), module, tensors[name])

    def kernel(module: str) -> QTensor | None:
        value = quantized(*found[module])
        return None if value is None else _quantized_to_hf(value, tensors[f"{module}.weight"])

    vocabulary = byte_vocabulary(shape.vocab_size)
    if config.tokenizer_path:
        ids = {"bos_token_id": tokenizer.bos, "eos_token_id": [*tokenizer.ends], "pad_token_id": tokenizer.pad or None}
        vocabulary = read_tokenizer(Path(config.tokenizer_path), ids | {"vocab_size": shape.vocab_size})
        vocabulary = dataclasses.replace(vocabulary, adds_bos=tokenizer.bos is not None)
    return Source(shape, tensor, vocabulary, quantized=kernel)
