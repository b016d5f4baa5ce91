"""What an export or import shows: progress while it runs, and a table of its tensors at the end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxquant import terminal
from jaxquant.export import Row


@contextmanager
def shown(verb: str) -> Iterator[Any]:
    """Return a function to call with each row; a terminal shows the tensor at hand, and the end is a table of all."""
    rows: list[Row] = []
    with Console(stderr=True).status(verb) as status:
        yield lambda row: (rows.append(row), status.update(f"{verb} {row.tensor}"))
    _show(rows)


def _grouped(rows: Sequence[Row]) -> list[Row]:
    """Merge the rows of layers that are alike: their count goes into the name, bytes add up, the worst SQNR stays."""
    merged: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        name = re.sub(r"\.\d+\.", ".*.", row.tensor)
        merged.setdefault((name, row.format, row.shape), []).append(row)
    return [
        group[0]._replace(
            tensor=group[0].tensor if len(group) == 1 else f"{name} ({len(group)})",
            bytes=sum(row.bytes for row in group),
            sqnr=min(row.sqnr for row in group),
        )
        for (name, *_), group in merged.items()
    ]


def _show(rows: Sequence[Row]) -> None:
    """Print a table of tensors: those of all layers in one line, with their bytes together and the worst SQNR."""
    table = Table()
    for name in ("tensor", "format", "shape", "bytes", "SQNR dB"):
        table.add_column(name, justify="left" if name in ("tensor", "format") else "right", no_wrap=True)
    for row in _grouped(rows):
        ratio = "exact" if row.sqnr == math.inf else "" if math.isnan(row.sqnr) else f"{row.sqnr:.1f}"
        table.add_row(row.tensor, row.format, " x ".join(map(str, row.shape)), f"{row.bytes:,}", ratio)
    total = sum(row.bytes for row in rows)
    table.add_section()
    table.add_row(f"{len(rows)} tensors", "", "", f"{total:,}", "")
    terminal.show(table)
