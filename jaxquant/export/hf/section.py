"""Section of a JSON config, with errors that name the key and a record of the keys that were read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxquant.core.typed import show


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A mapping and its position for error messages.

    Attributes:
      data: contents of the section.
      place: position, such as ``quantization_config.config_groups.group_0``.
      read_places: positions of all keys that were read, shared by the sections of a config.
    """

    data: Mapping[str, Any]
    place: str
    read_places: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def where(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def get(self, key: str) -> Any:
        """Return the value of a key, or None if it is missing, and record it as read."""
        self.read_places.add(self.where(key))
        return self.data.get(key)

    def has(self, key: str) -> bool:
        """Return whether the key is present and not null."""
        return self.get(key) is not None

    def pass_over(self, *keys: str) -> None:
        """Mark keys, and everything inside these keys, as read; for keys that do not change values."""
        self.read_places.update(f"{self.where(key)}{end}" for key in keys for end in ("", _WHOLE))

    def check_read(self) -> None:
        """Raise if a key with a value was not read.

        Raises:
          NotImplementedError: a key was not read; the message names it.
        """
        for place, value in self._unread_keys():
            raise NotImplementedError(
                f"{place} {show(value)} is not supported and may change values; export the checkpoint without it"
            )

    def _unread_keys(self) -> Iterator[tuple[str, Any]]:
        for key, value in self.data.items():
            place = self.where(key)
            if not _has_content(value) or f"{place}{_WHOLE}" in self.read_places:
                continue
            if place not in self.read_places:
                yield place, value
            elif isinstance(value, Mapping):
                yield from Section(value, place, self.read_places)._unread_keys()

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string, or ``default`` if the key is missing or null; raises if there is no default."""
        value = self._required(key, default)
        return self._check(key, value, isinstance(value, str), "a string", TypeError)

    def choice(self, key: str, known: Collection[str], default: str | None = None) -> str:
        """Return a string, which must be one of ``known``."""
        value = self.text(key, default)
        if value not in known:
            names = ", ".join(filter(None, known))
            raise ValueError(f"{self.where(key)} {value!r} is not known; known values are {names}")
        return value

    def integer(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """Return an integer above 0 and at most ``most``."""
        value = self._required(key, default)
        return self._check(key, value, type(value) is int and 0 < value <= most, f"a whole number from 1 to {most}")

    def number(self, key: str) -> float | None:
        """Return a finite number above 0, or None if the key is missing or null."""
        value = self.get(key)
        fits = value is None or (type(value) in (int, float) and 0 < value < float("inf"))
        self._check(key, value, fits, "a finite number above 0")
        return None if value is None else float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        return self._check(key, value, isinstance(value, bool), "true or false", TypeError)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if the key is missing or null."""
        value = self.get(key)
        if value is None:
            return ()
        self._check(key, value, isinstance(value, (list, tuple)), "a list of strings", TypeError)
        for index, item in enumerate(value):
            self._check(f"{key}[{index}]", item, isinstance(item, str), "a string", TypeError)
        return tuple(value)

    def pair(self, key: str) -> tuple[int, int] | None:
        """Return two integers above 0, written as a list or as "128x128"; None if the key is missing or null."""
        value = self.get(key)
        if value is None:
            return None
        words = value.split("x") if isinstance(value, str) else value
        numbers = tuple(map(_positive_integer, words)) if isinstance(words, (list, tuple)) and len(words) == 2 else ()
        self._check(key, value, bool(numbers) and all(numbers), "two whole numbers above 0")
        return numbers  # pyright: ignore[reportReturnType]

    def section(self, key: str) -> Section:
        """Return the mapping under a key as a section, which is empty if the key is missing or null."""
        value = self.get(key)
        self._check(key, value, isinstance(value, Mapping | None), "a mapping", TypeError)
        return Section(value or {}, self.where(key), self.read_places)

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.where(key)} must be specified")
        return value

    def _check(self, key: str, value: Any, fits: bool, wanted: str, error: type[Exception] = ValueError) -> Any:
        """Return ``value`` if ``fits``; otherwise raise ``error`` with the requirement ``wanted``."""
        if not fits:
            raise error(f"{self.where(key)} must be {wanted}, got {show(value)}")
        return value


_WHOLE = ".*"
"""Suffix of a key's position in ``read_places`` if everything inside the key counts as read."""


def _has_content(value: Any) -> bool:
    """Return whether a value contains anything other than null, false and empty containers."""
    return any(map(_has_content, value.values())) if isinstance(value, Mapping) else value not in (None, False, "", [])


def _positive_integer(word: object) -> int | None:
    """Return an integer above 0, written as a number or in decimal digits; None for anything else."""
    if isinstance(word, str) and word.isascii() and word.isdigit() and len(word) < 10:
        word = int(word)
    return word if isinstance(word, int) and not isinstance(word, bool) and 0 < word < 2**31 else None
