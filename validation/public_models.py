"""Quantize public models without changes, train each for some steps and print the tables.

    python validation/public_models.py [--models lm1b,...] [--out FILE.md] NAME=FOLDER...

NAME=FOLDER are checkouts: flax, nanodo, big_vision, vmoe, vision_transformer, bonsai. A model whose checkout is not
passed is skipped. The environment needs the packages that the models import: dm-haiku, equinox, einops, ml_collections,
clu, absl-py, scipy, tensorflow-cpu, pillow, tqdm, qwix; ``hf_bert`` and ``hf_gpt2`` need transformers 4.46.3. Every
model runs in a subprocess (``validation/public/run.py``).

The first table is for ``jaxquant.quantize(loss, ...)``. The columns of this table are the number of quantized matmuls
with parameters, the share of the step's FLOPs with 8-bit operands, the reasons for float matmuls, the final losses of
the quantized and the float model on the same batches, how many amax histories changed, the result of
``Coverage.check``, and whether converted parameters compute the same bits. The second table is for the model that
``maybe_quantize_model`` returns, in the training loop of the model's framework.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxquant import terminal

ROOT = pathlib.Path(__file__).resolve().parents[1]


MODELS: dict[str, tuple[str, ...]] = {
    "lm1b": ("flax",),
    "seq2seq": ("flax",),
    "nanodo": ("nanodo",),
    "big_vision_vit": ("big_vision",),
    "big_vision_gemma": ("big_vision",),
    "vmoe": ("vmoe", "vision_transformer"),
    "hf_bert": (),
    "hf_gpt2": (),
    "nnx_gemma": ("flax",),
    "mnist": ("flax",),
    "bonsai_qwen3": ("bonsai",),
    "bonsai_vit": ("bonsai",),
    "haiku_mlp": (),
    "equinox_mlp": (),
    "qwix_lora": (),
}
"""Name of a model's function in ``validation/public/models.py`` -> checkouts that the model needs."""


def rows_of(name: str, checkouts: list[str]) -> Iterator[dict[str, Any]]:
    """Run a model and yield its table rows as soon as they arrive, or one row with an error message."""
    errors: list[str] = []
    command = [sys.executable, "-m", "validation.public.run", name, *checkouts]
    environ = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"} | os.environ
    has_rows = False
    with subprocess.Popen(
        command,
        env=environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True).start()
        for line in process.stdout:
            if line.startswith("ROW "):
                has_rows = True
                yield json.loads(line[4:])
    if not has_rows:
        told = [line.strip() for line in errors if "Error" in line]
        yield {"model": name, "recipe": "float", "error": "".join(told[-1:])[:600]}


def write_functions(rows: list[dict[str, Any]]) -> str:
    """Return the table for ``jaxquant.quantize`` in Markdown."""
    lines = [
        "| model | recipe | matmuls quantized | FLOPs | float, and why | loss (float) | state | check() | served |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    floats = {row["model"]: row.get("loss", math.nan) for row in rows if row["recipe"] == "float"}
    for row in rows:
        begin = f"| {row['model']} | {row['recipe']} |"
        if "error" in row:
            lines.append(f"{begin} fails | | {row['error']} | | | | |")
        elif row["recipe"] != "float":
            why = Counter(reason for _, reason in row["why"])
            reasons = "; ".join(f"{count} {reason}" for reason, count in why.items()) or "-"
            state = f"{row['advanced']} of {row['histories']}" if row["histories"] else "none kept"
            losses = f"{row['loss']:.4f} ({floats.get(row['model'], math.nan):.4f})"
            cells = [f"{row['quantized']} of {row['all']}", f"{row['share']:.1%}", reasons, losses, state]
            cells += [row["check"], row["served"]]
            lines.append(f"{begin} {' | '.join(cells)} |")
    return "\n".join(lines).replace("\u2026", "...")


def write_faces(rows: list[dict[str, Any]]) -> str:
    """Return the table for ``maybe_quantize_model`` in Markdown."""
    lines = ["| model | recipe | matmuls quantized | FLOPs | float | loss | check() |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        face = row.get("face")
        if face is None:
            continue
        begin = f"| {row['model']} | {row['recipe']} |"
        if "error" in face:
            lines.append(f"{begin} fails | | {face['error']} | | |")
            continue
        same = " (the same)" if face.get("loss") == row.get("loss") else ""
        cells = [f"{face['quantized']} of {face['all']}", f"{face['share']:.1%}", ", ".join(face["float"]) or "-"]
        cells += [f"{face['loss']:.4f}{same}", face["check"]]
        lines.append(f"{begin} {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the arguments and run the models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=pathlib.Path, help="file for the tables")
    options = parser.parse_args()
    terminal.accept_all_characters()
    folders = dict(each.split("=", 1) for each in options.checkouts)
    checkouts = [f"{name}={pathlib.Path(folder).resolve()}" for name, folder in folders.items()]
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        if missing := [each for each in MODELS[name] if each not in folders]:
            print(f"{name}: skipped, no checkout of {missing[0]}")
            continue
        for row in rows_of(name, checkouts):
            print(name, row["recipe"], row.get("error", "done"), flush=True)
            rows.append(row)
    text = f"{write_functions(rows)}\n\n{write_faces(rows)}\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
