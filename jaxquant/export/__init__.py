"""Readers and writers of Hugging Face and GGUF checkpoints, from named float tensors and a config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxquant.config.decoder import DecoderShape as DecoderShape
from jaxquant.export.families import layout_of as layout_of
from jaxquant.export.folder import SHARD_BYTES as SHARD_BYTES
from jaxquant.export.folder import Row as Row
from jaxquant.export.folder import folder_tensors, write_folder
from jaxquant.export.gguf import FILE_TYPES
from jaxquant.export.gguf_reader import open_gguf as open_gguf
from jaxquant.export.gguf_writer import export_gguf, gguf_tensors
from jaxquant.export.named import NamedFolder as NamedFolder
from jaxquant.export.named import named_source as named_source
from jaxquant.export.reading import HfFolder as HfFolder
from jaxquant.export.safetensors import SafetensorsFile as SafetensorsFile
from jaxquant.export.schemes import ROWS
from jaxquant.export.source import Layout as Layout
from jaxquant.export.source import Source as Source
from jaxquant.export.source import Vocabulary as Vocabulary
from jaxquant.export.sums import check_sums, write_sums

SCHEMES = {scheme.name: scheme for scheme in ROWS}
"""Formats of Hugging Face folders by name; ``hf`` is the float format."""
FORMATS = (*SCHEMES, *(f"gguf_{kind.lower()}" for kind in FILE_TYPES))
"""Names of all formats that ``export`` writes."""
STATIC_INPUTS = tuple(scheme.name for scheme in ROWS if scheme.spec is not None and scheme.spec.has_static_input)
"""Formats that store static scales of activations, so that an export to these formats requires a calibrated model."""


def export(
    source: Source,
    out: str | Path,
    format: str,
    *,
    dtype: str = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Write a model in a checkpoint format, and its checksums to ``SHA256SUMS`` in the folder or next to the GGUF file.

    Args:
      source: model to write: named tensors, their layout and the tokenizer.
      out: folder to write, or file to write for a GGUF format; it must not exist yet.
      format: one of ``FORMATS``.
      dtype: dtype of unquantized tensors in a Hugging Face folder.
      shard_bytes: maximum size in bytes of each safetensors file in a folder.
      progress: function that is called with the ``Row`` of each written tensor, or None.

    Raises:
      ValueError: the format is unknown, or cannot represent the sizes or values of the model.
      FileExistsError: ``out`` exists.
    """
    _check_format(format)
    if format not in SCHEMES:
        rows = export_gguf(source, out, format.removeprefix("gguf_").upper(), progress=progress)
    else:
        rows = write_folder(source, out, SCHEMES[format], dtype=dtype, shard_bytes=shard_bytes, progress=progress)
    out = Path(out)
    write_sums(out) if out.is_dir() else write_sums(out.parent, [out.name])
    return rows


def named_tensors(source: Source, format: str, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the tensors that ``export`` writes, by name, for an inference engine in the same process.

    Under ``jax.jit``, with a source of traced parameters, the tensors are encoded on the devices of the parameters, for
    example to send new weights to a sampler after each training step:

        @jax.jit  # out_shardings= places the tensors on the engine's mesh
        def refit(variables):
            params = jaxquant.convert(model, variables, config, x)["params"]
            return export.named_tensors(export.named_source(params, names, {}), "ct_int8")

    The bits are equal to the bits of the file, with three exceptions under ``jax.jit``: ``weight_shape`` is int32;
    scales of converted kernels stay float32 in ``ct_w4a16``; and concatenated kernels with outer scales are quantized
    again, even if these scales are equal. Values are not checked for overflow, and under ``jax.jit`` not for NaN and
    infinity.

    Args:
      source: model, from ``named_source`` or ``jaxquant.training.exporting.decoder_source``.
      format: one of ``FORMATS``.
      dtype: dtype of unquantized tensors in a Hugging Face format.

    Returns:
      Arrays by name. Tensors of a GGUF format are float32, float16, or bytes: [out, bytes of a row].

    Raises:
      ValueError: the format is unknown, or cannot represent the sizes of the model.
      NotImplementedError: the format cannot represent the model, or its encoder runs only on the host.
    """
    _check_format(format)
    if format not in SCHEMES:
        return gguf_tensors(source, format.removeprefix("gguf_").upper())
    return folder_tensors(source, SCHEMES[format], dtype)


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not known; use one of {', '.join(FORMATS)}")


def check_export(out: Path) -> None:
    """Compare an exported folder or GGUF file with its ``SHA256SUMS``; do nothing if there is no such file.

    Raises:
      ValueError: a file is missing or has changed; the message names the first one.
    """
    check_sums(out, required=False) if out.is_dir() else check_sums(out.parent, [out.name], required=False)
