"""Strict readers of YAML and JSON files and of command-line overrides; ``core.typed`` makes dataclasses from them."""

from __future__ import annotations

import json
import os
import re
import stat
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxquant.core.typed import show

MAX_BYTES = 100_000
"""Maximum size of a YAML file, so that reading fails within about a second; configs here have at most 4,000 bytes."""
_MAX_JSON_BYTES = 256 * 2**20
_STRING_TAG = "tag:yaml.org,2002:str"


def _error(problem: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


class _Loader(yaml.SafeLoader):
    """Safe YAML loader with the scalars of YAML 1.2 (in PyYAML's YAML 1.1, ``no`` is False and ``4e-4`` is a string).

    Aliases and tags raise an error, because a config does not need them.
    """

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}  # pyright: ignore[reportIncompatibleVariableOverride]

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _error(f"YAML alias *{event.anchor} is not supported; replace the alias with the value", event)
        tag = getattr(event, "tag", None)
        if tag is not None and not (tag == _STRING_TAG and isinstance(event, yaml.ScalarEvent)):
            raise _error(f"YAML tag {show(tag)} is not supported; remove the tag", event)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise _error(f"key {show(key)} is not a string; write the key in quotes", key_node)
            if key in seen:
                raise _error(f"key {show(key)} is already on line {seen[key]}; remove one of the two", key_node)
            seen[key] = line
        return super().construct_mapping(node, deep)


def _construct_int(_: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    try:
        return int(node.value, 0) if node.value[:2] in ("0o", "0x") else int(node.value)
    except ValueError:  # Python parses at most 4,300 digits
        raise _error(f"integer {node.value[:20]}... of {len(node.value)} digits is too large", node) from None


for _tag, _pattern, _firsts in (
    ("null", "|~|null|Null|NULL", ["", "~", "n", "N"]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _firsts)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_yaml(text: str, place: str) -> Any:
    """Read a YAML text as plain data.

    Args:
      text: YAML text.
      place: name of the text in errors.

    Raises:
      ValueError: the text is not YAML, is too long, or is nested too deep.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"{place} has {len(text)} characters; a config may have at most {MAX_BYTES:,}")
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: it builds plain data only
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{place}{line}: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"{place} line {line}: character {error.character!r} is not allowed in YAML") from error
    except RecursionError:
        raise ValueError(f"{place} is nested too deep; use fewer levels") from None


def read_text(path: str | os.PathLike[str], label: str = "", most: int = MAX_BYTES) -> str:
    """Read a UTF-8 file.

    Args:
      path: path of the file.
      label: name of the file in errors, such as a field, or "" to show only the path.
      most: maximum size in bytes.

    Raises:
      ValueError: the file is missing, unreadable, not UTF-8 or too large; the message names the path.
    """
    name = f"{label} {os.fspath(path)!r}" if label else os.fspath(path)
    if "\0" in os.fspath(path):
        raise ValueError(f"{name!r} contains a null character, which no path may contain; remove the character")
    try:
        check_ordinary(path, label)
        with open(path, "rb") as file:
            data = file.read(most + 1)
            if len(data) > most:
                raise ValueError(f"{name} is larger than the limit of {most:,} bytes; check the path")
            return data.decode()
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start}: {error.reason}); save the file as UTF-8") from error


def check_ordinary(path: str | os.PathLike[str], label: str = "") -> None:
    """Raise if a path is a device (may be endless), a pipe (may block, is readable only once) or a socket.

    Args:
      path: path of a file or folder; reading a folder fails with its own error.
      label: argument of ``read_text``.

    Raises:
      ValueError: the path is not a file or folder.
      OSError: the path does not exist.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise ValueError(f"{label} {os.fspath(path)!r} is {kind}; pass the path of a regular file".strip())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file whose top level is a mapping.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is too large, not JSON, or not a mapping.
    """
    if not path.exists() or path.is_dir():
        raise FileNotFoundError(f"there is no file {path}; pass a Hugging Face folder that has {path.name}")
    text = read_text(path, most=_MAX_JSON_BYTES)
    try:
        contents = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({str(error)[:200]}); download the file again") from None
    if not isinstance(contents, Mapping):
        raise ValueError(f"{path} must contain a JSON object, got {type(contents).__name__}; download the file again")
    return dict(contents)


def load_yaml(path: str | os.PathLike[str], label: str = "") -> dict[str, Any]:
    """Read a YAML or JSON file whose top level is a mapping. An empty file is an empty mapping.

    Args:
      path: path of the file.
      label: argument of ``read_text``.

    Raises:
      ValueError: the file is unreadable, or has bad syntax, a duplicate key or a key that is not a string; the message
        names the path and the line.
      TypeError: the top level is not a mapping.
    """
    text = read_text(path, label)
    if os.fspath(path).lower().endswith(".json"):
        text = text.replace("\t", " ")  # JSON may be indented with tabs, but JSON strings cannot contain tabs
    content = parse_yaml(text, os.fspath(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise TypeError(f"{os.fspath(path)} must be a mapping of names to values, got {type(content).__name__}")
    return content


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """Parse ``key=value`` arguments of a command line. If a key is repeated, the last value is used.

    Args:
      items: arguments such as ``steps=20``, ``a.b=3`` (nested) or ``quantization=`` (the empty string).

    Raises:
      ValueError: an argument has no ``=``, an empty key, or a value that is not YAML.
    """
    result: dict[str, Any] = {}
    for item in items:
        dotted, equals, text = item.partition("=")
        *parents, last = dotted.strip().split(".")
        if not equals or not all([*parents, last]):
            raise ValueError(f"override {show(item)} must have the form key=value, such as steps=20")
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"override {show(item)} sets a field of {show(parent)}, which already has a value")
        place[last] = parse_yaml(text, f"override {show(item)}") if text.strip() else ""
    return result
