"""The training program; see ``docs/guide/training.md``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

LIBRARIES = ("filelock", "grain", "plotly", "tensorboardX", "tokenizers")


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Turn the missing import of a library of the extra into an error that says how to install it.

    Raises:
      ValueError: one of ``LIBRARIES`` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in LIBRARIES:
            raise
        fix = "run pip install 'jaxquant[train]' (in a checkout: pip install -e '.[train]')"
        raise ValueError(f"{package} is not installed; {fix}") from None
