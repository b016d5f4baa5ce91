"""Quantize public models, unedited, train each for some steps and print the tables.

    python scripts/public_models.py [--models lm1b,...] [--recipes fp8,...] [--steps 50] [--out FILE.md] NAME=FOLDER...

NAME=FOLDER are checkouts: flax, nanodo, big_vision, vmoe, vision_transformer, bonsai; a model without its checkout
is left out. Environments for what models import are made under ``--environments`` (a venv each, from PyPI). Every model
runs in a process of its own (``scripts/public/run.py``); ``--json`` keeps what each of them printed.

What a row of the first table says of ``jaxquant.quantize(loss, ...)``: how many matmuls with parameters are quantized,
which share of the step's FLOPs has operands of 8 bits, and why the other matmuls are not; the loss after the steps
beside that of the float model, on the same batches; whether every amax history has moved; what ``Coverage.check``
says; whether converted parameters give the trained bits. The second one is of the model that ``maybe_quantize_model``
returns, in its framework's own training loop.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import subprocess
import threading
import venv
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxquant import terminal

RECIPES = ("float", "fp8", "int8", "fp8_current", "fp8_full")
ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = {
    "plain": [
        "dm-haiku",
        "equinox",
        "einops",
        "ml_collections",
        "clu",
        "absl-py",
        "scipy",
        "tensorflow-cpu",
        "pillow",
        "tqdm",
    ],
    "hf": ["transformers==4.46.3"],
}
"""What each environment has beside jaxquant's own requirements."""


class Model(NamedTuple):
    """Where a model comes from: its module in scripts/public, its environment, and the checkouts that it needs."""

    module: str
    environment: str = "plain"
    checkouts: tuple[str, ...] = ()


MODELS = {
    "lm1b": Model("linen", checkouts=("flax",)),
    "seq2seq": Model("linen", checkouts=("flax",)),
    "nanodo": Model("linen", checkouts=("nanodo",)),
    "big_vision_vit": Model("linen", checkouts=("big_vision",)),
    "big_vision_gemma": Model("linen", checkouts=("big_vision",)),
    "vmoe": Model("linen", checkouts=("vmoe", "vision_transformer")),
    "hf_bert": Model("linen", "hf"),
    "hf_gpt2": Model("linen", "hf"),
    "nnx_gemma": Model("others", checkouts=("flax",)),
    "mnist": Model("others", checkouts=("flax",)),
    "bonsai_qwen3": Model("others", checkouts=("bonsai",)),
    "bonsai_vit": Model("others", checkouts=("bonsai",)),
    "haiku_mlp": Model("others"),
    "equinox_mlp": Model("others"),
    "qwix_lora": Model("others"),
}


def python_of(environment: str, folder: pathlib.Path) -> str:
    """Make an environment, once, and return its interpreter."""
    at = folder / environment
    python = at / "bin" / "python"
    if not python.exists():
        venv.create(at, with_pip=True)
        base = [str(ROOT), *PACKAGES[environment]]
        subprocess.run([python, "-m", "pip", "install", "-q", *base], check=True)
    return str(python)


def rows_of(name: str, recipes: list[str], python: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run a model; return its rows as they come, or one that says why there is none."""
    errors: list[str] = []
    command = [python, "-m", "scripts.public.run", name, MODELS[name].module]
    command += [",".join(recipes), options.faces, str(options.steps)]
    environ = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"} | os.environ
    has_rows = False
    with subprocess.Popen(
        [*command, *options.checkouts],
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


def read(file: pathlib.Path | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Read the rows that a file has, by model and recipe, but those that failed."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["model"], row["recipe"]): row for row in rows if "error" not in row}


def write_functions(rows: list[dict[str, Any]]) -> str:
    """Write the table of ``jaxquant.quantize``."""
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
            cells = [f"{row['quantized']} of {row['all']}", f"{row['share']:.1%}", reasons, "-", "-", row["check"], "-"]
            if row["steps"]:
                state = f"{row['advanced']} of {row['histories']}" if row["histories"] else "none kept"
                cells[3:5] = f"{row['loss']:.4f} ({floats.get(row['model'], math.nan):.4f})", state
                cells[6] = row["served"]
            lines.append(f"{begin} {' | '.join(cells)} |")
    return "\n".join(lines).replace("\u2026", "...")


def write_faces(rows: list[dict[str, Any]]) -> str:
    """Write the table of ``maybe_quantize_model``."""
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
        cells += [f"{face['loss']:.4f}{same}" if row["steps"] else "-", face["check"]]
        lines.append(f"{begin} {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the arguments; run the models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--faces", default=",".join(RECIPES[1:]), help="recipes for maybe_quantize_model")
    parser.add_argument("--steps", type=int, default=50, help="0 traces alone (default: %(default)s)")
    parser.add_argument("--environments", type=pathlib.Path, default=ROOT / ".environments")
    parser.add_argument("--python", default="", help="an interpreter to use for all models instead of environments")
    parser.add_argument("--json", type=pathlib.Path, help="file of rows; only those are run that it has not")
    parser.add_argument("--out", type=pathlib.Path, help="file of the tables")
    options = parser.parse_args()
    terminal.accept_all_characters()
    folders = dict(each.split("=", 1) for each in options.checkouts)
    options.checkouts = [f"{name}={pathlib.Path(folder).resolve()}" for name, folder in folders.items()]
    rows = read(options.json)
    for name in options.models.split(","):
        if missing := [each for each in MODELS[name].checkouts if each not in folders]:
            print(f"{name}: left out, no checkout of {missing[0]}")
            continue
        recipes = [each for each in options.recipes.split(",") if (name, each) not in rows]
        if not recipes:
            continue
        python = options.python or python_of(MODELS[name].environment, options.environments)
        for row in rows_of(name, recipes, python, options):
            print(name, row["recipe"], row.get("error", "done"), flush=True)
            rows[name, row["recipe"]] = row
            if options.json:
                with options.json.open("a") as kept:
                    kept.write(json.dumps(row) + "\n")
    order = list(MODELS)
    found = sorted(rows.values(), key=lambda row: order.index(row["model"]))
    text = f"{write_functions(found)}\n\n{write_faces(found)}\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
