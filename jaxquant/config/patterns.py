"""Regular expressions of rules and checkpoints, matched in a time that no pattern can blow up.

What a pattern means is what ``re`` says of it. The package ``regex`` matches it, which stops after a time.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable

import regex

from jaxquant.core.typed import show

MAX_CHARACTERS = 10_000
MAX_REPEATS = 10_000
"""Largest product of the counts of a pattern: ``regex`` writes ``a{9}`` out."""
_SECONDS = 0.2
_COUNT = re.compile(r"\{(\d{1,9})")


@functools.lru_cache(maxsize=2**16)
def compile_pattern(pattern: str, place: str, written: str = "") -> Callable[[str], bool]:
    """Return what tells whether a pattern matches all of a text.

    It raises ``ValueError`` for a text on which that takes too long.

    Args:
      pattern: the regular expression.
      place: where it stands, for errors.
      written: what stands there; the pattern itself if empty.

    Raises:
      ValueError: not a regular expression, or too large; names it, its place and what is wrong.
    """
    what = f"{place} {show(written or pattern)}"
    try:
        if len(pattern) > MAX_CHARACTERS:
            raise ValueError(f"it has {len(pattern):,} characters, of at most {MAX_CHARACTERS:,}")
        if math.prod(max(1, int(count)) for count in _COUNT.findall(pattern)) > MAX_REPEATS:
            raise ValueError(f"its counted repeats multiply to more than {MAX_REPEATS:,}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
            compiled = regex.compile(pattern)
    except (re.error, regex.error, OverflowError, ValueError) as error:
        raise ValueError(f"{what} is not a regular expression: {error}") from None
    except RecursionError:
        raise ValueError(f"{what} is not a regular expression: it is nested too deep") from None

    def matches(text: str) -> bool:
        try:
            return compiled.fullmatch(text, timeout=_SECONDS) is not None
        except TimeoutError:
            raise ValueError(
                f"{what} takes too long to compare with {show(text)}; write it without repeats inside repeats"
            ) from None

    return matches
