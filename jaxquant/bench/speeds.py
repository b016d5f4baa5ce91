"""Speed of ``compare_libraries``'s MLP step under each config string relative to bfloat16, at default settings.

Both times are estimates of the audit; none was measured (``on-chip.md`` has measurements). The table lists config
strings that quantize both operands of the forward matmul.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxquant.aot.chips import CHIPS, chip
from jaxquant.aot.price import estimate
from jaxquant.aot.report import table
from jaxquant.bench.compare_libraries import Setup, measure
from jaxquant.bench.schemes import Row, print_progress
from jaxquant.bench.strings import STRINGS
from jaxquant.config import speeds
from jaxquant.config.recipes import RECIPES

TRAINED = [
    each for each in STRINGS if (of := RECIPES[each].recipe) and of.resolve("fwd", "lhs") and of.resolve("fwd", "rhs")
]
"""Config strings that quantize both operands of the forward matmul."""


def measure_speeds(target: str, only: Sequence[str] = ()) -> dict[str, float | None]:
    """Return the estimated speedup of each config string on a chip, or None if it does not run on the chip.

    Args:
      target: chip, one of ``CHIPS``.
      only: config strings to measure; empty selects all.
    """

    def seconds(string: str) -> float:
        config = {"quantization": string} if string else {}
        return estimate(chip(target), measure(Setup(string, config), target)[0]).step

    plain, found = seconds(""), {}
    for string in only or TRAINED:
        try:
            found[string] = round(plain / seconds(string), 2)
        except NotImplementedError:
            found[string] = None
        print_progress(f"{string} on {target}: {found[string]}")
    return found


def merge_speeds(rows: Sequence[Row], target: str, found: dict[str, float | None]) -> list[Row]:
    """Return the rows of a table with the new speedups on a chip, in the order of the recipe table."""
    known = {row["quantization"]: row for row in rows}
    for string, speed in found.items():
        known.setdefault(string, {"quantization": string})[target] = speed
    order = [string for string in STRINGS if string in known]
    chips = [name for name in CHIPS if any(name in row for row in known.values())]
    return [{"quantization": name} | {each: known[name].get(each) for each in chips} for name in order]


def table_text(rows: Sequence[Row]) -> str:
    """Return the source text of the rows for ``jaxquant.config.speeds``."""
    cells = [
        ["string", *list(rows[0])[1:]],
        *(["-" if cell is None else str(cell) for cell in row.values()] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (zip(line, widths, strict=True) for line in cells)
    return "".join("  ".join(f"{cell:{width}}" for cell, width in line).rstrip() + "\n" for line in lines)


def write_speeds(rows: Sequence[Row]) -> None:
    """Write the rows into ``jaxquant/config/speeds.py``."""
    file = Path(speeds.__file__)
    file.write_text(file.read_text().replace(f'"""\\\n{speeds.TABLE}"""', f'"""\\\n{table_text(rows)}"""'))


def page(rows: Sequence[Row]) -> str:
    """Return the rows as a markdown page."""
    shown = [{name: "–" if cell is None else cell for name, cell in row.items()} for row in rows]
    return "\n".join(["# Speed of config strings", "", (__doc__ or "").strip(), "", *table(shown)]) + "\n"


if __name__ == "__main__":
    print(json.dumps(measure_speeds(sys.argv[1], sys.argv[2:])))
