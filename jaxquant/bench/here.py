"""Output of measurements on this machine: printed tables, and files with date, machine and versions."""

from __future__ import annotations

import datetime
import functools
import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxquant import terminal
from jaxquant.aot.report import table
from jaxquant.bench import seeds
from jaxquant.bench.schemes import Row

PACKAGES = ("jax", "jaxlib", "flax", "optax", "qwix", "aqtp", "numpy")


def report_losses(module: str, only: Sequence[str], folder: Path) -> int:
    """Train each scheme of a module with several seeds, and report the held-out losses."""
    bench = importlib.import_module(f"jaxquant.bench.{module}")
    measure = functools.partial(seeds.compare, bench.TRIALS, bench.RECORD, bench.STEPS)
    return report(module.replace("_", "-"), functools.update_wrapper(measure, seeds.compare), [only], folder)


def report(name: str, measure: Callable[..., list[Row]], args: Sequence[Any], folder: Path) -> int:
    """Print a table and write it with date, machine and versions; return 1 if a note reports a wrong number.

    Args:
      name: name of the table and of its files.
      measure: function that returns the rows.
      args: arguments of ``measure``.
      folder: folder of the files.
    """
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
    data, text = folder / f"{stem(name)}.json", folder / f"{stem(name)}.md"
    data.write_text(json.dumps({"name": name, "about": about, **where, "rows": list(rows)}, indent=1) + "\n")
    versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    machine = f"{where['device']}, {where['cpus']} CPUs, {where['platform']}, Python {where['python']}, {versions}"
    flags = f" XLA_FLAGS={where['xla flags']}" if where["xla flags"] else ""
    lines = [f"# {name}", "", about, "", f"{where['date']}, {machine}.{flags}", ""]
    text.write_text("\n".join([*lines, *table(list(rows))]) + "\n", encoding="utf-8")
    return data, text


def stem(name: str) -> str:
    """Return the file name of figures of this device, without a suffix."""
    return f"{name}-{jax.devices()[0].device_kind.lower().replace(' ', '-')}"


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
