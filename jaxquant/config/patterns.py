"""Regular expressions of rules and of checkpoints' configs: Python's own, with a limit of length."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable

MAX_CHARACTERS = 1000


@functools.lru_cache(maxsize=2**16)
def full_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that checks whether a pattern matches all of a text.

    Raises:
      ValueError: it is no regular expression, or longer than ``MAX_CHARACTERS``.
    """
    if len(pattern) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(pattern):,} characters, of at most {MAX_CHARACTERS:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return lambda text: compiled.fullmatch(text) is not None
