"""``python -m jaxquant``: the same as the command ``jaxquant``."""

import sys

from jaxquant.cli import main

if __name__ == "__main__":
    sys.exit(main())
