"""Tables of programs that are compiled for chips that this machine does not have."""

from __future__ import annotations

import dataclasses
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
from jaxquant.bench.schedules import dump_environment
from jaxquant.config.recipes import RECIPES

Table = tuple[str, Any, str]
"""Text, rows and file stem of a table."""
TPUS = tuple(name for name, each in CHIPS.items() if each.platform == "tpu")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a command.

    Attributes:
      target: chip.
      only: names of the rows to compile; empty selects all rows.
      tokens: number of tokens of a step.
      out: folder of the files; "" writes no files.
    """

    target: str
    only: Sequence[str]
    tokens: int
    out: str


def compile_table(name: str, options: Options) -> int:
    """Compile the rows of a table, print it and write it; returns 0."""
    require_compiler(chip(options.target))
    text, rows, stem = TABLES[name](options)
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
        rows = _run("kernel_table", [options.target, str(notes)], dump_environment(notes))
    return _page(f"# Kernels as compiled for {options.target}", rows), rows, f"kernels-{options.target}"


def _strings(options: Options) -> Table:
    known = {row["quantization"]: row for row in _existing_rows(options, "strings-chips")}
    for string, cell in _run("strings", [options.target, *options.only]).items():
        row = known.setdefault(string, {"quantization": string})
        row |= {"backend": RECIPES[string].auto, options.target: cell}
    ordered = sorted(known.values(), key=lambda row: list(RECIPES).index(row["quantization"]))
    return strings.page(ordered), ordered, "strings-chips"


def _speeds(options: Options) -> Table:
    found = _run("speeds", [options.target, *options.only], shows=True)
    rows = speeds.merge_speeds(_existing_rows(options, "strings-speed"), options.target, found)
    if options.out:
        speeds.write_speeds(rows)
    return speeds.page(rows), rows, "strings-speed"


def _layers(options: Options) -> Table:
    rows = _existing_rows(options, "layer-audits")
    names = [name for name in layer_audits.LAYERS if name in options.only] or [""]
    chosen = [each for each in options.only if each in layer_audits.STRINGS]
    for name in names:
        found = _run("layer_audits", [options.target, str(options.tokens), name, *chosen], shows=True)
        new = {(row["layer"], row["chip"], row["string"]) for row in found}
        rows = [row for row in rows if (row["layer"], row["chip"], row["string"]) not in new] + found
    rows = layer_audits.with_ratios(rows)
    return layer_audits.page(rows), rows, "layer-audits"


TABLES: dict[str, Callable[[Options], Table]] = {
    "libraries": _libraries,
    "published": _published,
    "gemm-set": _gemm_set,
    "kernels": _kernels,
    "strings": _strings,
    "speeds": _speeds,
    "layers": _layers,
}


def _existing_rows(options: Options, stem: str) -> list[dict[str, Any]]:
    """Return the rows of the existing table, for all chips; [] if there is no table."""
    file = Path(options.out or ".") / f"{stem}.json"
    return json.loads(file.read_text()) if options.out and file.exists() else []


def _page(title: str, rows: list[dict[str, Any]]) -> str:
    return "\n".join([title, "", *report.table(rows), ""])


def _run(module: str, words: Sequence[str], variables: Mapping[str, str] | None = None, shows: bool = False) -> Any:
    """Run a module in a subprocess with the environment variables that the compilers require.

    ``shows``: whether the module's progress and errors are printed.
    """
    command = [sys.executable, "-m", f"jaxquant.bench.{module}", *words]
    variables, errors = environment() | dict(variables or {}), None if shows else subprocess.PIPE
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        raise RuntimeError(f"jaxquant.bench.{module} failed:\n{(done.stderr or '')[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
