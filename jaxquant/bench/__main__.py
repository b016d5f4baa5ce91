"""``python -m jaxquant.bench COMMAND``: what quantization costs and gains. ``benchmarks/README.md`` lists the results.

``gpu``, ``steps``, ``losses``, ``fp4-losses``, ``optimizer-losses`` and ``against-cpu`` measure on this machine. The
other commands compile programs for chips that are not here, with the compilers of the extras ``audit-gpu`` and
``audit-tpu``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxquant import terminal
from jaxquant.bench import absent, here


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 on success, 1 where a number is wrong, 2 where something does not run or compile."""
    parser = argparse.ArgumentParser(prog="python -m jaxquant.bench", description="What quantization costs and gains.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    here.add_commands(commands)
    absent.add_commands(commands)
    options = parser.parse_args(arguments)
    return terminal.run(lambda: options.run(options), also=(RuntimeError,), interrupted="interrupted")


if __name__ == "__main__":
    sys.exit(main())
