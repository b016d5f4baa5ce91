"""gpt-oss's MXFP4: experts by the names and shapes of their tensors; what else a model has stays as it is.

    …mlp.experts.{gate_up,down}_proj [experts, in, out]  →  …_proj_blocks u8 [experts, out, in / 32, 16],
                                                              …_proj_scales u8 [experts, out, in / 32]

The decoder has no experts, so this takes named tensors and not a ``Source``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxquant.export.folder import partial_folder
from jaxquant.export.layouts import encode_mxfp4
from jaxquant.export.safetensors import SafetensorsWriter

CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_EXPERTS = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


def encode_experts(kernel: np.ndarray) -> dict[str, np.ndarray]:
    """Return blocks and scales of the kernels of experts, [experts, in, out].

    Raises:
      ValueError: another rank, or a contraction that is no multiple of 32.
    """
    if kernel.ndim != 3 or kernel.shape[1] % 32:
        raise ValueError(f"experts of shape {kernel.shape} are not [experts, in, out] with a multiple of 32 inputs")
    packed, scale = encode_mxfp4(np.ascontiguousarray(kernel.transpose(0, 2, 1), np.float32))
    return {"_blocks": packed.reshape(*packed.shape[:2], -1, 16), "_scales": scale}


def export_experts(
    tensors: Iterable[tuple[str, np.ndarray]], config: Mapping[str, Any], out: str | Path, count: int = 10_000
) -> None:
    """Write a model with experts: their kernels in MXFP4, every other tensor in bfloat16.

    Args:
      tensors: names, as gpt-oss has them, and float arrays.
      config: its ``config.json``, the quantization left out.
      out: folder; it must not exist.
      count: of the tensors, at most.

    Raises:
      FileExistsError: ``out`` is there.
      ValueError: no experts, or kernels that do not divide into blocks.
    """
    with partial_folder(Path(out)) as folder:
        writer, found = SafetensorsWriter(folder / "model.safetensors", 2 * count, {"format": "pt"}), 0
        for name, array in tensors:
            if _EXPERTS.fullmatch(name):
                found += 1
                for end, part in encode_experts(array).items():
                    writer.add(f"{name}{end}", part)
            else:
                writer.add(name, np.asarray(array).astype(ml_dtypes.bfloat16))
        writer.close()
        if not found:
            raise ValueError("the model has no tensor …experts.gate_up_proj or …experts.down_proj; export it otherwise")
        contents = {**config, "quantization_config": CONFIG}
        (folder / "config.json").write_text(json.dumps(contents, indent=2) + "\n")
