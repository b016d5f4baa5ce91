#!/usr/bin/env python3
"""Load exported checkpoints with the libraries of their formats, and compare logits, weights and perplexity.

The libraries are transformers and compressed-tensors on CPU, and llama.cpp through llama-cpp-python. The command ``pip
install -e '.[exchange]'`` installs these libraries and torch; llama.cpp needs a C++ compiler. The test suite does not
run this script. Results are written to benchmarks/results/exchange.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import loaders
import ml_dtypes
import numpy as np

from jaxquant import terminal
from jaxquant.config.loader import load_yaml
from jaxquant.config.recipes import RECIPES
from jaxquant.core.qtensor import dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.typed import build
from jaxquant.export import FORMATS, HfFolder, Source, export, open_gguf
from jaxquant.training import report_missing_library
from jaxquant.training.config import TrainConfig
from jaxquant.training.data import make_iterators
from jaxquant.training.exporting import open_source

ROOT = Path(__file__).resolve().parents[1]
LOGIT_BOUND = 2e-3
"""Bound on |Δ logit| relative to the root mean square of the logits, if both sides compute in float32."""
F16_BOUND = 2e-2
"""Bound on the same ratio if llama.cpp rounds activations to float16."""
PERPLEXITY_BOUND = 0.005


def perplexity(logits: loaders.Logits, texts: Sequence[np.ndarray]) -> float:
    """Return the perplexity: exp of the mean negative log-likelihood of the next tokens."""
    total = count = 0.0
    for tokens in texts:
        scores = logits(tokens[:-1]).astype(np.float64)
        peak = scores.max(-1, keepdims=True)
        logs = scores - peak - np.log(np.exp(scores - peak).sum(-1, keepdims=True))
        total -= logs[np.arange(len(tokens) - 1), tokens[1:]].sum()
        count += len(tokens) - 1
    return float(np.exp(total / count))


def trained_weights(source: Source, weight: Callable[[str], np.ndarray]) -> str:
    """Compare a library's weights with the weights of the training forward pass; return the number of differences.

    Args:
      source: training run.
      weight: function from the name of a linear layer to the weight in the library.
    """
    total, differ = 0, {"float32": 0, "bfloat16": 0}
    for module in source.layout.linears:
        tensor = source.quantized(module)
        if tensor is None:
            return "not trained in this format"
        ours, theirs = np.asarray(dequantize(tensor)), weight(module)
        total += ours.size
        differ["float32"] += int(np.sum(ours != theirs))
        differ["bfloat16"] += int(np.sum(ours.astype(ml_dtypes.bfloat16) != theirs.astype(ml_dtypes.bfloat16)))
    return f"{differ['float32']:,} of {total:,} in float32, {differ['bfloat16']:,} in bfloat16"


def quantizers() -> list[str]:
    """Quantize N(0, 1) samples with jaxquant and compressed-tensors in all weight formats; return the table rows."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    args = {"type": "float", "symmetric": True}
    e4m3, bytes_ = torch.float8_e4m3fn, torch.uint8
    cases = {
        "nvfp4w": args | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": e4m3},
        "mxfp4w": args | {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": bytes_},
        "fp8_blockw": args | {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    }
    weight, lines = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32), []
    for string, fields in cases.items():
        recipe, theirs = RECIPES[string].recipe, torch.from_numpy(weight)
        assert recipe is not None
        ours = jax.jit(lambda x, spec=recipe.fwd.rhs: quantize(x, spec, (1,)))(weight)
        block = ours.blocks
        blocks = theirs.reshape(1024 // block[0], block[0], 1024 // block[1], block[1])
        outer = generate_gparam(theirs.min(), theirs.max()) if ours.outer_scale is not None else None
        given = QuantizationArgs(**fields)
        scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), given, outer)
        codes = their_quantize(x=theirs, scale=scale, zero_point=None, args=given, global_scale=outer).float().numpy()
        counts = np.asarray(ours.scale).astype(np.float32) != scale.float().numpy()
        differs = np.asarray(ours.qvalue).astype(np.float32) != codes
        under_same = int(np.sum(differs & ~np.kron(counts, np.ones(block, bool))))
        shares = [f"{np.sum(each):,} of {each.size:,}" for each in (counts, differs)]
        lines.append(f"| {string} | {' | '.join(shares)} | {under_same:,} |")
    return lines


