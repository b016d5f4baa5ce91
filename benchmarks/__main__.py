"""``python -m benchmarks WHAT``: programs compiled for absent chips, as tables.

``libraries``: one MLP step of jaxquant, flax, Qwix and AQT. ``published``: the programs beside published ratios.
``gemm-set``: the matmuls of a layer under config strings. ``kernels``: the hand-written kernels. ``strings`` (every
config string) and ``speeds`` (the MLP step under those that train; ``--out benchmarks`` also fills
``jaxquant/config/speeds.py``) add a column to the table that is there. ``layers`` (decoder layers) adds rows to it.
Each prints a table and writes it to ``--out`` as JSON and markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import layer_audits, speeds
from benchmarks.published import MISSING
from benchmarks.schedules import gpu_dump, tpu_dump
from jaxquant import terminal
from jaxquant.aot import report
from jaxquant.aot.__main__ import print_and_write
from jaxquant.aot.chips import CHIPS, chip
from jaxquant.aot.topology import environment, require_compiler
from jaxquant.config.recipes import RECIPES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 on success, 2 where something could not be compiled."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    commands = {"libraries": _libraries, "published": _published, "gemm-set": _gemm_set, "kernels": _kernels}
    commands |= {"strings": _strings, "speeds": _speeds, "layers": _layers}
    parser.add_argument("what", choices=commands)
    parser.add_argument("--target", default="h200", choices=list(CHIPS), help="chip (default: %(default)s)")
    parser.add_argument("--out", default="", help="folder to write JSON and markdown to (default: none)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows named so (not of kernels)")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="of libraries (default: %(default)s)")
    options = parser.parse_args(arguments)

    def compare() -> int:
        require_compiler(chip(options.target))
        text, rows, stem = commands[options.what](options)
        return print_and_write(text, json.dumps(rows, indent=1) + "\n", options.out, stem)

    return terminal.run(compare, also=(RuntimeError,), interrupted="interrupted")


Table = tuple[str, Any, str]
"""Text, rows and the stem of the files' names."""


def _libraries(options: argparse.Namespace) -> Table:
    rows, notes = _run("compare_libraries", [options.target, str(options.tokens), *options.only])
    title = f"# One MLP step on {options.target}, {options.tokens} tokens"
    tokens = "" if options.tokens == 4096 else f"-{options.tokens}"
    return "\n".join([title, "", *report.table(rows), notes]), rows, f"audit-yardstick-{options.target}{tokens}"


def _published(options: argparse.Namespace) -> Table:
    rows = _run("published", options.only)
    missing = [{"anchor": who, "published": ratio, "not compiled here": what} for who, ratio, what in MISSING]
    text = "\n".join(["# Predicted and published ratios", "", *report.table(rows), "", *report.table(missing)])
    return text + "\n", rows, "audit-anchors"


def _gemm_set(options: argparse.Namespace) -> Table:
    rows = _run("published", [options.target, *options.only])
    title = f"# The GEMM set of a layer on {options.target}, forward and both gradients"
    return "\n".join([title, "", *report.table(rows), ""]), rows, f"audit-gemm-set-{options.target}"


def _strings(options: argparse.Namespace) -> Table:
    rows = _there(options, "strings-chips")  # with the columns of other chips
    known = {row["quantization"]: row for row in rows}
    cells = _run("strings", [options.target, *options.only])
    for string, cell in cells.items():
        row = known.setdefault(string, {"quantization": string})
        row |= {"backend": RECIPES[string].auto, options.target: cell}
    ordered = sorted(known.values(), key=lambda row: list(RECIPES).index(row["quantization"]))
    return strings_text(ordered), ordered, "strings-chips"


def _speeds(options: argparse.Namespace) -> Table:
    rows = _there(options, "strings-speed")  # with the columns of other chips
    rows = speeds.merged(rows, options.target, _run("speeds", [options.target, *options.only], shows=True))
    if options.out:
        speeds.fill(rows)
    return speeds.page(rows), rows, "strings-speed"


def _layers(options: argparse.Namespace) -> Table:
    rows = _there(options, "layer-audits")  # of other chips and strings
    names = [name for name in layer_audits.LAYERS if name in options.only] or [""]
    strings = [each for each in options.only if each in layer_audits.STRINGS]
    for name in names:
        found = _run("layer_audits", [options.target, str(options.tokens), name, *strings], shows=True)
        new = {(row["layer"], row["chip"], row["string"]) for row in found}
        rows = [row for row in rows if (row["layer"], row["chip"], row["string"]) not in new] + found
    rows = layer_audits.with_ratios(rows)
    return layer_audits.page(rows), rows, "layer-audits"


def _there(options: argparse.Namespace, stem: str) -> list[dict[str, Any]]:
    """Return the rows of the table that is there."""
    file = Path(options.out or ".") / f"{stem}.json"
    return json.loads(file.read_text()) if options.out and file.exists() else []


def strings_text(rows: list[dict[str, str]]) -> str:
    """Write the table of strings and chips; refusals stand in full below it."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    short = [{key: row.get(key, "").partition(":")[0] for key in columns} for row in rows]
    refused = sorted({cell for row in rows for cell in row.values() if cell.startswith("refused: ")})
    title = "# Every config string, compiled for chips that are not here"
    notes = "An MLP step with `quant_backend: auto`, and its matmuls as compiled; an empty cell was not compiled."
    return "\n".join([title, "", notes, "", *report.table(short), "", *(f"- {each}" for each in refused)]) + "\n"


def _kernels(options: argparse.Namespace) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        dump = gpu_dump(notes) if chip(options.target).platform == "cuda" else tpu_dump(notes)
        rows = _run("kernel_table", [options.target, str(notes)], dump)
    columns = dict.fromkeys(key for row in rows for key in row)
    whole = [{key: row.get(key, "") for key in columns} for row in rows]
    text = "\n".join([f"# Kernels as compiled for {options.target}", "", *report.table(whole)]) + "\n"
    return text, rows, f"kernels-{options.target}"


def _run(module: str, words: Sequence[str], variables: Mapping[str, str] | None = None, shows: bool = False) -> Any:
    """Run a module in a process of its own, whose environment the compilers of absent chips need.

    ``shows``: its progress, and its errors.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *words]
    errors = None if shows else subprocess.PIPE
    done = subprocess.run(
        command, env=environment() | dict(variables or {}), stdout=subprocess.PIPE, stderr=errors, text=True
    )
    if done.returncode:
        raise RuntimeError(f"benchmarks.{module} failed:\n{(done.stderr or '')[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
