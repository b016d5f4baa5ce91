"""``python -m jaxquant``: the same as the command ``jaxquant``."""

from jaxquant.cli import run

if __name__ == "__main__":
    run()
