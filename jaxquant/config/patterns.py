"""Regular expressions of rules, matched in a time that no pattern can blow up.

Python's own engine tries one way after the other, and ``(a|a)*b`` has 2ⁿ ways through n letters. Here every part of a
pattern takes the set of places at which it may begin to the set at which it may end. That costs at most the pattern's
size times the square of the path's length, so that none has to be refused for its looks: refusing nested repeats would
refuse harmless ones, and still let ``.*.*.*.*.*.*!`` through. Parts through which there is one way alone, such as
letters and classes, are matched by ``re``. What matches in full is what ``re`` says; what depends on the way is not
read: back-references, atomic groups, possessive repeats, conditions.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from re import _compiler, _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

MAX_CHARACTERS = 1000
_MAX_REPEATS = 4
"""Unbounded repeats of one pattern that Python's engine may try: each multiplies its ways by the text's length."""
_MAX_OPTIONS = 12
"""Branches and optional parts: each doubles them."""

_ONE_WAY = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "FAILURE")
"""Parts that end at one place at most: a character, none, or never."""
_TOO_DEEP = "it is nested too deep"
_MAX_DEPTH = 40
"""Groups within each other, about: how many more ``re`` and ``Pattern`` follow depends on Python and on who calls."""
_NO_GROUP = re.compile(r"\\.|\[\^?]?(?:\\.|[^]\\])*]", re.DOTALL)
"""What may hold a parenthesis that is no group: an escaped one, or one of a class."""
_UNREAD = {
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a condition",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}
_Step = Callable[[str, set[int]], set[int]]
"""A part of a pattern: (text, places where it may begin) -> places where it may end."""


class Pattern:
    """One compiled pattern.

    Raises:
      ValueError: it is no regular expression, too long, or of a part that is not read; says which.
    """

    def __init__(self, pattern: str):
        if len(pattern) > MAX_CHARACTERS:
            raise ValueError(f"it has {len(pattern):,} characters, of at most {MAX_CHARACTERS:,}")
        compiled, parts = _read(pattern)
        if compiled.flags & (re.ASCII | re.LOCALE | re.MULTILINE):
            raise ValueError("it has a flag that is not read; of flags (?i), (?s) and (?x) are")
        try:
            self._step = _in_turn(parts)
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None

    def fullmatch(self, text: str) -> bool:
        """Whether the pattern matches all of a text."""
        return len(text) in self._step(text, {0})


def _read(pattern: str) -> tuple[re.Pattern[str], Any]:
    """Return a pattern as ``re`` compiles it and as its parser gives its parts."""
    depths = itertools.accumulate((c == "(") - (c == ")") for c in _NO_GROUP.sub("", pattern))
    if max(depths, default=0) > _MAX_DEPTH:
        raise ValueError(f"{_TOO_DEEP}, of at most {_MAX_DEPTH} groups within each other")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern), _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _in_turn(parts: Any) -> _Step:
    """Return the step of parts that follow each other."""
    steps = [_step(parts, index) for index in range(len(parts))]

    def step(text: str, starts: set[int]) -> set[int]:
        for each in steps:
            starts = each(text, starts)
        return starts

    return step


def _step(parts: Any, index: int) -> _Step:
    """Return the step of one part."""
    name, value = str(parts[index][0]), parts[index][1]
    if name in _ONE_WAY:
        match = _compiler.compile(parts[index : index + 1]).match
        return lambda text, starts: {found.end() for start in starts if (found := match(text, start))}
    if name == "SUBPATTERN" and not (value[1] or value[2]):
        return _in_turn(value[-1])
    if name == "SUBPATTERN":
        raise ValueError("it has a flag inside a group, which rules do not read; put (?i) first")
    if name == "BRANCH":
        branches = [_in_turn(branch) for branch in value[1]]
        return lambda text, starts: set().union(*(branch(text, starts) for branch in branches))
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        return _repeat(value[0], value[1], _in_turn(value[2]))
    if name in ("ASSERT", "ASSERT_NOT"):
        return _look(name == "ASSERT", value[0], value[1])
    raise ValueError(f"it has {_UNREAD.get(name, name)}, which rules do not read")


def _repeat(least: int, most: int, inner: _Step) -> _Step:
    def step(text: str, starts: set[int]) -> set[int]:
        for _ in range(least):
            ends = inner(text, starts)
            if ends == starts:  # so it stays, however often
                break
            starts = ends
        found, new, count = set(starts), starts, least
        while new and count < most:  # an unbounded repeat has a number that no text reaches
            new = inner(text, new) - found
            found |= new
            count += 1
        return found

    return step


def _look(is_wanted: bool, direction: int, parts: Any) -> _Step:
    width = 0 if direction > 0 else parts.getwidth()[0]  # of one width, as the compiler checks
    inner = _in_turn(parts)

    def finds(text: str, start: int) -> bool:
        ends = inner(text, {start - width}) if start >= width else set()
        return bool(ends) if direction > 0 else start in ends

    return lambda text, starts: {start for start in starts if finds(text, start) == is_wanted}


def full_matcher(pattern: str) -> Callable[[str], bool]:
    """Return what tells whether a pattern matches all of a text: ``re``, or ``Pattern`` where that could take long.

    Raises:
      ValueError: not a regular expression, or one that could take long and that ``Pattern`` does not read.
    """
    compiled, parts = _read(pattern)
    unbounded, optional = _choices(parts)
    if unbounded <= _MAX_REPEATS and optional <= _MAX_OPTIONS:
        return lambda text: compiled.fullmatch(text) is not None
    return Pattern(pattern).fullmatch


def _choices(parts: Any) -> tuple[float, float]:
    """Count the repeats without a bound, and the branches and optional parts; infinite where repeats are nested."""
    unbounded = optional = 0.0
    for op, value in parts:
        name, inner = str(op), []
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, body = value
            if most > 1 and (len(body) != 1 or str(body[0][0]) not in ("LITERAL", "NOT_LITERAL", "ANY", "IN")):
                return float("inf"), optional
            unbounded, optional, inner = unbounded + (most > 1), optional + (most == 1), [body]
        elif name == "BRANCH":
            optional, inner = optional + len(value[1]) - 1, value[1]
        elif name in ("SUBPATTERN", "ATOMIC_GROUP", "ASSERT", "ASSERT_NOT"):
            inner = [value if name == "ATOMIC_GROUP" else value[-1]]
        elif name == "GROUPREF_EXISTS":
            inner = [branch for branch in value[1:] if branch is not None]
        for body in inner:
            more = _choices(body)
            unbounded, optional = unbounded + more[0], optional + more[1]
    return unbounded, optional
