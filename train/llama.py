"""The decoder and Llama: which parameter is which tensor of a Hugging Face checkpoint, and in which layout.

A kernel is [in…, out…] here and [out, in] there, heads one behind the other; norms and the embedding are alike. Both
rotate halves in the rotary embedding, and multiply by ``silu(gate) · up``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxquant.core.blocks import BlocksError
from jaxquant.core.qtensor import QTensor
from jaxquant.export import LlamaShape
from train.config import TrainConfig
from train.model import DecoderConfig

_LAYER = {
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
_WHOLE = {
    "token_embedder/embedding": "model.embed_tokens",
    "decoder_norm/scale": "model.norm",
    "logits_dense/kernel": "lm_head",
}


_FIELDS = {
    **{"vocab_size": "vocab_size", "emb_dim": "hidden", "mlp_dim": "intermediate", "num_layers": "layers"},
    **{"num_query_heads": "heads", "num_kv_heads": "kv_heads", "head_dim": "head_dim", "rope_theta": "rope_theta"},
    **{"norm_epsilon": "norm_epsilon", "logits_via_embedding": "tied"},
}
"""Fields of the decoder's shape and those of a Llama that they are."""


class Place(NamedTuple):
    """Where a tensor lies in the parameters: the path of its array, and its layer's index where layers are stacked."""

    path: str
    index: tuple[int, ...] = ()


def llama_shape(shape: DecoderConfig, max_length: int) -> LlamaShape:
    """Return the shape of the Llama that a decoder is."""
    return LlamaShape(**{theirs: getattr(shape, ours) for ours, theirs in _FIELDS.items()}, max_length=max_length)


def config_fields(shape: LlamaShape) -> dict[str, Any]:
    """Return the fields of ``TrainConfig`` that make a decoder of a Llama's shape."""
    return {ours: getattr(shape, theirs) for ours, theirs in _FIELDS.items()}


def places(config: TrainConfig, shape: LlamaShape) -> dict[str, Place]:
    """Return where each tensor of a Llama, by its module, lies in the parameters."""
    found = {name: Place(path) for path, name in _WHOLE.items() if name != "lm_head" or not shape.tied}
    for index in range(shape.layers):
        for path, name in _LAYER.items():
            place = Place(f"layers/{path}", (index,)) if config.scan_layers else Place(f"layers_{index}/{path}")
            found[f"model.layers.{index}.{name}"] = place
    return found


def modules_by_path(config: TrainConfig, shape: LlamaShape) -> dict[str, list[str]]:
    """Return the modules of a Llama that make up each parameter, layer by layer where layers are stacked."""
    found: dict[str, list[str]] = {}
    for module, place in places(config, shape).items():
        found.setdefault(place.path, []).append(module)
    return found


def check_parameters(paths: Iterable[str], found: dict[str, Place]) -> None:
    """Refuse a model with parameters that a Llama has not, or without one that it has.

    Args:
      paths: of the model's parameters, quantized ones once.
      found: from ``places``.

    Raises:
      NotImplementedError: names the parameter.
    """
    here, there = set(paths), {place.path for place in found.values()}
    if others := sorted(here ^ there):
        kind = "which no Llama has" if others[0] in here else "which is missing"
        raise NotImplementedError(
            f"the model is no Llama: parameter {others[0]}, {kind}; serve it with scripts/serve.py"
        )


def to_hf(array: np.ndarray, module: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a parameter as a checkpoint has it, of ``shape``: kernels turned into [out, in]."""
    if len(shape) == 1 or module == "model.embed_tokens":
        return array.reshape(shape)
    return np.ascontiguousarray(array.reshape(shape[1], shape[0]).T)


def quantized_to_hf(tensor: QTensor, shape: tuple[int, ...]) -> QTensor | None:
    """Return a quantized kernel as [out, in], or [out, bytes]; None where its blocks or bytes are none of that."""
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


def from_hf(array: np.ndarray, module: str, shape: tuple[int, ...]) -> np.ndarray:
    """Undo ``to_hf``; ``shape`` is the parameter's."""
    if len(array.shape) == 1 or module == "model.embed_tokens":
        return array.reshape(shape)
    return np.ascontiguousarray(array.T).reshape(shape)
