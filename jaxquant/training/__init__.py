"""Training program; see ``docs/guide/training.md``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

LIBRARIES = ("filelock", "grain", "plotly", "tensorboardX", "tokenizers")


@contextlib.contextmanager
def report_missing_library() -> Iterator[None]:
    """Convert the import error of a missing extra dependency to an error with the install command.

    Raises:
      ValueError: one of ``LIBRARIES`` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in LIBRARIES:
            raise
        fix = "run pip install -e '.[train]' in a checkout of jaxquant"
        raise ValueError(f"{package} is not installed; {fix}") from None
