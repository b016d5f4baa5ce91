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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import loaders
import numpy as np
from family_models import FAMILIES, HERE, LENGTH, TABLE, write_family

from jaxquant import terminal
from jaxquant.config.loader import load_yaml
from jaxquant.core.paths import leaves_by_path, map_by_path
from jaxquant.core.typed import build
from jaxquant.export import HfFolder, Source, open_gguf
from jaxquant.training.config import TrainConfig
from jaxquant.training.conversion import open_parameters
from jaxquant.training.exporting import export_run
from jaxquant.training.importing import import_to_run
from jaxquant.training.loop import prepare
from jaxquant.training.model import Decoder
from jaxquant.training.step import decoder_of

FORMATS: dict[str, dict[str, Any]] = TABLE["formats"]
SETTINGS: dict[str, Any] = {
    **{"dtype": "float32", "dataset": "text", "dataset_path": str(HERE.parent / "LICENSE"), "sequence_length": LENGTH},
    **{"batch_size": 8, "steps": 1, "warmup_steps_fraction": 0.0, "eval_batches": 1, "tensorboard": False},
}


Result = tuple[float, str, bool]
"""Largest |Δ logit| relative to the root mean square, a note, and whether the check passes."""


def silent(*_: object) -> None:
    """Print nothing."""


def read_run(run: Path, step: int) -> tuple[loaders.Logits, dict[str, np.ndarray]]:
    """Return the logits function of a run's decoder, and its parameters by path."""
    stored = open_parameters(run, step, silent)
    params = map_by_path(lambda path, _: jnp.asarray(stored.read(f"params/{path}")), stored.shapes["params"])
    decoder = Decoder(decoder_of(stored.config)[1])
    logits = lambda tokens: np.asarray(decoder.apply({"params": params}, tokens[None])[0])  # noqa: E731
    return logits, {path: np.asarray(leaf) for path, leaf in leaves_by_path(params).items()}


def of_all(logits: loaders.Logits, texts: np.ndarray) -> np.ndarray:
    return np.stack([logits(text) for text in texts])


def compare(theirs: np.ndarray, ours: np.ndarray, bound: float, share: float = 1.0) -> Result:
    """Compare logits [B, S, V]; the bound applies to a share of the tokens."""
    tokens = np.abs(theirs - ours).max(-1) / np.sqrt(np.mean(ours**2))
    most = float(np.quantile(tokens, share))
    return float(tokens.max()), f"{most:.0e} in {share:.0%} of the tokens" if share < 1 else "", most < bound


def check_import(folder: Path) -> Result:
    """Import a model; compare the logits of the run with transformers'."""
    import_to_run(folder, folder / "work/run", SETTINGS)
    ours = of_all(read_run(folder / "work/run", 0)[0], np.load(folder / "tokens.npy"))
    delta, _, ok = compare(np.load(folder / "logits.npy"), ours, FORMATS["hf"]["bound"])
    return delta, "", ok


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
    bound, share = FORMATS[format]["bound"], FORMATS[format].get("share", 1.0)
    if path.is_file():
        source = open_gguf(path, has_tokenizer=False)
        shape = dataclasses.replace(source.layout.shape, rope_truncate=True)  # llama.cpp rounds the bounds of YaRN
        source = dataclasses.replace(source, layout=dataclasses.replace(source.layout, shape=shape))
        ours = loaders.our_logits(source, loaders.llama_cpp_inputs(format))
        return compare(of_all(loaders.llama_cpp_logits(path), texts), of_all(ours, texts), bound, share)
    folder = HfFolder(path)
    source = folder.source(has_tokenizer=False)
    if format == "ct_w4a16":
        source = loaders.in_bfloat16(source, [module for module in source.layout.linears if ".experts." in module])
    theirs = loaders.load_transformers(path, quantizes_inputs=False)[0]
    delta, note, ok = compare(of_all(theirs, texts), of_all(loaders.our_logits(source), texts), bound)
    if share < 1:
        rounded = of_all(loaders.our_logits(source, loaders.rounded_inputs(folder)), texts)
        most, note, also = compare(of_all(loaders.load_transformers(path)[0], texts), rounded, bound, share)
        note, ok = f"with quantized inputs {most:.0e}, {note}", ok and also
    return delta, note, ok


def open_export(path: Path) -> tuple[Source, Callable[[str], Any]]:
    """Return the model of an export, and a function from the name of a linear layer to its stored elements, or None."""
    if path.is_file():
        source = open_gguf(path, has_tokenizer=False)
        return source, lambda module: getattr(source.quantized(module), "qvalue", None)
    folder = HfFolder(path)
    return folder.source(has_tokenizer=False), lambda module: getattr(folder.layer(module), "elements", None)


def compare_again(path: Path, format: str, work: Path) -> tuple[str, bool]:
    """Import an export and export it again, from a float run and from a run that is trained in the format.

    All elements must be equal, and all values up to the last bit of the scales. Elements may differ if all values are
    equal: a block of MXFP4 whose largest element is 3 has a second coding, with half the scale.
    """
    (source, elements), notes, ok = open_export(path), [], True
    for string in dict.fromkeys(("", FORMATS[format].get("string", ""))):
        run, out = work / f"run{string}_{path.name}", work / f"again{string}_{path.name}"
        import_to_run(path, run, SETTINGS | {"quantization": string})
        export_run(run, out, format, say=silent, dtype="float32")
        other, other_elements = open_export(out)
        differ = sum(not np.array_equal(elements(name), other_elements(name)) for name in source.layout.linears)
        pairs = ((source.read(name), other.read(name)) for name in source.layout.tensors)
        delta = max(float(np.max(np.abs(a - b) / np.maximum(np.abs(a), 1e-30))) for a, b in pairs)
        notes.append(
            f"again{f' by {string}' if string else ''}: elements of {differ} layers differ, values by {delta:.0e}"
        )
        ok &= delta <= 2**-22 and (not differ or delta == 0)
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
        theirs, ours = loaders.load_transformers(path)[0], read_run(run, 1)[0]
        full, _, same = compare(of_all(theirs, texts), of_all(ours, texts), FORMATS["hf"]["bound"])
        note, ok = f"{full:.0e} from the run", ok and same
    again, same = compare_again(path, format, folder / "work")
    return delta, "; ".join(filter(None, (note, again))), ok and same and not is_refused


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the families; return 0 if every row is within its bound, 1 if not."""
    parser = argparse.ArgumentParser(prog="validation/families.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the models; missing ones are written")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, metavar="NAME", default=list(FAMILIES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, metavar="F", default=list(FORMATS))
    words = parser.parse_args(arguments)
    terminal.accept_all_characters()
    rows = []
    for name in words.families:
        folder = words.folder / name
        if not (folder / "tokens.npy").exists():
            write_family(folder)
        shutil.rmtree(folder / "work", ignore_errors=True)
        checks = {"import": check_import, "step": check_step}
        formats = [each for each in FAMILIES[name].get("formats", TABLE["default"]) if each in words.formats]
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
    lines = ["# families", "", f"{__doc__.splitlines()[0]} {loaders.versions()}.", "", *loaders.table(rows), ""]
    (HERE.parent / "benchmarks/results/families.md").write_text("\n".join(lines), "utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
