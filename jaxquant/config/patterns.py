"""Compilation of the regular expressions in rules and checkpoint configs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable


@functools.lru_cache(maxsize=2**16)
def full_matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that returns a match if the pattern matches a complete text, or None.

    Raises:
      ValueError: the pattern is not a regular expression.
    """
    try:
        return re.compile(pattern).fullmatch
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
