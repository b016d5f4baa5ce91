"""What an export or import shows: progress while it runs, and a table of its tensors at the end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from jaxquant import terminal
from jaxquant.export import Row


@contextmanager
def shown(verb: str) -> Iterator[Any]:
    """Return a function to call with each row; a terminal shows the tensor at hand, and the end is a table of all.

    Layers that are alike stand in one line, with their number, their bytes together and the worst SQNR.
    """
    rows: list[Row] = []
    with Console(stderr=True).status(verb) as status:
        yield lambda row: (rows.append(row), status.update(f"{verb} {row.tensor}"))
    merged: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        merged.setdefault((re.sub(r"\.\d+\.", ".*.", row.tensor), row.format, row.shape), []).append(row)
    lines = [_line(name if len(group) > 1 else group[0].tensor, group) for (name, *_), group in merged.items()]
    count = sum(row.shape != () for row in rows)  # the tokenizer is not one
    total = dict.fromkeys(lines[0], "") | {"tensor": f"{count} tensors", "bytes": f"{sum(r.bytes for r in rows):,}"}
    terminal.show_rows([*lines, total], ["tensor", "format"])


def _line(name: str, group: Sequence[Row]) -> dict[str, str]:
    ratio = min(row.sqnr for row in group)
    return {
        "tensor": f"{name} ({len(group)})" if len(group) > 1 else name,
        "format": group[0].format,
        "shape": " x ".join(map(str, group[0].shape)),
        "bytes": f"{sum(row.bytes for row in group):,}",
        "SQNR dB": "exact" if ratio == math.inf else f"{ratio:.1f}",
    }
