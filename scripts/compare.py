#!/usr/bin/env python3
"""Set training runs against each other: a table here, and one HTML page with curves, bytes and dtypes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxquant import terminal
from train import extras
from train.report import comparison_rows, load_runs, notes, render


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare runs; 0 on success, 2 when a run cannot be read."""
    parser = argparse.ArgumentParser(prog="scripts/compare.py", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, such as runs/quickstart-int8-native")
    parser.add_argument("--out", default="report.html", help="the page to write (default: %(default)s)")
    words = parser.parse_args(arguments)
    return terminal.run(lambda: _compare(words), interrupted="interrupted")


@extras.needed()
def _compare(words: argparse.Namespace) -> int:
    runs = load_runs(words.runs)
    rows = comparison_rows(runs)
    Path(words.out).parent.mkdir(parents=True, exist_ok=True)
    Path(words.out).write_text(render(runs), encoding="utf-8")
    terminal.show_rows(rows, [*rows[0]][:3])
    for note in notes(runs):
        print(note)
    print(f"Report: {words.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
