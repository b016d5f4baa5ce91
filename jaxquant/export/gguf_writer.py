"""Writer of GGUF files; linear layers, embedding and head are encoded in the types of ``gguf.tensor_kind``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxquant.core.qtensor import QTensor
from jaxquant.export.folder import Row, check_fits, partial_path, sqnr
from jaxquant.export.gguf import EMBEDDING, FILE_TYPES, gguf_layout, rows_to_gguf, tensor_kind
from jaxquant.export.gguf_file import ALIGNMENT, U32, align_up, decode, encode, header, row_bytes
from jaxquant.export.layouts import concatenate, to_host
from jaxquant.export.source import GgufLayout, Source
from jaxquant.export.vocabulary import gguf_metadata

_FLOATS = {"F32": np.float32, "F16": np.float16}


def export_gguf(
    source: Source, out: str | Path, kind: str, *, name: str = "jaxquant", progress: Callable[[Row], None] | None = None
) -> list[Row]:
    """Write a model as one GGUF file, tensor by tensor.

    A layer that was trained or converted in the same format keeps its bytes. If the block size of the type does not
    divide the row size of a layer, the layer is written in llama.cpp's fallback type.

    Args:
      source: model to write.
      out: file to write; it must not exist yet.
      kind: type of linear layers or mixture, a key of ``FILE_TYPES``.
      name: value of ``general.name`` in the metadata.
      progress: function that is called with the ``Row`` of each written tensor, or None.

    Raises:
      FileExistsError: ``out`` exists.
      ValueError: a tensor has a value that is not finite, or too large for its type.
      NotImplementedError: GGUF does not support the tokenizer, or a type needs the package gguf, which is not
        installed.
    """
    out, rows, layout = Path(out), [], _layout_for(source, kind)
    stored, extra, sizes = layout.tensors, layout.extra, source.layout.tensors
    general = {
        "general.name": name,
        "general.file_type": U32(FILE_TYPES[kind]),
        "general.quantization_version": U32(2),
        "general.alignment": U32(ALIGNMENT),
    }
    # A tokenizer has a token for each row of the embedding.
    tokens = gguf_metadata(source.vocabulary, sizes[stored[EMBEDDING][0]][0] if EMBEDDING in stored else 0)
    # The architecture comes first, and values of the model replace general ones.
    metadata = {**layout.metadata, **general, **layout.metadata, **tokens}
    kinds = {each: (tensor_kind(source, names[0], kind), sizes[names[0]]) for each, names in stored.items()}
    heads = {each: ("F32", array.shape) for each, array in extra.items()}
    for each, (own, size) in kinds.items():
        heads[each] = (own, (len(stored[each]), *size) if _is_stacked(layout, each) else size)
    with partial_path(out) as partial, partial.open("wb") as file:
        file.write(header(metadata, heads))
        for array in extra.values():
            file.write(array.tobytes().ljust(align_up(array.nbytes), b"\0"))
        for each, (own, size) in kinds.items():
            total = 0
            for part in stored[each]:
                data, back = _encode_checked(source, layout, part, own)
                if data.nbytes != row_bytes(own, size[-1]) * math.prod(size[:-1]):
                    raise ValueError(f"{part} has {data.nbytes} bytes, but {own} of shape {size} has another size")
                file.write(np.ascontiguousarray(data).data)
                total += data.nbytes
                rows.append(Row(part, own, size, data.nbytes, back))
                if progress is not None:
                    progress(rows[-1])
            file.write(b"\0" * (align_up(total) - total))
        file.flush()
        os.fsync(file.fileno())
    return rows


def gguf_tensors(source: Source, kind: str) -> dict[str, Any]:
    """Return the tensors that ``export_gguf`` writes, by name; see ``jaxquant.export.named_tensors``.

    Args:
      source, kind: same as for ``export_gguf``.

    Raises:
      NotImplementedError: GGUF does not support the model, or the encoder of a traced tensor's type runs on the host.
    """
    layout = _layout_for(source, kind)
    found: dict[str, Any] = dict(layout.extra)
    for stored, names in layout.tensors.items():
        own = tensor_kind(source, names[0], kind)
        parts = [_encode(source, layout, name, own) for name in names]
        found[stored] = concatenate([part[None] for part in parts]) if _is_stacked(layout, stored) else parts[0]
    return found


def _layout_for(source: Source, kind: str) -> GgufLayout:
    """Return the contents of a file with linear layers of a type.

    Raises:
      NotImplementedError: GGUF does not support the model, or the type for this model.
    """
    layout = gguf_layout(source.layout)
    if kind == "MXFP4" and not any("_exps." in each for each in layout.tensors):
        raise NotImplementedError("GGUF files store only experts in MXFP4, and the model has none; use another format")
    return layout


def _is_stacked(layout: GgufLayout, stored: str) -> bool:
    """Return whether a tensor of a file has an axis of experts."""
    return "_exps." in stored and layout.tensors[stored] != [stored]


def _encode_checked(source: Source, layout: GgufLayout, name: str, kind: str) -> tuple[np.ndarray, float]:
    """Return a tensor in its type, and the SQNR of the encoding in dB.

    Raises:
      ValueError: the tensor has a value that is not finite, or too large for its type.
    """
    if (own := _own_bytes(source, layout, name, kind)) is not None:
        return own, float("inf")
    weight = _read(layout, name, source.finite)
    if kind == "F16":
        where = "GGUF type F16" if name.removesuffix(".weight") in source.layout.linears else "every GGUF type"
        check_fits(name, weight, weight, np.float16, f"float16 in {where}", "export to a Hugging Face folder")
    data = _encode_rows(name, kind, weight)
    if kind in _FLOATS:
        return data, sqnr(weight, data)
    back = decode(kind, data)
    largest = max(weight.max(), -weight.min())
    if largest > np.finfo(np.float16).max and np.abs(weight - back).max() > largest / 4:  # scales are float16
        raise ValueError(f"{name} has magnitude {largest:g}, which is too large for {kind}; use another format")
    return data, sqnr(weight, back)


def _encode(source: Source, layout: GgufLayout, name: str, kind: str) -> Any:
    """Return a tensor in its type: float32, float16 or bytes."""
    own = _own_bytes(source, layout, name, kind)
    return _encode_rows(name, kind, _read(layout, name, source.finite)) if own is None else own


def _own_bytes(source: Source, layout: GgufLayout, name: str, kind: str) -> Any:
    """Return the bytes of a layer that was trained or converted in a type, or None for other tensors."""
    tensor = source.quantized(name.removesuffix(".weight")) if name.endswith(".weight") else None
    if not isinstance(tensor, QTensor) or tensor.codec != kind.lower():
        return None
    return _permute(layout, name, to_host(tensor.qvalue))


def _read(layout: GgufLayout, name: str, read: Callable[[str], Any]) -> Any:
    """Return a tensor in float32, with the values and the order of rows in a file."""
    return _permute(layout, name, read(name) + np.float32(layout.offsets.get(name, 0)))


def _permute(layout: GgufLayout, name: str, rows: Any) -> Any:
    return rows if (heads := layout.heads.get(name)) is None else rows_to_gguf(rows, heads)


def _encode_rows(name: str, kind: str, weight: Any) -> Any:
    """Return float32 rows in a type.

    Raises:
      NotImplementedError: the rows are traced, and the encoder runs on the host.
    """
    if kind in _FLOATS:
        return weight.astype(_FLOATS[kind])
    try:
        return encode(kind, weight)
    except jax.errors.TracerArrayConversionError:
        message = f"{name} is encoded in {kind} on the host, not under jax.jit; use export"
        raise NotImplementedError(message) from None
