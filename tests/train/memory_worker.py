"""Reads the parameters of a run under a limit of memory, for ``test_parameters.py``.

    python -m tests.train.memory_worker RUN_DIR LEAF SPARE

prints one JSON object: the sums of the slices of the leaf along its first axis, read one at a time with no more than
SPARE bytes beside what the process had before, and whether an array of the leaf's size could be made.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import numpy as np

from train.parameters import open_parameters


def data_bytes() -> int:
    """What RLIMIT_DATA counts: heap, stacks of threads and anonymous mappings."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def main(run_dir: str, path: str, spare: int) -> None:
    parameters = open_parameters(run_dir)
    parameters.read("params/small")  # what tensorstore starts up with is there before the measure
    leaf = parameters.stores[path]
    limit = data_bytes() + spare
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sums = [float(parameters.read(path, index).astype(np.float64).sum()) for index in range(leaf.shape[0])]
    try:
        fits = bool(np.ones(leaf.shape, np.float32).any())
    except MemoryError:
        fits = False
    print(json.dumps({"sums": sums, "leaf": 4 * leaf.size, "chunk": leaf.chunk_layout.read_chunk.shape, "fits": fits}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
