#!/usr/bin/env python3
"""Export a training run, or a converted checkpoint, to a folder or file that vLLM, SGLang, MAX or llama.cpp loads."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from jaxquant import terminal
from jaxquant.export import FORMATS, SHARD_BYTES
from train import extras, transfer_report
from train.exporting import CALIBRATION_BATCHES, export_run
from train.memory import peak_resident_bytes, return_large_blocks
from train.processes import check_devices


def main(arguments: Sequence[str] | None = None) -> int:
    """Export; 0 on success, 2 when it cannot be, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="scripts/export.py", description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="folder of a run, or a converted one")
    parser.add_argument("--out", required=True, metavar="PATH", help="folder, or GGUF file; it must not exist")
    parser.add_argument("--format", required=True, choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--step", type=int, metavar="N", help="of the run's checkpoint (default: the newest)")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="of what stays in float, in a folder (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-mb", type=int, default=SHARD_BYTES // 10**6, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--calibration-batches",
        type=int,
        default=CALIBRATION_BATCHES,
        metavar="N",
        help="held-out batches that give the scales of inputs, where the format stores them (default: %(default)s)",
    )
    words = parser.parse_args(arguments)
    return terminal.run(lambda: _export(words))


@extras.needed()
def _export(words: argparse.Namespace) -> int:
    began = time.perf_counter()
    return_large_blocks()
    check_devices()
    for name in ("shard_mb", "calibration_batches"):
        if getattr(words, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(words, name)} must be at least 1")
    with transfer_report.shown("exporting") as progress:
        export_run(
            words.checkpoint,
            words.out,
            words.format,
            step=words.step,
            dtype=words.dtype,
            shard_bytes=words.shard_mb * 10**6,
            calibration_batches=words.calibration_batches,
            say=lambda text: print(text, file=sys.stderr, flush=True),
            progress=progress,
        )
    seconds = time.perf_counter() - began
    print(f"{words.out}: {words.format}, {seconds:.1f} s, peak memory {peak_resident_bytes() / 1e6:.0f} MB.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
