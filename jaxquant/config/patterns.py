"""Regular expressions of rules, matched in a time that no pattern can blow up.

Python's own engine tries one way after the other, and ``(a|a)*b`` has 2ⁿ ways through n letters. Here every part of a
pattern takes the set of places at which it may begin to the set at which it may end. That costs at most the pattern's
size times the square of the path's length, so that none has to be refused for its looks: refusing nested repeats would
refuse harmless ones, and still let ``.*.*.*.*.*.*!`` through. What matches in full is what ``re`` says; what depends on
the way is not read: back-references, atomic groups, possessive repeats, conditions.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from re import _constants as sre  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

MAX_CHARACTERS = 1000
_MAX_REPEATS = 4
"""Unbounded repeats of one pattern that Python's engine may try: each multiplies its ways by the text's length."""
_MAX_OPTIONS = 12
"""Branches and optional parts: each doubles them."""

_UNREAD = {
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a condition",
    "GROUPREF_IGNORE": "a back-reference",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}
_CATEGORIES = {
    "DIGIT": re.compile(r"\d"),
    "NOT_DIGIT": re.compile(r"\D"),
    "SPACE": re.compile(r"\s"),
    "NOT_SPACE": re.compile(r"\S"),
    "WORD": re.compile(r"\w"),
    "NOT_WORD": re.compile(r"\W"),
}


class Pattern:
    """One compiled pattern.

    Raises:
      ValueError: it is no regular expression, too long, or of a part that is not read; says which.
    """

    def __init__(self, pattern: str):
        if len(pattern) > MAX_CHARACTERS:
            raise ValueError(f"it has {len(pattern):,} characters, of at most {MAX_CHARACTERS:,}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._parts = _parser.parse(pattern)
        except (re.error, OverflowError) as error:
            raise ValueError(str(error)) from None
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        flags = self._parts.state.flags
        self._ignores_case = bool(flags & re.IGNORECASE)
        if flags & (re.ASCII | re.LOCALE | re.MULTILINE):
            raise ValueError("it has a flag that is not read; of flags (?i), (?s) and (?x) are")
        self._dot_is_all = bool(flags & re.DOTALL)
        _check(self._parts)

    def fullmatch(self, text: str) -> bool:
        """Whether the pattern matches all of a text."""
        return len(text) in self._ends(self._parts, text, {0})

    def _ends(self, parts: Any, text: str, starts: set[int]) -> set[int]:
        for op, value in parts:
            if not starts:
                break
            starts = self._step(str(op), value, text, starts)
        return starts

    def _step(self, op: str, value: Any, text: str, starts: set[int]) -> set[int]:
        """Return where a part may end that begins at one of ``starts``."""
        if op == "SUBPATTERN":
            return self._ends(value[-1], text, starts)
        if op == "BRANCH":
            return set().union(*(self._ends(branch, text, starts) for branch in value[1]))
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            return self._repeat(least, most, inner, text, starts)
        if op in ("ASSERT", "ASSERT_NOT"):
            direction, inner = value
            ahead = {start for start in starts if self._looks(direction, inner, text, start)}
            return ahead if op == "ASSERT" else starts - ahead
        if op == "AT":
            return {start for start in starts if _is_at(str(value), text, start)}
        return {start + 1 for start in starts if start < len(text) and self._is_in(op, value, text[start])}

    def _repeat(self, least: int, most: int, inner: Any, text: str, starts: set[int]) -> set[int]:
        for _ in range(least):
            ends = self._ends(inner, text, starts)
            if ends == starts or not ends:  # so it stays, however often
                starts = ends
                break
            starts = ends
        found, new, count = set(starts), starts, least
        while new and (most is sre.MAXREPEAT or count < most):
            new = self._ends(inner, text, new) - found
            found |= new
            count += 1
        return found

    def _looks(self, direction: int, inner: Any, text: str, start: int) -> bool:
        if direction > 0:
            return bool(self._ends(inner, text, {start}))
        begin = start - inner.getwidth()[0]  # of one width, which the parser does not check
        return begin >= 0 and start in self._ends(inner, text, {begin})

    def _is_in(self, op: str, value: Any, character: str) -> bool:
        if op == "ANY":
            return self._dot_is_all or character != "\n"
        kinds = {character, character.lower(), character.upper()} if self._ignores_case else {character}
        if op == "IN":
            is_negated = str(value[0][0]) == "NEGATE"
            return is_negated != any(_is_one(str(o), v, kind) for o, v in value if str(o) != "NEGATE" for kind in kinds)
        if op == "NOT_LITERAL":
            return not any(_is_one("LITERAL", value, kind) for kind in kinds)
        return any(_is_one(op, value, kind) for kind in kinds)


def _is_one(op: str, value: Any, character: str) -> bool:
    if op == "LITERAL":
        return ord(character) == value if len(character) == 1 else False
    if op == "RANGE":
        return len(character) == 1 and value[0] <= ord(character) <= value[1]
    return _CATEGORIES[str(value).removeprefix("CATEGORY_")].fullmatch(character) is not None


def _is_at(place: str, text: str, start: int) -> bool:
    if place in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return start == 0
    if place == "AT_END_STRING":
        return start == len(text)
    if place == "AT_END":
        return start == len(text) or (start == len(text) - 1 and text[start] == "\n")
    is_word = [
        _CATEGORIES["WORD"].fullmatch(side) is not None
        for side in (text[max(start - 1, 0) : start], text[start : start + 1])
    ]
    return (is_word[0] != is_word[1]) == (place == "AT_BOUNDARY")


def _check(parts: Any) -> None:
    for op, value in parts:
        name = str(op)
        if name in _UNREAD:
            raise ValueError(f"it has {_UNREAD[name]}, which rules do not read")
        if name == "SUBPATTERN":
            if value[1] or value[2]:
                raise ValueError("it has a flag inside a group, which rules do not read; put (?i) first")
            _check(value[-1])
        elif name == "BRANCH":
            for branch in value[1]:
                _check(branch)
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            _check(value[2])
        elif name in ("ASSERT", "ASSERT_NOT"):
            least, most = value[1].getwidth()
            if value[0] < 0 and least != most:
                raise ValueError("look-behind requires fixed-width pattern")
            _check(value[1])


def full_matcher(pattern: str) -> Callable[[str], bool]:
    """Return what tells whether a pattern matches all of a text: ``re``, or ``Pattern`` where that could take long.

    Raises:
      ValueError: not a regular expression, or one that could take long and that ``Pattern`` does not read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled, parts = re.compile(pattern), _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
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
