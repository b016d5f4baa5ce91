"""``python -m train`` in a checkout runs ``jaxquant train``, or the ``jaxquant`` command that the first word names."""

import sys

from jaxquant.cli import program, run

if __name__ == "__main__":
    words = sys.argv[1:]
    run(words if words and words[0] in program.commands else ["train", *words])
