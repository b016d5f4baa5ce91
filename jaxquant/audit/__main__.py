"""``python -m jaxquant.audit --yardstick [--target h200]``: what a real compiler makes of quantized steps, no chip needed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jaxquant.audit.chips import CHIPS, chip
from jaxquant.audit.topology import environment, require_compiler

_INSIDE = "JAXQUANT_AUDIT_INSIDE"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxquant.audit", description=__doc__)
    parser.add_argument("--yardstick", action="store_true", help="the MLP step of jaxquant and its peers")
    parser.add_argument("--target", default="h200", choices=list(CHIPS), help="chip (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="yardstick entries whose name holds a NAME"
    )
    words = parser.parse_args(arguments)
    require_compiler(chip(words.target))
    if _INSIDE not in os.environ:
        command = [sys.executable, "-m", "jaxquant.audit", *(sys.argv[1:] if arguments is None else arguments)]
        return subprocess.run(command, env=environment() | {_INSIDE: "1"}).returncode
    from jaxquant.audit import yardstick

    rows = yardstick.rows(words.target, words.only)
    table = Table(*rows[0], title=f"MLP step on {words.target}")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