def compare_folder(source: Source, name: str, folder: Path, texts: Sequence[np.ndarray]) -> dict[str, Any]:
    export(source, folder, name, dtype="float32")
    files, (theirs, weight) = HfFolder(folder), loaders.load_transformers(folder)
    inputs = loaders.rounded_inputs(files) if name.startswith("ct_") else None
    decoded = files.source()
    if name.startswith("ct_nvfp4"):  # compressed-tensors decompresses nvfp4 to bfloat16
        decoded = loaders.in_bfloat16(decoded, list(decoded.layout.linears))
    ours = loaders.our_logits(decoded, inputs)
    delta = max(loaders.relative(theirs(text), ours(text)) for text in texts)
    row: dict[str, Any] = {"format": name, "loader": "transformers", "largest Δ logit / rms": f"{delta:.2e}"}
    a, b = perplexity(ours, texts), perplexity(theirs, texts)
    row |= {"perplexity, ours": f"{a:.4f}", "theirs": f"{b:.4f}", "differs": f"{100 * (b / a - 1):+.3f} %"}
    note = ""
    if inputs is not None:
        note = f"inputs quantized on both sides, {perplexity(loaders.our_logits(decoded), texts):.4f} with float ones"
    is_good = abs(b / a - 1) < PERPLEXITY_BOUND if inputs is not None else delta < LOGIT_BOUND
    row = {**row, "not as trained": trained_weights(source, weight)}
    return {**row, "note": note, "ok": is_good}


def compare_gguf(source: Source, name: str, path: Path, texts: Sequence[np.ndarray]) -> dict[str, Any]:
    export(source, path, name)
    ours, theirs = loaders.our_logits(open_gguf(path)), loaders.llama_cpp_logits(path)
    delta = max(loaders.relative(theirs(text), ours(text)) for text in texts)
    a, b = perplexity(ours, texts), perplexity(theirs, texts)
    is_good = abs(b / a - 1) < PERPLEXITY_BOUND and (name != "gguf_f16" or delta < F16_BOUND)
    return {
        "format": name,
        "loader": "llama.cpp",
        "largest Δ logit / rms": f"{delta:.2e}",
        "perplexity, ours": f"{a:.4f}",
        "theirs": f"{b:.4f}",
        "differs": f"{100 * (b / a - 1):+.3f} %",
        "not as trained": "",
        "note": "",
        "ok": is_good,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the formats; return 0 if every format is within its bound, 1 if not, 2 on an error."""
    parser = argparse.ArgumentParser(prog="validation/exchange.py", description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN", help="folder of a run whose contraction sizes are multiples of 256")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, metavar="F", help="default: all formats with a loader")
    parser.add_argument("--texts", type=int, default=4, metavar="N", help="held-out sequences (default: %(default)s)")
    parser.add_argument("--quantizers", action="store_true", help="also compare quantizers with compressed-tensors")
    words = parser.parse_args(arguments)
    terminal.accept_all_characters()
    loaded = [name for name in FORMATS if name.startswith(("hf", "ct_", "fp8_block", "gguf_"))]
    rows = []
    try:
        config = _config(words.run)
        with report_missing_library():
            batch = next(make_iterators(config, max(words.texts, 1)).held_out())
        texts = [np.asarray(row)[: loaders.LENGTH] for row in batch["inputs"]][: words.texts]
        source = open_source(words.run, measures=True)
        with tempfile.TemporaryDirectory() as folder:
            for name in words.formats or loaded:
                compare = compare_gguf if name.startswith("gguf_") else compare_folder
                rows.append(compare(source, name, Path(folder) / name, texts))
                print(" | ".join(str(value) for value in rows[-1].values()), flush=True)
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _write(ROOT / "benchmarks/results/exchange.md", rows, words.texts, quantizers() if words.quantizers else [])
    return 0 if all(row["ok"] for row in rows) else 1


def _config(run: str) -> TrainConfig:
    return build(TrainConfig, load_yaml(Path(run) / "config.yml"))


def _write(path: Path, rows: Sequence[dict[str, Any]], texts: int, quantizers: Sequence[str]) -> None:
    lines = [
        "# exchange",
        "",
        f"One model in every format, loaded by the library that the format is for. Logits and perplexity of {texts} "
        f"held-out sequences of {loaders.LENGTH} tokens against our decoder in float32 with the weights decoded from "
        f"the same files. Bounds: float and weight-only folders "
        f"{LOGIT_BOUND:g} of the logits' rms, {F16_BOUND:g} for gguf_f16; perplexity "
        f"{100 * PERPLEXITY_BOUND:g} % elsewhere (llama.cpp, and folders whose inputs are quantized when they run: "
        "ours are then quantized as the loader does). Not as trained are weights of the loader that the training "
        "forward did not multiply, bit for bit.",
        "",
        f"{loaders.versions()}.",
        "",
    ]
    lines += loaders.table(rows)
    if quantizers:
        names = "| string | scales that differ | elements that differ | of them under equal scales |"
        lines += ["", "Quantizers of N(0, 1), ours and compressed-tensors':", "", names, "| --- | --- | --- | --- |"]
        lines += quantizers
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
