#!/usr/bin/env python3
"""Import a Llama from a Hugging Face folder or a GGUF file: into a run that trains on, or a checkpoint that serves."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from jaxquant import terminal
from jaxquant.config.loader import parse_overrides
from train import extras, transfer_report
from train.importing import import_to_run, import_to_serve
from train.memory import peak_resident_bytes, return_large_blocks
from train.processes import check_devices


def main(arguments: Sequence[str] | None = None) -> int:
    """Import; 0 on success, 2 when it cannot be, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="scripts/import.py", description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="Hugging Face folder, or GGUF file")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; it must not exist")
    parser.add_argument(
        "--serve",
        action="store_true",
        help="write a converted checkpoint for scripts/serve.py; layers keep their elements and scales if they can",
    )
    parser.add_argument("changes", nargs="*", metavar="key=value", help="fields of the config, as of a training run")
    words = parser.parse_intermixed_args(arguments)
    return terminal.run(lambda: _import(words))


@extras.needed()
def _import(words: argparse.Namespace) -> int:
    began = time.perf_counter()
    return_large_blocks()
    check_devices()
    changes, run = parse_overrides(words.changes), import_to_serve if words.serve else import_to_run
    with transfer_report.shown("importing") as progress:
        run(words.checkpoint, words.out, changes, progress)
    seconds = time.perf_counter() - began
    print(f"{words.out}: {seconds:.1f} s, peak memory {peak_resident_bytes() / 1e6:.0f} MB.")
    if not words.serve:
        print(f"go on with: python -m train {words.out}/config.yml run_dir={words.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
