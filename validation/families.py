#!/usr/bin/env python3
"""Import tiny models of all families, train one step, export them, load the exports elsewhere, and compare logits.

The models are written by ``family_models.py``. For each family: our logits against transformers'; one training step;
for each format, the loader's logits against our decoder's with the weights decoded from the same files; and a second
import and export, which must keep all elements. ``pip install -e '.[train,exchange]'`` installs the loaders. The table
is written to benchmarks/results/families.md.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from family_models import FAMILIES, HERE, LENGTH, write_family
from gguf import GGUFReader
from loaders import Logits, llama_cpp_logits, load_transformers, our_logits, relative, rounded_inputs, table, versions
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

BOUNDS = {"hf": 1e-4, "ct_w4a16": 1e-4, "ct_fp8_dynamic": 1e-4, "gguf_f16": 2e-2, "gguf_q8_0": 1e-1}
"""Bound on the largest |Δ logit| relative to the root mean square of the logits, by format.

Both sides compute in float32 from the same weights, where sums in another order differ by about 1e-6. llama.cpp rounds
the inputs of matmuls to float16 (gguf_f16) or to 8 bits (gguf_q8_0).
"""
INPUT_BOUND = 0.2
"""Bound on the same ratio if linear layers quantize their inputs: values near the middle of two codes differ."""
STRINGS = {"ct_fp8_dynamic": "fp8_full", "gguf_q8_0": "ggml_q8_0"}
"""Config string whose training forward pass has the weights of a format."""
SETTINGS: dict[str, Any] = {
    **{"dtype": "float32", "dataset": "text", "dataset_path": str(HERE.parent / "LICENSE"), "sequence_length": LENGTH},
    **{"batch_size": 8, "steps": 1, "warmup_steps_fraction": 0.0, "eval_batches": 1, "tensorboard": False},
}


def silent(*_: object) -> None:
    """Print nothing."""


def read_run(run: Path, step: int) -> tuple[Logits, dict[str, np.ndarray]]:
    """Return the logits function of a run's decoder, and its parameters by path."""
    stored = open_parameters(run, step, silent)
    params = map_by_path(lambda path, _: jnp.asarray(stored.read(f"params/{path}")), stored.shapes["params"])
    decoder = Decoder(decoder_of(stored.config)[1])
    logits = lambda tokens: np.asarray(decoder.apply({"params": params}, tokens[None])[0])  # noqa: E731
    return logits, {path: np.asarray(leaf) for path, leaf in leaves_by_path(params).items()}


def distance(theirs: Logits, ours: Logits, texts: np.ndarray) -> float:
    return max(relative(theirs(text), ours(text)) for text in texts)


def train_one_step(run: Path) -> tuple[str, bool]:
    """Train a run for one step; return the number of arrays that changed, and whether all arrays changed."""
    prepare(build(TrainConfig, load_yaml(run / "config.yml")), silent)()
    before, after = (read_run(run, step)[1] for step in (0, 1))
    still = [path for path in before if np.array_equal(before[path], after[path])]
    is_finite = all(np.isfinite(array).all() for array in after.values())
    note = f"{len(before) - len(still)} of {len(before)} arrays changed"
    return f"{note}, not {', '.join(still)}" if still else note, is_finite and not still


def compare_export(path: Path, format: str, texts: np.ndarray) -> tuple[float, str, bool]:
    """Return the distance of a loader's logits from ours with the same weights, a note, and whether it is in bounds."""
    if path.is_file():
        delta = distance(llama_cpp_logits(path), our_logits(open_gguf(path, has_tokenizer=False)), texts)
        return delta, "", delta < BOUNDS[format]
    folder = HfFolder(path)
    source = folder.source(has_tokenizer=False)
    delta = distance(load_transformers(path, quantizes_inputs=False)[0], our_logits(source), texts)
    inputs = rounded_inputs(folder) if format.startswith("ct_") else None
    if inputs is None:
        return delta, "", delta < BOUNDS[format]
    rounded = distance(load_transformers(path)[0], our_logits(source, inputs), texts)
    return delta, f"{rounded:.1e} with quantized inputs", delta < BOUNDS[format] and rounded < INPUT_BOUND


def read_tensors(path: Path) -> dict[str, tuple[bool, np.ndarray]]:
    """Return the tensors of a folder or GGUF file, and whether each holds elements, whose bytes are then returned."""
    if path.is_file():
        return {each.name: (each.tensor_type > 1, each.data.view(np.uint8)) for each in GGUFReader(path).tensors}
    found = {}
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
        last = max(float(np.max(np.abs(a - b) / np.maximum(np.abs(a), 1e-30))) for a, b in rest)
        notes.append(f"again{f' by {string}' if string else ''}: {codes} tensors differ, scales by {last:.0e}")
        ok &= not codes and last <= 2**-23 and before.keys() == after.keys()
    return "; ".join(notes), ok


def check_family(folder: Path, formats: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for the import, the step and each format of a family."""
    family, work = FAMILIES[folder.name], folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    texts, reference = np.load(folder / "tokens.npy"), np.load(folder / "logits.npy")

    def row(what: str, delta: float, note: str, ok: bool) -> dict[str, Any]:
        return {"family": folder.name, "part": what, "Δ logit / rms": f"{delta:.1e}", "note": note, "ok": ok}

    try:
        import_to_run(folder, work / "run", SETTINGS)
        ours = read_run(work / "run", 0)[0]
        delta = max(map(relative, map(ours, texts), reference))
        yield row("import", delta, "", delta < BOUNDS["hf"])
        yield row("step", math.nan, *train_one_step(work / "run"))
    except (ValueError, NotImplementedError) as error:
        yield row("import", math.nan, f"refused: {error}", False)
        return
    trained = read_run(work / "run", 1)[0]
    for format in formats:
        path, is_refused = work / format, format.startswith("gguf_") and "no_gguf" in family
        try:
            export_run(work / "run", path, format, say=silent, dtype="float32")
            delta, note, ok = compare_export(path, format, texts)
            if format == "hf":
                full = distance(load_transformers(path)[0], trained, texts)
                note, ok = f"{full:.1e} from the run", ok and full < BOUNDS["hf"]
            again, same = compare_again(path, format, work)
            yield row(format, delta, "; ".join(filter(None, (note, again))), ok and same and not is_refused)
        except (ValueError, NotImplementedError) as error:
            yield row(format, math.nan, f"refused: {error}", is_refused)


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
        if not (words.folder / name / "tokens.npy").exists():
            write_family(words.folder / name)
        for row in check_family(words.folder / name, words.formats):
            rows.append(row)
            print(" | ".join(str(value) for value in row.values()), flush=True)
    head = ["# families", "", f"{__doc__.splitlines()[0]} {versions()}.", ""]
    (HERE.parent / "benchmarks/results/families.md").write_text("\n".join([*head, *table(rows)]) + "\n", "utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
