"""Commands that compile programs for chips that are not here; each prints a table, and writes it to ``--out``."""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxquant.aot import report
from jaxquant.aot.chips import CHIPS, chip
from jaxquant.aot.command import print_and_write
from jaxquant.aot.topology import environment, require_compiler
from jaxquant.bench import layer_audits, speeds, strings
from jaxquant.bench.schedules import tpu_dump
from jaxquant.config.recipes import RECIPES

Options = argparse.Namespace
Table = tuple[str, Any, str]
"""Text, rows and file stem of a table."""


def add_commands(commands: Any) -> None:
    """Add a parser of each command, whose ``run`` takes the options and returns the exit code.

    Args:
      commands: subparsers of ``python -m jaxquant.bench``.
    """
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", default="", metavar="FOLDER", help="to write JSON and markdown to (default: none)")
    for name, (table, about) in COMMANDS.items():
        command = commands.add_parser(name, parents=[shared], help=about)
        chips = [each for each in CHIPS if table is not _kernels or CHIPS[each].platform == "tpu"]
        default = "v6e" if table is _kernels else "h200"
        command.add_argument("--target", default=default, choices=chips, help="chip (default: %(default)s)")
        if table is not _kernels:
            command.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows named so")
        if table in (_libraries, _layers):
            command.add_argument("--tokens", type=int, default=4096, metavar="N", help="(default: %(default)s)")
        command.set_defaults(run=functools.partial(_compile, table))


def _compile(table: Callable[[Options], Table], options: Options) -> int:
    require_compiler(chip(options.target))
    text, rows, stem = table(options)
    return print_and_write(text, json.dumps(rows, indent=1) + "\n", options.out, stem)


def _libraries(options: Options) -> Table:
    rows = _run("compare_libraries", [options.target, str(options.tokens), *options.only])
    title = f"# One MLP step on {options.target}, {options.tokens} tokens"
    tokens = "" if options.tokens == 4096 else f"-{options.tokens}"
    return _page(title, rows), rows, f"audit-yardstick-{options.target}{tokens}"


def _published(options: Options) -> Table:
    rows = _run("published", options.only)
    return _page("# Predicted and published ratios", rows), rows, "audit-anchors"


def _gemm_set(options: Options) -> Table:
    rows = _run("published", [options.target, *options.only])
    title = f"# The GEMM set of a layer on {options.target}, forward and both gradients"
    return _page(title, rows), rows, f"audit-gemm-set-{options.target}"


def _kernels(options: Options) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        rows = _run("kernel_table", [options.target, str(notes)], tpu_dump(notes))
    return _page(f"# Kernels as compiled for {options.target}", rows), rows, f"kernels-{options.target}"


def _strings(options: Options) -> Table:
    known = {row["quantization"]: row for row in _there(options, "strings-chips")}
    for string, cell in _run("strings", [options.target, *options.only]).items():
        row = known.setdefault(string, {"quantization": string})
        row |= {"backend": RECIPES[string].auto, options.target: cell}
    ordered = sorted(known.values(), key=lambda row: list(RECIPES).index(row["quantization"]))
    return strings.page(ordered), ordered, "strings-chips"


def _speeds(options: Options) -> Table:
    found = _run("speeds", [options.target, *options.only], shows=True)
    rows = speeds.merged(_there(options, "strings-speed"), options.target, found)
    if options.out:
        speeds.fill(rows)
    return speeds.page(rows), rows, "strings-speed"


def _layers(options: Options) -> Table:
    rows = _there(options, "layer-audits")
    names = [name for name in layer_audits.LAYERS if name in options.only] or [""]
    chosen = [each for each in options.only if each in layer_audits.STRINGS]
    for name in names:
        found = _run("layer_audits", [options.target, str(options.tokens), name, *chosen], shows=True)
        new = {(row["layer"], row["chip"], row["string"]) for row in found}
        rows = [row for row in rows if (row["layer"], row["chip"], row["string"]) not in new] + found
    rows = layer_audits.with_ratios(rows)
    return layer_audits.page(rows), rows, "layer-audits"


COMMANDS: dict[str, tuple[Callable[[Options], Table], str]] = {
    "libraries": (_libraries, "one MLP step of jaxquant, flax, Qwix and AQT"),
    "published": (_published, "estimates next to published ratios"),
    "gemm-set": (_gemm_set, "the matmuls of a layer under config strings"),
    "kernels": (_kernels, "the hand-written kernels of a TPU, by their bundles"),
    "strings": (_strings, "every config string; adds the chip's column to the table in --out"),
    "speeds": (_speeds, "the MLP step by config string; the same, and fills jaxquant/config/speeds.py with --out"),
    "layers": (_layers, "decoder layers; adds rows to the table in --out"),
}


def _there(options: Options, stem: str) -> list[dict[str, Any]]:
    """Return the rows of an existing table, for all chips."""
    file = Path(options.out or ".") / f"{stem}.json"
    return json.loads(file.read_text()) if options.out and file.exists() else []


def _page(title: str, rows: list[dict[str, Any]]) -> str:
    return "\n".join([title, "", *report.table(rows), ""])


def _run(module: str, words: Sequence[str], variables: Mapping[str, str] | None = None, shows: bool = False) -> Any:
    """Run a module in a subprocess with the environment that compilers of absent chips need.

    ``shows``: whether its progress and errors are printed.
    """
    command = [sys.executable, "-m", f"jaxquant.bench.{module}", *words]
    variables, errors = environment() | dict(variables or {}), None if shows else subprocess.PIPE
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        raise RuntimeError(f"jaxquant.bench.{module} failed:\n{(done.stderr or '')[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
