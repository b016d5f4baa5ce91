"""``python -m tests.attacks ATTACK``: attack what jaxquant reads, and say what came of it, as JSON.

Configs, serving folders, configs of quantized checkpoints, and checkpoints of others are mutated. A few of each are
part of the test suite; figures are in ``benchmarks/reliability.md`` and ``benchmarks/exchange.md``.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys

from tests.attacks import exports, inputs, quantizations

ATTACKS = {
    "configs": (inputs.attack_configs, 50_000),
    "manifests": (inputs.attack_manifests, 5_000),
    "quantizations": (quantizations.attack_quantizations, 20_000),
    "exports": (exports.attack_exports, 70_000),
}


def main() -> int:
    """Attack; 0 where everything held, 1 where something did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__.splitlines()[0])
    parser.add_argument("attack", choices=list(ATTACKS))
    parser.add_argument("--count", type=int, help="default: 5,000 to 70,000")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    attack, count = ATTACKS[words.attack]
    tally = attack(words.count or count, words.seed)
    found = vars(tally) | {"peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    print(json.dumps(found, indent=1))
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
