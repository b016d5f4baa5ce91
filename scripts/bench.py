#!/usr/bin/env python3
"""Measure what quantization costs and gains, in time (`gpu`, `steps`), numbers and loss.

`gpu` checks and times everything on a GPU in 330 seconds, and appends each figure to benchmarks/gpu-DEVICE.jsonl. The
others print a table and write it to benchmarks/NAME-DEVICE.{json,md} with date, machine and versions.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import fp4_losses, optimizer_losses
from benchmarks.gpu import LIMIT, measure_gpu
from benchmarks.on_chip import measure_strings
from benchmarks.schemes import ROOT, Row, Scheme, schemes
from benchmarks.seeds import compared
from benchmarks.steps import measure_losses, measure_steps
from jaxquant import terminal
from train import extras

QUICK_STRINGS = ("int8", "fp8", "fp8_full")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "qwix", "aqtp", "numpy")


def environment() -> Row:
    """Describe where and when the figures were taken."""
    device = jax.devices()[0].device_kind
    return {
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.device_count()} x {device}",
        "cpus": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "xla flags": os.environ.get("XLA_FLAGS", ""),
    }


def _version(package: str) -> str:
    """Return the version of a package; "–" where a library that is compared is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "–"


def write(name: str, about: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write figures as JSON and as a markdown table."""
    where = environment()
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{jax.devices()[0].device_kind.lower().replace(' ', '-')}"
    data, text = folder / f"{stem}.json", folder / f"{stem}.md"
    data.write_text(json.dumps({"name": name, "about": about, **where, "rows": list(rows)}, indent=1) + "\n")
    versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    machine = f"{where['device']}, {where['cpus']} CPUs, {where['platform']}, Python {where['python']}, {versions}"
    flags = f" XLA_FLAGS={where['xla flags']}" if where["xla flags"] else ""
    lines = [f"# {name}", "", about, "", f"{where['date']}, {machine}.{flags}", ""]
    lines += [_line(rows[0]), _line(["---"] * len(rows[0])), *(_line(row.values()) for row in rows)]
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [data, text]


def _line(cells: Any) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _show(rows: Sequence[Row]) -> None:
    terminal.show_rows(rows, [name for name, value in rows[0].items() if isinstance(value, str)])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench.py", description=__doc__.splitlines()[0])
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument("--out", default=str(ROOT / "benchmarks"), help="folder to write to (default: benchmarks)")
    shared = argparse.ArgumentParser(add_help=False, parents=[out])
    shared.add_argument("--strings", nargs="+", metavar="S", help="config strings (default: all)")
    shared.add_argument("--backends", nargs="+", choices=("auto", "aqt", "qwix", "native"), help="default: all")
    shared.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK_STRINGS)}, and few repetitions")
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("steps", parents=[shared], help="step time of the quickstart model")
    steps.add_argument("--rounds", type=int, default=30, help="steps of each (default: %(default)s)")
    losses = commands.add_parser("losses", parents=[shared], help="held-out losses of the quickstart model")
    losses.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    losses.add_argument(
        "--runs", default=str(ROOT / "runs" / "losses"), help="folder of the runs (default: runs/losses)"
    )
    for name, steps, trials, record, what in (
        ("fp4-losses", 300, fp4_losses.TRIALS, fp4_losses.RECORD, "FP4 schemes"),
        ("optimizer-losses", 1000, optimizer_losses.TRIALS, optimizer_losses.RECORD, "optimizers' dtypes"),
    ):
        seeded = commands.add_parser(name, parents=[out], help=f"held-out losses of {what}, by seed")
        seeded.add_argument("--steps", type=int, default=steps, help="(default: %(default)s)")
        seeded.add_argument("--only", nargs="*", default=[], choices=trials, metavar="SCHEME", help="(default: all)")
        seeded.add_argument("--seeds", type=int, help="of each scheme (default: three, of some one)")
        seeded.add_argument(
            "--record", default=str(record), help=f"JSON lines of runs (default: benchmarks/{name}.jsonl)"
        )
        seeded.add_argument("--runs", default=str(ROOT / "runs" / name), help=f"folder (default: runs/{name})")
    gpu = commands.add_parser("gpu", parents=[out], help="all that is checked and timed on a GPU, in one process")
    gpu.add_argument("--small", action="store_true", help="sizes that a CPU runs; written as gpu-small-DEVICE.jsonl")
    gpu.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="of the run (default: %(default)s)")
    commands.add_parser("strings", parents=[shared], help="a layer under every config string, here and on a CPU")
    return parser.parse_args(arguments)


def _measurements(words: argparse.Namespace) -> dict[str, tuple[Callable[..., Any], Callable[[], list[Row]]]]:
    """Return by command what measures, whose docstring is written with the figures, and its call."""
    quick = getattr(words, "quick", False)

    def chosen() -> list[Scheme]:
        return schemes(words.strings or (list(QUICK_STRINGS) if quick else None), words.backends)

    def seeded(bench: Any) -> list[Row]:
        given = (Path(words.record), Path(words.runs), words.steps, words.only, words.seeds)
        return compared(bench.table, bench.TRIALS, *given)

    return {
        "steps": (measure_steps, lambda: measure_steps(chosen(), 5 if quick else words.rounds)),
        "losses": (measure_losses, lambda: measure_losses(chosen(), words.steps, Path(words.runs))),
        "fp4-losses": (fp4_losses.table, lambda: seeded(fp4_losses)),
        "optimizer-losses": (optimizer_losses.table, lambda: seeded(optimizer_losses)),
        "strings": (measure_strings, lambda: measure_strings(chosen())),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 on success, 1 when a number is wrong, 2 when what was asked cannot be measured."""
    words = _parse(arguments)
    terminal.accept_all_characters()
    try:
        if words.command == "gpu":
            return measure_gpu(Path(words.out), words.limit, words.small, environment)
        described, measure = _measurements(words)[words.command]
        with extras.needed():
            rows = measure()
        _show(rows)
        about = " ".join((described.__doc__ or "").partition("Args:")[0].split())
        for path in write(words.command, about, rows, Path(words.out)):
            print(path)
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(words.command == "strings" and any(row["note"].startswith("WRONG") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
