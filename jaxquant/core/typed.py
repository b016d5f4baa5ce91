"""Strict construction of dataclasses from mappings; errors name the place of an unknown key or a wrong type."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")


class _Show(reprlib.Repr):
    """``repr`` of user input, shortened if it is long or deep, so that an error stays readable."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 200, 200
        self.maxdict = self.maxlist = self.maxtuple = 20

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 256 else f"an integer of {x.bit_length()} bits"


show = _Show().repr


def nearest(name: Any, known: Iterable[str], count: int = 1, cutoff: float = 0.6, otherwise: str | None = None) -> str:
    """Return ``did you mean 'x'?`` with at most ``count`` similar names.

    Args:
      name: name that was written.
      known: known names.
      count: maximum number of names; only one is returned if it differs only in case.
      cutoff: argument of difflib.
      otherwise: result if no name is similar; None lists the known names.
    """
    names, written = [candidate for candidate in known if candidate], str(name)[:200]
    near = [written.lower()] if written.lower() in names else []
    for spelling in (written, written.lower()):
        near = near or difflib.get_close_matches(spelling, names, count, cutoff)
    listed = f"use one of {', '.join(names)}" if otherwise is None else otherwise
    return f"did you mean {either(near)}?" if near else listed


def either(words: Iterable[str]) -> str:
    """Return ``'a' or 'b'``."""
    return " or ".join(map(repr, words))


@functools.cache
def type_hints(cls: type) -> Mapping[str, Any]:
    return types.MappingProxyType(typing.get_type_hints(cls))


def build(cls: type[T], mapping: Mapping[str, Any], place: str = "") -> T:
    """Construct a dataclass from a mapping, strictly: every key must be a field, every value of the field's type.

    A class may define ``prepare_mapping(mapping) -> mapping`` to accept other spellings of its values.

    Args:
      cls: dataclass; fields may be str, int, float (accepts int), bool, None, Optional, Union, Literal, tuple, list,
        Mapping, Any or a dataclass.
      mapping: values by field name; missing fields have their defaults.
      place: dotted path of the mapping for errors, or "" for the name of the class.

    Raises:
      ValueError: a key is unknown, a required field is missing, or a value is not one of a Literal; the error names the
        place.
      TypeError: a value has the wrong type; the error names the place, the expected type and the value.
    """
    place = place or cls.__name__
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{place} must be a mapping, got {show(mapping)} ({type(mapping).__name__})")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # pyright: ignore[reportArgumentType]
    for key in mapping:
        if key not in fields:
            raise ValueError(f"{place} has no field {show(key)}; {nearest(key, fields)}")
    prepare = getattr(cls, "prepare_mapping", None)
    if prepare is not None:
        mapping = prepare(mapping)
    values = {key: convert(type_hints(cls)[key], value, f"{place}.{key}") for key, value in mapping.items()}
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{place} needs field {name!r}, which has no default")
    return cls(**values)


def check_fields(obj: Any) -> None:
    """Convert every field of a frozen dataclass to its type; for ``__post_init__``.

    Raises:
      ValueError, TypeError: as for ``build``.
    """
    cls = type(obj)
    for field in dataclasses.fields(cls):
        if field.init:
            place = f"{cls.__name__}.{field.name}"
            object.__setattr__(obj, field.name, convert(type_hints(cls)[field.name], getattr(obj, field.name), place))


class Typed:
    """Base of a frozen dataclass that ``check_fields`` checks completely."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


_LISTED = {float: "numbers", bool: "flags", int: "integers", str: "strings"}


def _spell(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_spell(member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(repr(choice) for choice in typing.get_args(hint))}"
    if typing.get_origin(hint) in (tuple, list) and len(set(args := typing.get_args(hint)) - {Ellipsis}) == 1:
        return f"a list of {_LISTED.get(args[0]) or f'{_spell(args[0]).lower()}s'}"
    if isinstance(typing.get_origin(hint), type) and issubclass(typing.get_origin(hint), Mapping):
        return "a mapping"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def convert(hint: Any, value: Any, place: str) -> Any:
    """Check a value against a type hint; convert lists to tuples, ints to floats and mappings to dataclasses.

    Raises:
      ValueError, TypeError: as for ``build``.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    wrong = TypeError(f"{place} must be {_spell(hint)}, got {show(value)} ({type(value).__name__})")
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in args):
            return value
        if not isinstance(value, tuple({type(choice) for choice in args})):
            raise wrong
        words = [str(choice) for choice in args]
        near = nearest(value, words, otherwise="")
        raise ValueError(f"{place} must be {_spell(hint)}, got {show(value)}{near and f'; {near}'}")
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, place, wrong)
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise wrong
        if origin is tuple and args[-1] is not Ellipsis:
            if len(args) != len(value):
                raise ValueError(f"{place} must have {len(args)} items, got {len(value)}")
        else:
            args = (args[0],) * len(value)
        items = zip(args, value, strict=True)
        return origin(convert(arg, item, f"{place}[{index}]") for index, (arg, item) in enumerate(items))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise wrong
        return {
            convert(args[0], key, f"{place} key"): convert(args[1], item, f"{place}.{key}")
            for key, item in value.items()
        }
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, place)
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{place} is too large for a float, got {show(value)}") from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise wrong
    return value


def _convert_union(members: tuple[Any, ...], value: Any, place: str, wrong: TypeError) -> Any:
    if value is None and type(None) in members:
        return None
    exact = [member for member in members if member is type(value)]
    others = [member for member in members if member is not type(None)]
    if exact or len(others) == 1:
        return convert((exact or others)[0], value, place)
    for member in others:
        try:
            return convert(member, value, place)
        except TypeError:
            continue
    raise wrong


def to_mapping(obj: Any) -> Any:
    """Convert a dataclass to plain data that YAML can write and ``build`` can read: dicts, lists and scalars."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {field.name: to_mapping(getattr(obj, field.name)) for field in dataclasses.fields(obj) if field.init}
    if isinstance(obj, Mapping):
        return {key: to_mapping(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [to_mapping(value) for value in obj]
    return obj
