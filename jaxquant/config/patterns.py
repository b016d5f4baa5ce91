"""Regular expressions of rules and of checkpoints' configs: Python's own."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable


@functools.lru_cache(maxsize=2**16)
def full_matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that returns a true value if a pattern matches all of a text.

    Raises:
      ValueError: it is not a regular expression.
    """
    try:
        return re.compile(pattern).fullmatch
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
