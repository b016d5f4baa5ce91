"""Layout of decoders in GGUF files as llama.cpp loads them, and reader of these files.

Linear layers are stored in a GGML type, embedding and head in F16, everything else in F32. A mixture selects the type
of each matrix, including embedding and head. The experts of a layer are one tensor with three axes.

The architecture "llama" rotates pairs of neighbouring elements in GGUF, but the two halves of a head in Hugging Face's
layout. The rows of its q and k are therefore permuted: row ``(h, i, j)`` (head, half, index) becomes row ``(h, j, i)``.

Source: convert_hf_to_gguf.py, llama-arch.cpp and llama-model.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxquant.core.qtensor import QTensor
from jaxquant.core.typed import show
from jaxquant.export import gguf_file
from jaxquant.export.decoder import DecoderShape, rope_stretch
from jaxquant.export.families import FAMILIES, GGUF_KEYS, Family, family_of, layout_of, shape_of_config, tensors_of
from jaxquant.export.gguf_file import OWN, U32, GgufFile
from jaxquant.export.source import GgufLayout, Layout, Source, Vocabulary
from jaxquant.export.vocabulary import read_gguf, read_tokenizer

FILE_TYPES = {
    "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K": 14, "Q4_K_M": 15, "Q5_K": 16, "Q5_K_M": 17, "Q6_K": 18, "MXFP4": 38
}  # fmt: skip
"""llama.cpp's file type number for each GGML type in which linear layers can be written, and for each mixture.

MXFP4 is the type of the experts only; the other layers of such a file are Q8_0. The mixtures end in ``_M``.
"""
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Type that replaces a type whose block size does not divide the row size. Source: llama-quant.cpp."""
EMBEDDING = "token_embd.weight"
_FACTORS = "rope_freqs.weight"
"""Tensor with the factors of a rotary embedding of type "llama3"."""
_FLOATS = {"rms_norm_eps", "rope_theta", "rope_local_base_freq", "attn_logit_softcapping", "final_logit_softcapping"}


def stored_tensors(shape: DecoderShape) -> dict[str, list[str]]:
    """Return the tensors of a GGUF file by name, each with the Hugging Face names of the matrices that it holds."""
    found: dict[str, list[str]] = {}
    for name, tensor in tensors_of(shape).items():
        found.setdefault(tensor.gguf, []).append(name)
    return found


