"""Reader and writer of Llama models in GGUF files, as llama.cpp loads them.

Linear layers are stored in a GGML type, embedding and head in F16, norms in F32.

The rotary embedding rotates pairs of neighbouring elements in GGUF, but the two halves of a head in Hugging Face's
layout. The rows of q and k are therefore permuted: row ``(h, i, j)`` (head, half, index) becomes row ``(h, j, i)``.

Source: ``LlamaModel`` of llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxquant.core.qtensor import QTensor
from jaxquant.core.typed import show
from jaxquant.export.folder import Row, check_fits, partial_path, sqnr
from jaxquant.export.gguf_file import ALIGNMENT, OWN, U32, GgufFile, block_parameters, decode, encode, header, row_bytes
from jaxquant.export.llama import EMBEDDING, HEAD, NORM, LlamaShape
from jaxquant.export.source import Source, Vocabulary
from jaxquant.export.vocabulary import gguf_metadata, read_gguf, read_tokenizer

FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18}
"""llama.cpp's file type number for each GGML type in which linear layers can be written."""
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Type that replaces a type whose block size does not divide the row size. Source: llama-quant.cpp."""
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {EMBEDDING: "token_embd", NORM: "output_norm", HEAD: "output"}


def gguf_name(name: str) -> str:
    """Return the GGUF name of a tensor of a Hugging Face Llama."""
    module = name.removesuffix(".weight")
    if module in _NAMES:
        return f"{_NAMES[module]}.weight"
    _, _, index, rest = module.split(".", 3)
    return f"blk.{index}.{_LAYER_NAMES[rest]}.weight"


def rows_to_gguf(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute the rows of q or k for a rotary embedding of neighbours."""
    return _permute_rows(weight, heads, (2, -1))


def rows_to_hf(weight: np.ndarray, heads: int) -> np.ndarray:
    """Apply the inverse of ``rows_to_gguf``."""
    return _permute_rows(weight, heads, (-1, 2))


def _permute_rows(weight: np.ndarray, heads: int, sizes: tuple[int, int]) -> np.ndarray:
    return weight.reshape(heads, *sizes, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _rotated_heads(shape: LlamaShape, name: str) -> int | None:
    """Return the number of heads of a tensor whose rows are permuted, or None for other tensors."""
    return {"q_proj.weight": shape.heads, "k_proj.weight": shape.kv_heads}.get(".".join(name.split(".")[-2:]))


def tensor_kind(shape: LlamaShape, name: str, kind: str) -> str:
    """Return the GGML type in which a tensor is written if ``kind`` is requested for linear layers."""
    if name.endswith("norm.weight"):
        return "F32"
    if name.removesuffix(".weight") not in shape.linears():
        return "F16"
    columns = shape.tensors()[name][1]
    candidates = (kind, _FALLBACKS.get(kind, "F16"))
    return next((each for each in candidates if columns % block_parameters(each)[0] == 0), "F16")


def make_metadata(source: Source, kind: str, name: str) -> dict[str, Any]:
    """Return the metadata of a GGUF file for a model."""
    shape = source.shape
    found: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": name,
        "general.file_type": U32(FILE_TYPES[kind]),
        "general.quantization_version": U32(2),
        "general.alignment": U32(ALIGNMENT),
        "llama.context_length": U32(shape.max_length),
        "llama.embedding_length": U32(shape.hidden),
        "llama.block_count": U32(shape.layers),
        "llama.feed_forward_length": U32(shape.intermediate),
        "llama.attention.head_count": U32(shape.heads),
        "llama.attention.head_count_kv": U32(shape.kv_heads),
        "llama.attention.key_length": U32(shape.head_dim),
        "llama.attention.value_length": U32(shape.head_dim),
        "llama.attention.layer_norm_rms_epsilon": float(shape.norm_epsilon),
        "llama.rope.dimension_count": U32(shape.head_dim),
        "llama.rope.freq_base": float(shape.rope_theta),
        "llama.vocab_size": U32(shape.vocab_size),
    }
    return found | gguf_metadata(source.vocabulary, shape.vocab_size)


def export_gguf(
    source: Source, out: str | Path, kind: str, *, name: str = "jaxquant", progress: Callable[[Row], None] | None = None
) -> list[Row]:
    """Write a model as one GGUF file, tensor by tensor.

    A layer that was trained or converted in the same format keeps its bytes. If the block size of the type does not
    divide the row size of a layer, the layer is written in llama.cpp's fallback type.

    Args:
      source: model to write.
      out: file to write; it must not exist yet.
      kind: type of linear layers, a key of ``FILE_TYPES``.
      name: value of ``general.name`` in the metadata.
      progress: function that is called with the ``Row`` of each written tensor, or None.

    Raises:
      FileExistsError: ``out`` exists.
      ValueError: a tensor has a value that is not finite, or too large for its type.
      NotImplementedError: GGUF does not support the tokenizer, or a type needs the package gguf, which is not
        installed.
    """
    out, rows, shape = Path(out), [], source.shape
    kinds = {each: (tensor_kind(shape, each, kind), size) for each, size in shape.tensors().items()}
    head = header(make_metadata(source, kind, name), {gguf_name(each): row for each, row in kinds.items()})
    with partial_path(out) as partial, partial.open("wb") as file:
        file.write(head)
        for each, (own, size) in kinds.items():
            stored, back = _encode_tensor(source, each, own)
            if stored.nbytes != row_bytes(own, size[-1]) * (size[0] if len(size) > 1 else 1):
                raise ValueError(f"{each} has {stored.nbytes} bytes, but {own} of shape {size} has another size")
            file.write(np.ascontiguousarray(stored).data)
            file.write(b"\0" * (-stored.nbytes % ALIGNMENT))
            rows.append(Row(each, own, size, stored.nbytes, back))
            if progress is not None:
                progress(rows[-1])
        file.flush()
        os.fsync(file.fileno())
    return rows


