#!/usr/bin/env python3
"""Import tiny models of all families, train one step, export them, load the exports elsewhere, and compare logits.

The models are written by ``family_models.py``. For each family: our logits against transformers'; one training step;
for each format, the loader's logits against our decoder's with the weights decoded from the same files; and a second
import and export, which must keep all elements. ``pip install -e '.[train,exchange]'`` installs the loaders. The table
is written to benchmarks/results/families.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from family_models import FAMILIES, HERE, LENGTH, TABLE, write_family
from gguf import GGUFReader
from loaders import (
    Logits,
    in_bfloat16,
    llama_cpp_inputs,
    llama_cpp_logits,
    load_transformers,
    our_logits,
    rounded_inputs,
    table,
    versions,
)
from safetensors.torch import load_file

from jaxquant import terminal
from jaxquant.config.loader import load_yaml
from jaxquant.core.paths import leaves_by_path, map_by_path
from jaxquant.core.typed import build
from jaxquant.export import HfFolder, open_gguf
from jaxquant.training.config import TrainConfig
from jaxquant.training.conversion import open_parameters
from jaxquant.training.exporting import export_run
from jaxquant.training.importing import import_to_run
from jaxquant.training.loop import prepare
from jaxquant.training.model import Decoder
from jaxquant.training.step import decoder_of

BOUNDS = {"hf": 1e-4, "ct_w4a16": 1e-4, "ct_fp8_dynamic": 1e-4, "mxfp4": 1e-4, "gguf_f16": 1e-2, "gguf_q8_0": 5e-2}
"""Bound on |Δ logit| relative to the root mean square of the logits, by format.

Both sides compute in float32 from the same weights, where sums in another order differ by about 1e-6. llama.cpp rounds
the inputs of matmuls to float16 (gguf_f16, and the head in gguf_q8_0).
"""
SHARES = {"ct_fp8_dynamic": 0.1, "gguf_f16": 0.9, "gguf_q8_0": 0.1}
"""Share of the tokens to which the bound applies if the loader rounds inputs, which our side then rounds in the same way.

A value near the middle of two codes can get the other code, and a router can select another expert. Later tokens then
differ by the quantization noise.
"""
STRINGS = {"ct_fp8_dynamic": "fp8_full", "gguf_q8_0": "ggml_q8_0", "mxfp4": "mxfp4w"}
"""Config string whose training forward pass has the weights of a format."""
SETTINGS: dict[str, Any] = {
    **{"dtype": "float32", "dataset": "text", "dataset_path": str(HERE.parent / "LICENSE"), "sequence_length": LENGTH},
    **{"batch_size": 8, "steps": 1, "warmup_steps_fraction": 0.0, "eval_batches": 1, "tensorboard": False},
}


Result = tuple[float, str, bool]
"""Largest |Δ logit| relative to the root mean square, a note, and whether the check passes."""


def silent(*_: object) -> None:
    """Print nothing."""


def read_run(run: Path, step: int) -> tuple[Logits, dict[str, np.ndarray]]:
    """Return the logits function of a run's decoder, and its parameters by path."""
    stored = open_parameters(run, step, silent)
    params = map_by_path(lambda path, _: jnp.asarray(stored.read(f"params/{path}")), stored.shapes["params"])
    decoder = Decoder(decoder_of(stored.config)[1])
    logits = lambda tokens: np.asarray(decoder.apply({"params": params}, tokens[None])[0])  # noqa: E731
    return logits, {path: np.asarray(leaf) for path, leaf in leaves_by_path(params).items()}


def of_all(logits: Logits, texts: np.ndarray) -> np.ndarray:
    return np.stack([logits(text) for text in texts])


def compare(theirs: np.ndarray, ours: np.ndarray, bound: float, share: float = 1.0) -> Result:
    """Compare logits [B, S, V]; the bound applies to a share of the tokens."""
    tokens = np.abs(theirs - ours).max(-1) / np.sqrt(np.mean(ours**2))
    most = float(np.quantile(tokens, share))
    return float(tokens.max()), f"{most:.0e} in {share:.0%} of the tokens" if share < 1 else "", most < bound


def check_import(folder: Path) -> Result:
    """Import a model; compare the logits of the run with transformers', and the shape with the published config's."""
    import_to_run(folder, folder / "work/run", SETTINGS)
    ours = of_all(read_run(folder / "work/run", 0)[0], np.load(folder / "tokens.npy"))
    delta, _, ok = compare(np.load(folder / "logits.npy"), ours, BOUNDS["hf"])
    is_same = HfFolder(folder / "published").layout.shape == HfFolder(folder).layout.shape
    note = "" if is_same else "the config with published keys has another shape"
    return delta, note, is_same and ok


def check_step(folder: Path) -> Result:
    """Train the run for one step, which must change all arrays."""
    run = folder / "work/run"
    prepare(build(TrainConfig, load_yaml(run / "config.yml")), silent)()
    before, after = (read_run(run, step)[1] for step in (0, 1))
    still = [path for path in before if np.array_equal(before[path], after[path])]
    is_finite = all(np.isfinite(array).all() for array in after.values())
    note = f"{len(before) - len(still)} of {len(before)} arrays changed"
    return math.nan, f"{note}, not {', '.join(still)}" if still else note, is_finite and not still