def rows_to_gguf(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute the rows of q or k for a rotary embedding of neighbours."""
    return _permute_rows(weight, heads, (2, -1))


def rows_to_hf(weight: np.ndarray, heads: int) -> np.ndarray:
    """Apply the inverse of ``rows_to_gguf``."""
    return _permute_rows(weight, heads, (-1, 2))


def _permute_rows(weight: np.ndarray, heads: int, sizes: tuple[int, int]) -> np.ndarray:
    return weight.reshape(heads, *sizes, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _rotated_heads(shape: DecoderShape, name: str) -> int | None:
    """Return the number of heads of a tensor whose rows are permuted, or None for other tensors."""
    if family_of(shape).gguf != "llama":
        return None
    return {"q_proj": shape.num_query_heads, "k_proj": shape.num_kv_heads}.get(name.split(".")[-2])


def _norm_offset(shape: DecoderShape, name: str) -> float:
    """Return the number that GGUF files add to a tensor of a Hugging Face checkpoint: 1 for the norms of Gemma."""
    return family_of(shape).norm_offset if name.endswith("norm.weight") else 0.0


def tensor_kind(source: Source, name: str, kind: str) -> str:
    """Return the GGML type in which a tensor is written if ``kind``, a key of ``FILE_TYPES``, is requested.

    Raises:
      NotImplementedError: the type is a mixture, which llama.cpp defines for known families.
    """
    size, is_linear = source.layout.tensors[name], name.removesuffix(".weight") in source.layout.linears
    if len(size) == 1 or (not is_linear and re.search(r"\.layers\.|^blk\.", name)):  # the second is a router
        return "F32"
    if kind.endswith("_M"):
        if source.layout.shape is None:
            raise NotImplementedError(f"{kind} requires a model of a known family; use {kind.removesuffix('_M')}")
        kind = _mixed_kind(source.layout.shape, name, kind.removesuffix("_M"))
    elif not is_linear:
        return "F16"
    elif kind == "MXFP4" and not re.search(r"\.experts\.|_exps\.", name):
        kind = "Q8_0"
    candidates = (kind, _FALLBACKS.get(kind, "F16"))
    return next((each for each in candidates if size[1] % gguf_file.block_parameters(each)[0] == 0), "F16")


def _mixed_kind(shape: DecoderShape, name: str, kind: str) -> str:
    """Return the type of a matrix in llama.cpp's mixture whose most frequent type is ``kind``, before the fallback.

    Source: llama_tensor_get_type_impl in llama-quant.cpp.
    """
    tensor, count, arch = tensors_of(shape)[name], shape.num_layers, family_of(shape).gguf
    part, layer, eighth = tensor.gguf.split(".")[-2], tensor.layer or 0, count // 8
    if part == "output" or (part == "token_embd" and shape.logits_via_embedding):
        return "Q6_K"
    if shape.num_experts == 8 and part in ("attn_k", "attn_v", "attn_output"):
        return "Q5_K" if part == "attn_output" else "Q8_0"
    has_more_bits = layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2
    if has_more_bits and part in ("attn_v", "ffn_down", "ffn_down_exps"):
        return "Q6_K"
    # llama.cpp recognizes Llama and Qwen2 models of 70B parameters by their 80 layers.
    is_70b = arch == "qwen2" or (arch == "llama" and shape.num_kv_heads < shape.num_query_heads)
    return "Q5_K" if part == "attn_v" and count == 80 and is_70b else kind


def gguf_layout(layout: Layout) -> GgufLayout:
    """Return the contents of the GGUF file of a model: ``layout.gguf``, or the contents that follow from its shape.

    Raises:
      NotImplementedError: llama.cpp does not compute this model, or its metadata is not known.
    """
    if layout.gguf is not None:
        return layout.gguf
    shape = layout.shape
    if shape is None:
        raise NotImplementedError("a GGUF file of an unknown family requires the argument metadata of named_source")
    _check_llama_cpp(shape)
    arch = family_of(shape).gguf
    found: dict[str, Any] = {"general.architecture": arch}
    experts = {"num_experts": shape.num_experts, "moe_intermediate_size": shape.mlp_dim} if shape.num_experts else {}
    values = {**layout.config, **experts}
    for key, theirs in GGUF_KEYS.items():
        if (value := values.get(theirs)) is not None:
            found[f"{arch}.{key}"] = float(value) if theirs in _FLOATS else U32(value)
    if shape.rope_type in ("linear", "yarn"):
        found[f"{arch}.rope.scaling.type"] = shape.rope_type
        found[f"{arch}.rope.scaling.factor"] = float(shape.rope_factor)
    if shape.rope_type == "yarn":
        found[f"{arch}.rope.scaling.original_context_length"] = U32(shape.original_max_position_embeddings)
    stretch = rope_stretch(shape) if shape.rope_type == "llama3" else None
    extra = {} if stretch is None else {_FACTORS: stretch}
    heads = {name: count for name in layout.tensors if (count := _rotated_heads(shape, name))}
    offsets = {name: _norm_offset(shape, name) for name in layout.tensors}
    return GgufLayout(found, stored_tensors(shape), extra, heads, offsets)


def _check_llama_cpp(shape: DecoderShape) -> None:
    """Raise if llama.cpp computes a model of this family otherwise than its Hugging Face checkpoint."""
    family = family_of(shape)
    wanted = dict(family.llama_cpp)
    if shape.rope_type == "yarn":
        wanted |= {"rope_beta_fast": 32.0, "rope_beta_slow": 1.0, "rope_truncate": family.gguf != "gpt-oss"}
    if "query_pre_attn_scalar" in family.keys:
        wanted["query_pre_attn_scalar"] = _query_scalar(family, shape.num_layers, shape.emb_dim, shape.num_query_heads)
    for field, value in wanted.items():
        if getattr(shape, field) != value:
            raise NotImplementedError(
                f"llama.cpp computes {family.gguf} with {field} {value}, but the model has {getattr(shape, field)}; "
                "export to a Hugging Face folder"
            )
    if family.norm_offset and not shape.sliding_window_size:
        raise NotImplementedError(f"llama.cpp computes {family.gguf} with a sliding window, but the model has none")


def _query_scalar(family: Family, layers: int, size: int, heads: int) -> int:
    """Return llama.cpp's ``query_pre_attn_scalar`` of a Gemma; 0 means ``head_dim``, as in all but the 27B models."""
    return size // heads if layers == {"gemma2": 46, "gemma3": 62}[family.gguf] else 0


def read_shape(file: GgufFile) -> DecoderShape:
    """Return the shape that a file's metadata describes.

    Raises:
      ValueError: a key is missing, or its value has the wrong type.
      NotImplementedError: the decoder does not support the architecture, a tensor or a key of the model.
    """
    found, arch = file.metadata, str(file.metadata.get("general.architecture"))
    families = [family for family in FAMILIES if family.gguf == arch]
    if not families:
        known = ", ".join(dict.fromkeys(family.gguf for family in FAMILIES))
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
    for key, theirs in GGUF_KEYS.items():
        if f"{arch}.{key}" in found or key in (
            "feed_forward_length",
            "block_count",
            "attention.layer_norm_rms_epsilon",
        ):
            value = number(key)
            if config.setdefault(theirs, value) != value:
                raise NotImplementedError(
                    f"{file.path} has {arch}.{key} {value}, but keys of size {config[theirs]}; the decoder requires "
                    "equal sizes of keys, values and rotated elements"
                )
    config["num_local_experts"] = config.get("num_experts")
    # Llama, Mistral and Mixtral have one architecture in GGUF: take the first with all keys that the file has.
    own = {key for key in ("num_local_experts", "sliding_window") if config.get(key)}
    family = next((family for family in families if own <= family.keys.keys()), families[0])
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
        config["query_pre_attn_scalar"] = _query_scalar(family, *sizes) or config["head_dim"]
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


def _read_scaling(file: GgufFile, arch: str, number: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the entry ``rope_scaling`` of config.json that a file's metadata and tensors describe."""
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if _FACTORS in file.tensors:
        # The file stores the factors instead of the parameters; published Llama 3 models differ only in the largest.
        factors = file.read(_FACTORS)
        rope = {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return rope | {"original_max_position_embeddings": 8192}
    if kind == "none":
        for key in file.metadata:  # without a type, the other keys have no effect
            if key.startswith(f"{arch}.rope.scaling."):
                number(key.removeprefix(f"{arch}."), 0)
        return None
    if kind not in ("linear", "yarn"):
        raise NotImplementedError(f"{file.path} has {arch}.rope.scaling.type {show(kind)}; supported are linear, yarn")
    rope = {"rope_type": kind, "factor": number("rope.scaling.factor")}
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
    if others := sorted(file.tensors.keys() - stored.keys() - {_FACTORS}):
        architecture = file.metadata["general.architecture"]
        raise ValueError(f"{path} has the tensor {show(others[0])}, which no {architecture} of its metadata has")
    stretch = rope_stretch(shape)
    if _FACTORS in file.tensors and not (stretch is not None and np.allclose(file.read(_FACTORS), stretch, rtol=1e-4)):
        raise NotImplementedError(f"{path} has {_FACTORS} of another scaled rotary embedding than Llama 3's")

    def read(name: str) -> np.ndarray:
        own, index = places[name]
        heads, array = _rotated_heads(shape, name), file.read(own, index) - np.float32(_norm_offset(shape, name))
        return array if heads is None else rows_to_hf(array, heads)

    def quantized(module: str) -> QTensor | None:
        name = f"{module}.weight"
        own, index = places[name]
        kind = file.tensors[own].kind
        if kind in ("F16", "BF16") or kind not in OWN:
            return None
        file.read(own, index)  # raises if a scale is not finite
        heads, data = _rotated_heads(shape, name), file.raw(own, index)
        data = data if heads is None else rows_to_hf(data, heads)
        return QTensor(jnp.asarray(data), block=(1, layout.tensors[name][1]), codec=kind.lower())

    return Source(layout, read, _read_vocabulary(file) if has_tokenizer else None, quantized=quantized)


def _read_vocabulary(file: GgufFile) -> Vocabulary | None:
    beside, found = file.path.with_name("tokenizer.json"), None
    try:
        found = read_gguf(file.metadata)
    except NotImplementedError as error:
        if not beside.is_file():
            raise NotImplementedError(f"{file.path}: {error}; put the model's tokenizer.json next to it") from None
    if found is None and beside.is_file():
        ids = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
        return read_tokenizer(beside, ids | {"pad_token_id": ids.get("padding_token_id")})
    return found
