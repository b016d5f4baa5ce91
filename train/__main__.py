"""``python -m train`` in a checkout: the training program, ``jaxquant.training``."""

import sys

from jaxquant.training.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