def compare_export(path: Path, format: str, texts: np.ndarray) -> Result:
    """Compare a loader's logits with ours with the same weights."""
    bound, share = BOUNDS[format], SHARES.get(format, 1.0)
    if path.is_file():
        source = open_gguf(path, has_tokenizer=False)
        shape = dataclasses.replace(source.layout.shape, rope_truncate=True)  # llama.cpp rounds the bounds of YaRN
        source = dataclasses.replace(source, layout=dataclasses.replace(source.layout, shape=shape))
        ours = our_logits(source, llama_cpp_inputs(format))
        return compare(of_all(llama_cpp_logits(path), texts), of_all(ours, texts), bound, share)
    folder = HfFolder(path)
    source = folder.source(has_tokenizer=False)
    if format == "ct_w4a16":
        source = in_bfloat16(source, [module for module in source.layout.linears if ".experts." in module])
    theirs = load_transformers(path, quantizes_inputs=False)[0]
    delta, note, ok = compare(of_all(theirs, texts), of_all(our_logits(source), texts), bound)
    if share < 1:
        rounded = of_all(our_logits(source, rounded_inputs(folder)), texts)
        most, note, also = compare(of_all(load_transformers(path)[0], texts), rounded, bound, share)
        note, ok = f"with quantized inputs {most:.0e}, {note}", ok and also
    return delta, note, ok


def read_tensors(path: Path) -> dict[str, tuple[bool, np.ndarray]]:
    """Return the tensors of a folder or GGUF file, and whether each holds elements, whose bytes are then returned."""
    if path.is_file():
        floats = {each.name: each.data for each in GGUFReader(path).tensors}
        return {name: (x.dtype == np.uint8, x) for name, x in floats.items()}
    folder, found = HfFolder(path), {}
    if folder.quantization is not None and folder.config["quantization_config"]["quant_method"] == "mxfp4":
        # A block whose largest element is 3 has a second coding, with half the scale: its values are compared.
        source = folder.source(has_tokenizer=False)
        return {name: (True, source.read(name)) for name in source.layout.tensors}
    for name, x in load_file(path / "model.safetensors").items():
        is_code = x.element_size() == 1 or name.endswith("packed")
        found[name] = is_code, (x.contiguous().view(torch.uint8) if is_code else x.float()).numpy()
    return found


def compare_again(path: Path, format: str, work: Path) -> tuple[str, bool]:
    """Import an export and export it again, from a float run and from a run that is trained in the format.

    Returns:
      A note, and whether all elements are equal and all scales are equal up to the last bit.
    """
    notes, ok = [], True
    for string in dict.fromkeys(("", STRINGS.get(format, ""))):
        run, other = work / f"run{string}_{path.name}", work / f"again{string}_{path.name}"
        import_to_run(path, run, SETTINGS | {"quantization": string})
        export_run(run, other, format, say=silent, dtype="float32")
        before, after = read_tensors(path), read_tensors(other)
        codes = sum(not np.array_equal(x, after[name][1]) for name, (is_code, x) in before.items() if is_code)
        rest = [(x, after[name][1]) for name, (is_code, x) in before.items() if not is_code]
        last = max((float(np.max(np.abs(a - b) / np.maximum(np.abs(a), 1e-30))) for a, b in rest), default=0.0)
        notes.append(f"again{f' by {string}' if string else ''}: {codes} tensors differ, scales by {last:.0e}")
        ok &= not codes and last <= 2**-23 and before.keys() == after.keys()
    return "; ".join(notes), ok


def check_format(folder: Path, format: str) -> Result:
    """Export the trained run, load the export, and import it again; some formats must be refused."""
    run, path, texts = folder / "work/run", folder / "work" / format, np.load(folder / "tokens.npy")
    is_refused = format in FAMILIES[folder.name].get("refused", {})
    try:
        export_run(run, path, format, say=silent, dtype="float32")
    except (ValueError, NotImplementedError) as error:
        return math.nan, f"refused: {error}", is_refused
    delta, note, ok = compare_export(path, format, texts)
    if format == "hf":
        theirs, ours = load_transformers(path)[0], read_run(run, 1)[0]
        full, _, same = compare(of_all(theirs, texts), of_all(ours, texts), BOUNDS["hf"])
        note, ok = f"{full:.0e} from the run", ok and same
    again, same = compare_again(path, format, folder / "work")
    return delta, "; ".join(filter(None, (note, again))), ok and same and not is_refused


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the families; return 0 if every row is within its bound, 1 if not."""
    parser = argparse.ArgumentParser(prog="validation/families.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the models; missing ones are written")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, metavar="NAME", default=list(FAMILIES))
    parser.add_argument("--formats", nargs="+", choices=BOUNDS, metavar="F", default=list(BOUNDS))
    words = parser.parse_args(arguments)
    terminal.accept_all_characters()
    rows = []
    for name in words.families:
        folder = words.folder / name
        if not (folder / "tokens.npy").exists():
            write_family(folder)
        shutil.rmtree(folder / "work", ignore_errors=True)
        checks = {"import": check_import, "step": check_step}
        formats = [each for each in FAMILIES[name].get("formats", TABLE["formats"]) if each in words.formats]
        checks |= {format: functools.partial(check_format, format=format) for format in formats}
        if (own := FAMILIES[name].get("quantized")) in formats:
            checks["again"] = lambda folder, own=own: (math.nan, *compare_again(folder, own, folder / "work"))
        for part, check in checks.items():
            try:
                delta, note, ok = check(folder)
            except Exception as error:  # the other rows are still checked
                delta, note, ok = math.nan, f"{type(error).__name__}: {' '.join(str(error).split())}", False
            rows.append({"family": name, "part": part, "Δ logit / rms": f"{delta:.1e}", "note": note, "ok": ok})
            print(" | ".join(str(value) for value in rows[-1].values()), flush=True)
    head = ["# families", "", f"{__doc__.splitlines()[0]} {versions()}.", ""]
    (HERE.parent / "benchmarks/results/families.md").write_text("\n".join([*head, *table(rows)]) + "\n", "utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