def _encode_tensor(source: Source, name: str, kind: str) -> tuple[np.ndarray, float]:
    """Return the encoded bytes of a tensor, and the SQNR of the encoding in dB."""
    heads = _rotated_heads(source.shape, name)
    tensor = source.quantized(name.removesuffix(".weight"))
    if isinstance(tensor, QTensor) and tensor.codec == kind.lower():
        data = np.asarray(tensor.qvalue)
        return data if heads is None else rows_to_gguf(data, heads), float("inf")
    weight = source.finite(name)
    if heads is not None:
        weight = rows_to_gguf(weight, heads)
    if kind == "F32":
        return weight.view(np.uint8), float("inf")
    if kind == "F16":
        where = "GGUF type F16" if name.removesuffix(".weight") in source.shape.linears() else "every GGUF type"
        check_fits(name, weight, weight, np.float16, f"float16 in {where}", "export to a Hugging Face folder")
        half = weight.astype(np.float16)
        return half.view(np.uint8), sqnr(weight, half, half.dtype)
    blocks = encode(kind, weight)
    back = decode(kind, blocks)
    largest = max(weight.max(), -weight.min())
    if largest > np.finfo(np.float16).max and np.abs(weight - back).max() > largest / 4:  # scales are float16
        raise ValueError(f"{name} has magnitude {largest:g}, which is too large for {kind}; use another format")
    return blocks, sqnr(weight, back)


def read_shape(file: GgufFile) -> LlamaShape:
    """Return the shape that a file's metadata describes.

    Raises:
      ValueError: a key is missing, or its value has the wrong type.
      NotImplementedError: the decoder does not support the architecture, a tensor or a key of the model.
    """
    found = file.metadata
    if found.get("general.architecture") != "llama":
        raise NotImplementedError(
            f"{file.path} has general.architecture {found.get('general.architecture')!r}; only llama is supported"
        )
    if found.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in file.tensors:
        raise NotImplementedError(f"{file.path} has a scaled rotary embedding, which the decoder does not support")

    used_keys = {"llama.rope.scaling.type", "llama.vocab_size", "llama.tensor_data_layout"}
    if "llama.rope.scaling.type" in found:  # the value is "none", so the other keys have no effect
        used_keys |= {key for key in found if key.startswith("llama.rope.scaling.")}

    def number(key: str, default: Any = None) -> Any:
        used_keys.add(f"llama.{key}")
        value = found.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{file.path} has no number under llama.{key}")
        return float(str(np.float32(value))) if isinstance(value, float) else value  # shortest decimal of the float32

    heads, hidden = number("attention.head_count"), number("embedding_length")
    if heads < 1:
        raise ValueError(f"{file.path} has {heads} attention heads, but llama.attention.head_count must be at least 1")
    size = number("attention.key_length", hidden // heads)
    rotated = number("rope.dimension_count", size)
    if number("attention.value_length", size) != size:
        raise NotImplementedError(
            f"{file.path} has keys and values of different sizes, which the decoder does not support"
        )
    if rotated != size:
        raise NotImplementedError(f"{file.path} rotates only {rotated} elements of a head; the decoder rotates all")
    if bias := next((name for name in file.tensors if name.endswith(".bias")), None):
        raise NotImplementedError(f"{file.path} has the tensor {bias}, but the decoder does not support biases")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{file.path} has no tensor token_embd.weight with two axes")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": size,
        "rope_theta": number("rope.freq_base", 10000.0),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "max_position_embeddings": number("context_length", 2048),
    }
    for key, value in found.items():
        if key.startswith("llama.") and key not in used_keys and (isinstance(value, np.ndarray) or value):
            raise NotImplementedError(
                f"{file.path} has {key} {show(value)}, which is not supported and may change values; convert the "
                "model without it"
            )
    try:
        return LlamaShape.of_config(config)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None


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
    for name, size in shape.tensors().items():
        tensor = file.tensors.get(gguf_name(name))
        if tensor is None or tensor.shape != size:
            has = "no such tensor" if tensor is None else f"shape {tensor.shape}"
            raise ValueError(f"{path}: tensor {gguf_name(name)} must have shape {size}, but the file has {has}")
    if others := sorted(file.tensors.keys() - {gguf_name(name) for name in shape.tensors()}):
        raise ValueError(f"{path} has the tensor {show(others[0])}, which is not part of such a Llama")

    def read(name: str) -> np.ndarray:
        heads, array = _rotated_heads(shape, name), file.read(gguf_name(name))
        return array if heads is None else rows_to_hf(array, heads)

    def quantized(module: str) -> QTensor | None:
        name = f"{module}.weight"
        kind = file.tensors[gguf_name(name)].kind
        if kind in ("F16", "BF16") or kind not in OWN:
            return None
        file.read(gguf_name(name))  # raises if a scale is not finite
        heads, data = _rotated_heads(shape, name), file.raw(gguf_name(name))
        data = data if heads is None else rows_to_hf(data, heads)
        return QTensor(jnp.asarray(data), block=(1, shape.tensors()[name][1]), codec=kind.lower())

    return Source(shape, read, _read_vocabulary(file) if has_tokenizer else None, quantized=quantized)


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
