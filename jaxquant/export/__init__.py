"""Writers and readers of the checkpoints that others serve: one file an exporter, named tensors and a config in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxquant.export.folder import SHARD_BYTES as SHARD_BYTES
from jaxquant.export.folder import Row as Row
from jaxquant.export.folder import write_folder
from jaxquant.export.gguf import FILE_TYPES, export_gguf
from jaxquant.export.gguf import open_gguf as open_gguf
from jaxquant.export.llama import LlamaShape as LlamaShape
from jaxquant.export.reading import HfFolder as HfFolder
from jaxquant.export.safetensors import SafetensorsFile as SafetensorsFile
from jaxquant.export.schemes import ROWS
from jaxquant.export.source import Source as Source
from jaxquant.export.source import Vocabulary as Vocabulary
from jaxquant.export.sums import check_sums, write_sums

SCHEMES = {scheme.name: scheme for scheme in ROWS}
"""Formats of Hugging Face folders by name; ``hf`` is the float one."""
FORMATS = (*SCHEMES, *(f"gguf_{kind.lower()}" for kind in FILE_TYPES))
"""Every format that ``export`` writes."""
STATIC_INPUTS = tuple(scheme.name for scheme in ROWS if scheme.spec is not None and scheme.spec.has_static_input)
"""Those that store scales of activations, for which a model is calibrated."""


def export(
    source: Source,
    out: str | Path,
    format: str,
    *,
    dtype: str = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Write a model in a format, and the sums of its files in ``SHA256SUMS``: in the folder, or next to a GGUF file.

    Args:
      source: named tensors, shape and tokenizer.
      out: folder, or file of a GGUF format; it must not exist.
      format: one of ``FORMATS``.
      dtype: of what stays in float, in a Hugging Face folder.
      shard_bytes: of a file in a folder at most.
      progress: called with each tensor that is written.

    Raises:
      ValueError: no such format, or a model that does not fit it.
      FileExistsError: ``out`` is there.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not known; known ones are {', '.join(FORMATS)}")
    if format not in SCHEMES:
        rows = export_gguf(source, out, format.removeprefix("gguf_").upper(), progress=progress)
    else:
        rows = write_folder(source, out, SCHEMES[format], dtype=dtype, shard_bytes=shard_bytes, progress=progress)
    out = Path(out)
    write_sums(out) if out.is_dir() else write_sums(out.parent, [out.name])
    return rows


def check_export(out: Path) -> None:
    """Compare a folder or a GGUF file with its sums, if it has any.

    Raises:
      ValueError: naming the first file that is gone or has changed.
    """
    check_sums(out, required=False) if out.is_dir() else check_sums(out.parent, [out.name], required=False)
