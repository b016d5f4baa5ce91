"""Benchmark commands that run on this machine; each prints a table and writes it with date, machine and versions."""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxquant import terminal
from jaxquant.aot import report
from jaxquant.bench import fp4_losses, optimizer_losses, seeds
from jaxquant.bench.gpu import LIMIT, measure_gpu
from jaxquant.bench.on_chip import measure_strings
from jaxquant.bench.schemes import RESULTS, Row, schemes
from jaxquant.bench.steps import measure_losses, measure_steps
from jaxquant.training import needed

PACKAGES = ("jax", "jaxlib", "flax", "optax", "qwix", "aqtp", "numpy")


def add_commands(commands: Any) -> None:
    """Add a parser of each command, whose ``run`` takes the options and returns the exit code.

    Args:
      commands: subparsers of ``python -m jaxquant.bench``.
    """
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="(default: benchmarks/results)")
    chosen = argparse.ArgumentParser(add_help=False, parents=[out])
    chosen.add_argument("--strings", nargs="+", metavar="S", help="config strings (default: all)")
    chosen.add_argument("--backends", nargs="+", choices=("auto", "aqt", "qwix", "native"), help="default: all")

    gpu = commands.add_parser("gpu", parents=[out], help="all that is checked and timed on a GPU, in one process")
    gpu.add_argument("--small", action="store_true", help="sizes that a CPU runs; written as gpu-small-DEVICE.jsonl")
    gpu.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="of the run (default: %(default)s)")
    gpu.set_defaults(run=lambda given: measure_gpu(given.out, given.limit, given.small, environment))

    def add(name: str, about: str, measure: Callable[..., list[Row]], *words: str, parent: Any = chosen) -> Any:
        """Add a command that calls a function with the chosen schemes and with the options in ``words``."""

        def run(given: argparse.Namespace) -> int:
            first = [] if parent is out else [schemes(given.strings, given.backends)]
            return _tell(name, measure, [*first, *(getattr(given, word) for word in words)], given.out)

        command = commands.add_parser(name, parents=[parent], help=about)
        command.set_defaults(run=run)
        return command

    steps = add("steps", "step time of the quickstart model", measure_steps, "rounds")
    steps.add_argument("--rounds", type=int, default=30, help="steps of each (default: %(default)s)")
    losses = add("losses", "held-out losses of the quickstart model", measure_losses, "steps")
    losses.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    for name, about, bench in (
        ("fp4-losses", "held-out losses of FP4 schemes, by seed", fp4_losses),
        ("optimizer-losses", "held-out losses of optimizers' dtypes, by seed", optimizer_losses),
    ):
        compare = functools.partial(seeds.compare, bench.TRIALS, bench.RECORD, bench.STEPS)
        seeded = add(name, about, functools.update_wrapper(compare, seeds.compare), "only", parent=out)
        seeded.add_argument("--only", nargs="*", default=[], choices=bench.TRIALS, metavar="SCHEME", help="to train")
    add("against-cpu", "a layer under every config string, here and on a CPU", measure_strings)


def _tell(name: str, measure: Callable[..., list[Row]], args: Sequence[Any], folder: Path) -> int:
    """Print a table and write it; returns 1 if a note reports a wrong number."""
    with needed():
        rows = measure(*args)
    terminal.show_rows(rows, [name for name, value in rows[0].items() if isinstance(value, str)])
    about = " ".join((measure.__doc__ or "").partition("Args:")[0].split())
    for path in write(name, about, rows, folder):
        print(path)
    return int(any(str(row.get("note", "")).startswith("WRONG") for row in rows))


def write(name: str, about: str, rows: Sequence[Row], folder: Path) -> tuple[Path, Path]:
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
    text.write_text("\n".join([*lines, *report.table(list(rows))]) + "\n", encoding="utf-8")
    return data, text


def environment() -> Row:
    """Return date, machine and versions of the figures."""
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
    """Return the version of a package, or "–" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "–"
