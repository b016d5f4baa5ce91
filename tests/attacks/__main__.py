"""``python -m tests.attacks ATTACK``: attack what jaxquant reads and writes, and say what came of it, as JSON.

``configs`` and ``manifests`` are mutated, ``flips`` changes single bits in every file of a small run and its exports,
two ``writers`` start on one folder, the ``disk`` of a run fills up (which needs the right to mount a file system). None
of it is part of the test suite but a few of the first two; figures are in ``benchmarks/reliability.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile

COUNTS = {"configs": 50_000, "manifests": 5_000, "flips": 300, "writers": 20, "disk": 20}
STEPS = 16


def main() -> int:
    """Attack; 0 where everything held, 1 where something did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__.splitlines()[0])
    parser.add_argument("attack", choices=list(COUNTS))
    parser.add_argument("--count", type=int, help=f"(default: {COUNTS})")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    count = words.count or COUNTS[words.attack]
    if words.attack in ("configs", "manifests"):
        from tests.attacks import inputs

        attack = {"configs": inputs.attack_configs, "manifests": inputs.attack_manifests}[words.attack]
        tally = attack(count, words.seed)
        found = vars(tally) | {"peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
        print(json.dumps(found, indent=1))
        return bool(tally.wrong)
    with tempfile.TemporaryDirectory() as folder:  # programs are compiled once
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        from tests.attacks import runs

        with runs.whole_run(STEPS) as whole:
            if words.attack == "flips":
                found = runs.attack_flips(count, words.seed, whole)
            elif words.attack == "writers":
                found = runs.attack_writers(count, words.seed, whole, STEPS)
            else:
                found = runs.attack_disk(count, words.seed, whole, STEPS)
    print(json.dumps(found, indent=1))
    return bool(found.get("wrong") or found.get("silent"))


if __name__ == "__main__":
    sys.exit(main())
