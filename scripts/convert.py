#!/usr/bin/env python3
"""Convert a training run to a quantized checkpoint that serves, layer by layer in bounded memory."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxquant import terminal
from jaxquant.config.loader import parse_overrides
from train import extras
from train.conversion import CALIBRATION_BATCHES, convert_run
from train.memory import peak_resident_bytes, return_large_blocks
from train.processes import check_devices


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert a run; 0 on success, 2 when it cannot be, 1 when the output is closed, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="scripts/convert.py", description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="RUN", help="folder of a run, such as runs/demo/int8")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; it must not exist")
    parser.add_argument("--quantization", metavar="STRING", help="serve with this recipe and not the run's")
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint (default: the newest)")
    parser.add_argument(
        "--calibration-batches",
        type=int,
        default=CALIBRATION_BATCHES,
        metavar="N",
        help="held-out batches that give static scales where the run has none (default: %(default)s)",
    )
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="key=value",
        help="further fields of the quantization, such as quant_backend=native",
    )
    words = parser.parse_intermixed_args(arguments)
    return terminal.run(lambda: _convert(words))


@extras.needed()
def _convert(words: argparse.Namespace) -> int:
    began = time.perf_counter()
    return_large_blocks()
    check_devices()
    changes = parse_overrides(words.changes)
    if words.quantization is not None:
        changes["quantization"] = words.quantization
    if words.calibration_batches < 1:
        raise ValueError(f"--calibration-batches {words.calibration_batches} must be at least 1")
    made = convert_run(
        words.checkpoint,
        words.out,
        changes,
        step=words.step,
        calibration_batches=words.calibration_batches,
        say=lambda text: print(text, flush=True),
    )
    on_disk = sum(path.stat().st_size for path in Path(words.out).rglob("*") if path.is_file())
    print(
        f"{words.out}: step {made.step} of {words.checkpoint} in {made.config.quantization or 'rules'} on "
        f"{made.config.resolved_backend}, {len(made.layers)} kernels converted.\n"
        f"parameters {_mb(made.bytes_f32)} in float32, {_mb(made.bytes_bf16)} in bfloat16, "
        f"{_mb(made.bytes_quantized)} now; {_mb(on_disk)} on disk.\n"
        f"{time.perf_counter() - began:.1f} s, peak memory {_mb(peak_resident_bytes())}."
    )
    return 0


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


if __name__ == "__main__":
    sys.exit(main())
