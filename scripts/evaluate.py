#!/usr/bin/env python3
"""Compare a run in float, as it was trained, and as it serves: held-out loss and next-token agreement in one table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxquant import terminal
from train import extras
from train.processes import check_devices
from train.serving import contenders, evaluate


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate; 0 on success, 2 when a folder cannot be read, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="scripts/evaluate.py", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run, such as runs/demo/int8")
    parser.add_argument("converted", nargs="*", metavar="DIR", help="folders that scripts/convert.py wrote")
    parser.add_argument("--batches", type=int, metavar="N", help="of held-out text (default: eval_batches of the run)")
    parser.add_argument("--out", metavar="FILE", help="write the rows as JSON, too")
    words = parser.parse_args(arguments)
    return terminal.run(lambda: _evaluate(words), interrupted="interrupted")


@extras.needed()
def _evaluate(words: argparse.Namespace) -> int:
    check_devices()
    if words.batches is not None and words.batches < 1:
        raise ValueError(f"--batches {words.batches} must be at least 1")
    rows = evaluate(contenders(words.run, words.converted), batches=words.batches)
    if words.out:
        Path(words.out).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    terminal.show_rows(rows, [*rows[0]][:3])
    return 0


if __name__ == "__main__":
    sys.exit(main())
