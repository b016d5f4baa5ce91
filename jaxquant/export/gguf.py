"""Layout of decoders in GGUF files, as llama.cpp loads them.

Linear layers are stored in a GGML type, embedding and head in F16, everything else in F32. A mixture selects the type
of each matrix, including embedding and head. The experts of a layer are one tensor with three axes.

The architecture "llama" rotates pairs of neighbouring elements in GGUF, but the two halves of a head in Hugging Face's
layout. The rows of its q and k are therefore permuted: row ``(h, i, j)`` (head, half, index) becomes row ``(h, j, i)``.

Source: convert_hf_to_gguf.py, llama-arch.cpp and llama-model.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from jaxquant.config.decoder import DecoderShape, rope_stretch
from jaxquant.export import gguf_file
from jaxquant.export.families import OFF, Family, family_of, gguf_keys, tensors_of
from jaxquant.export.gguf_file import U32
from jaxquant.export.source import GgufLayout, Layout, Source

FILE_TYPES = {
    "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K": 14, "Q4_K_M": 15, "Q5_K": 16, "Q5_K_M": 17, "Q6_K": 18, "MXFP4": 38
}  # fmt: skip
"""llama.cpp's file type number for each GGML type in which linear layers can be written, and for each mixture.

MXFP4 is the type of the experts only; the other layers of such a file are Q8_0. The mixtures end in ``_M``.
"""
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Type that replaces a type whose block size does not divide the row size. Source: llama-quant.cpp."""
EMBEDDING = "token_embd.weight"
FACTORS = "rope_freqs.weight"
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


def rotated_heads(shape: DecoderShape, name: str) -> int | None:
    """Return the number of heads of a tensor whose rows are permuted, or None for other tensors."""
    if family_of(shape).gguf != "llama":
        return None
    return {"q_proj": shape.num_query_heads, "k_proj": shape.num_kv_heads}.get(name.split(".")[-2])


def norm_offset(shape: DecoderShape, name: str) -> float:
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
    for key, theirs in gguf_keys().items():
        if (value := values.get(theirs)) is not None:
            found[f"{arch}.{key}"] = float(value) if theirs in _FLOATS else U32(value)
    if shape.rope_type in ("linear", "yarn"):
        found[f"{arch}.rope.scaling.type"] = shape.rope_type
        found[f"{arch}.rope.scaling.factor"] = float(shape.rope_factor)
    if shape.rope_type == "yarn":
        found[f"{arch}.rope.scaling.original_context_length"] = U32(shape.original_max_position_embeddings)
    stretch = rope_stretch(shape) if shape.rope_type == "llama3" else None
    extra = {} if stretch is None else {FACTORS: stretch}
    heads = {name: count for name in layout.tensors if (count := rotated_heads(shape, name))}
    offsets = {name: norm_offset(shape, name) for name in layout.tensors}
    return GgufLayout(found, stored_tensors(shape), extra, heads, offsets)


def _check_llama_cpp(shape: DecoderShape) -> None:
    """Raise if llama.cpp computes a model of this family otherwise than its Hugging Face checkpoint."""
    family = family_of(shape)
    wanted = dict(family.llama_cpp)
    if shape.rope_type == "yarn":
        wanted |= {"rope_beta_fast": 32.0, "rope_beta_slow": 1.0, "rope_truncate": family.gguf != "gpt-oss"}
    if "query_pre_attn_scalar" in family.keys:
        wanted["query_pre_attn_scalar"] = query_scalar(family, shape.num_layers, shape.emb_dim, shape.num_query_heads)
    for field, value in wanted.items():
        if getattr(shape, field) != value:
            raise NotImplementedError(
                f"llama.cpp computes {family.gguf} with {field} {value}, but the model has {getattr(shape, field)}; "
                "export to a Hugging Face folder"
            )
    for key, field in family.keys.items():
        if key in OFF and key in family.defaults and field not in wanted and not getattr(shape, field):
            raise NotImplementedError(f"llama.cpp computes {family.gguf} with {key}, but the model has none")


def query_scalar(family: Family, layers: int, size: int, heads: int) -> int:
    """Return llama.cpp's ``query_pre_attn_scalar`` of a Gemma; 0 means ``head_dim``, as in all but the 27B models."""
    return size // heads if layers == {"gemma2": 46, "gemma3": 62}[family.gguf] else 0
