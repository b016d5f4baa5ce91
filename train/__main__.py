"""``python -m train`` in a checkout: ``jaxquant train CONFIG``, or a command of ``jaxquant``."""

import sys

from jaxquant.cli import program, run

if __name__ == "__main__":
    words = sys.argv[1:]
    run(words if words and words[0] in program.commands else ["train", *words])
