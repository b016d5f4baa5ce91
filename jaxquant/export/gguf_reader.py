"""Reader of decoders in GGUF files: shape, tensors and tokenizer.

Source: convert_hf_to_gguf.py, llama-arch.cpp and llama-model.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxquant.config.decoder import DecoderShape, rope_stretch
from jaxquant.core.qtensor import QTensor
from jaxquant.core.typed import show
from jaxquant.export.families import families, gguf_keys, layout_of, shape_of_config
from jaxquant.export.gguf import (
    EMBEDDING,
    FACTORS,
    norm_offset,
    query_scalar,
    rotated_heads,
    rows_to_hf,
    stored_tensors,
)
from jaxquant.export.gguf_file import OWN, GgufFile
from jaxquant.export.source import Source, Vocabulary
from jaxquant.export.vocabulary import read_gguf, read_tokenizer

_REQUIRED = ("feed_forward_length", "block_count", "attention.layer_norm_rms_epsilon")
"""Keys after the architecture that every file must have."""


def read_shape(file: GgufFile) -> DecoderShape:
    """Return the shape that a file's metadata describes.

    Raises:
      ValueError: a key is missing, or its value has the wrong type.
      NotImplementedError: the decoder does not support the architecture, a tensor or a key of the model.
    """
    found, arch = file.metadata, str(file.metadata.get("general.architecture"))
    candidates = [family for family in families() if family.gguf == arch]
    if not candidates:
        known = ", ".join(dict.fromkeys(family.gguf for family in families()))
        raise NotImplementedError(f"{file.path} has general.architecture {show(arch)}; supported are {known}")
    used = {f"{arch}.{key}" for key in ("rope.scaling.type", "rope.scaling.finetuned", "tensor_data_layout")}

    def number(key: str, default: Any = None) -> Any:
        used.add(f"{arch}.{key}")
        value = found.get(f"{arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{file.path} has no number under {arch}.{key}; convert the model again")
        return float(str(np.float32(value))) if isinstance(value, float) else value  # shortest decimal of the float32

    heads = number("attention.head_count")
    if heads < 1:
        raise ValueError(f"{file.path} has {heads} attention heads, but {arch}.attention.head_count must be at least 1")
    config: dict[str, Any] = {"head_dim": number("attention.key_length", number("embedding_length") // heads)}
    for key, theirs in gguf_keys().items():
        if f"{arch}.{key}" in found or key in _REQUIRED:
            value = number(key)
            if config.setdefault(theirs, value) != value:
                raise NotImplementedError(
                    f"{file.path} has {arch}.{key} {value}, but keys of size {config[theirs]}; the decoder requires "
                    "equal sizes of keys, values and rotated elements"
                )
    config = {"rope_theta": 10000.0, **config, "num_local_experts": config.get("num_experts")}
    # Llama, Mistral and Mixtral have one architecture in GGUF: take the first with all keys that the file has.
    own = {key for key in ("num_local_experts", "sliding_window") if config.get(key)}
    family = next((family for family in candidates if own <= family.keys.keys()), candidates[0])
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{file.path} has no tensor {EMBEDDING} with two axes")
    config |= {
        "architectures": [family.architecture],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_scaling": _read_scaling(file, arch, number),
        **{key: True for key in ("norm_topk_prob",) if key in family.keys},
    }
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    config |= {key: name in file.tensors for key, name in biases.items() if key in family.keys}
    if "query_pre_attn_scalar" in family.keys:
        sizes = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        config["query_pre_attn_scalar"] = query_scalar(family, *sizes) or config["head_dim"]
    for key, value in found.items():
        if key.startswith(f"{arch}.") and key not in used and (isinstance(value, np.ndarray) or value):
            raise NotImplementedError(
                f"{file.path} has {key} {show(value)}, which is not supported and may change values; convert the "
                "model without it"
            )
    try:
        return shape_of_config(config)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None


def _read_scaling(file: GgufFile, arch: str, number: Callable[..., Any]) -> dict[str, Any]:
    """Return the entry ``rope_scaling`` of config.json that a file's metadata and tensors describe."""
    kind, factor = file.metadata.get(f"{arch}.rope.scaling.type", "linear"), number("rope.scaling.factor", 0) or 1
    if FACTORS in file.tensors:
        # The file stores the factors instead of the parameters; published Llama 3 models differ only in the largest.
        factors = file.read(FACTORS)
        rope = {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return rope | {"original_max_position_embeddings": 8192}
    if kind == "none" or (kind == "linear" and factor == 1):
        for key in file.metadata:  # the other keys have no effect
            if key.startswith(f"{arch}.rope.scaling."):
                number(key.removeprefix(f"{arch}."), 0)
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise NotImplementedError(f"{file.path} has {arch}.rope.scaling.type {show(kind)}; supported are linear, yarn")
    rope = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = number("rope.scaling.original_context_length")
        rope["truncate"] = arch != "gpt-oss"
    return rope


def open_gguf(path: str | Path, *, has_tokenizer: bool = True) -> Source:
    """Open a GGUF file as a ``Source`` with Hugging Face's tensor names and layout.

    The tokenizer is read from the metadata, or from a ``tokenizer.json`` next to the file if the metadata has no
    supported tokenizer.

    Args:
      path: path of the file.
      has_tokenizer: whether to read the tokenizer.

    Raises:
      ValueError: the file or its metadata is invalid, or a tensor is missing, unexpected, or has another shape.
      NotImplementedError: the version, a tensor type, the architecture or the tokenizer is not supported.
      OSError: the file cannot be opened.
    """
    file = GgufFile(path)
    shape = read_shape(file)
    layout, stored, places = layout_of(shape), stored_tensors(shape), {}
    for own, names in stored.items():
        size = layout.tensors[names[0]]
        size = (len(names), *size) if "_exps." in own else size
        tensor = file.tensors.get(own)
        if tensor is None or tensor.shape != size:
            has = "no such tensor" if tensor is None else f"shape {tensor.shape}"
            raise ValueError(f"{path}: tensor {own} must have shape {size}, but the file has {has}")
        places |= {name: (own, index if "_exps." in own else ...) for index, name in enumerate(names)}
    if others := sorted(file.tensors.keys() - stored.keys() - {FACTORS}):
        architecture = file.metadata["general.architecture"]
        raise ValueError(f"{path} has the tensor {show(others[0])}, which no {architecture} of its metadata has")
    stretch = rope_stretch(shape)
    if FACTORS in file.tensors and not (stretch is not None and np.allclose(file.read(FACTORS), stretch, rtol=1e-4)):
        raise NotImplementedError(f"{path} has {FACTORS} of another scaled rotary embedding than Llama 3's")

    def read(name: str) -> np.ndarray:
        own, index = places[name]
        heads, array = rotated_heads(shape, name), file.read(own, index) - np.float32(norm_offset(shape, name))
        return array if heads is None else rows_to_hf(array, heads)

    def quantized(module: str) -> QTensor | None:
        name = f"{module}.weight"
        own, index = places[name]
        kind = file.tensors[own].kind
        if kind in ("F16", "BF16") or kind not in OWN:
            return None
        file.read(own, index)  # raises if a scale is not finite
        heads, data = rotated_heads(shape, name), file.raw(own, index)
        data = data if heads is None else rows_to_hf(data, heads)
        return QTensor(jnp.asarray(data), block=(1, layout.tensors[name][1]), codec=kind.lower())

    return Source(layout, read, _read_vocabulary(file) if has_tokenizer else None, quantized=quantized)


def _read_vocabulary(file: GgufFile) -> Vocabulary | None:
    tokenizer_json, found = file.path.with_name("tokenizer.json"), None
    try:
        found = read_gguf(file.metadata)
    except NotImplementedError as error:
        if not tokenizer_json.is_file():
            raise NotImplementedError(f"{file.path}: {error}; put the model's tokenizer.json next to it") from None
    if found is None and tokenizer_json.is_file():
        ids = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
        return read_tokenizer(tokenizer_json, ids | {"pad_token_id": ids.get("padding_token_id")})
    return found
