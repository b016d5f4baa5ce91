"""The page on MLC: every name of ours in it is there, and every public one is in it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from jaxquant.compat import mlc

PAGE = (Path(__file__).parents[2] / "docs/from/mlc.md").read_text()
TABLE = PAGE.partition("## Names")[2].partition("\n## ")[0]


def resolve(name: str) -> object:
    """Import the module that a dotted name begins with, and follow its attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_every_name_of_the_table_is_there_and_every_public_one_is_in_it():
    named = set(re.findall(r"`(jaxquant(?:\.\w+)+)`", PAGE))
    assert {name for name in mlc.__all__ if f"jaxquant.compat.mlc.{name}" not in named} == set()
    for name in named:
        resolve(name)
    rows = [line for line in TABLE.splitlines() if line.startswith("|")][2:]
    assert [line for line in rows if not re.search(r"\| [^|]*`jaxquant\.[^|]*\|$", line)] == []


def test_the_layouts_are_those_of_the_type():
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\| `(\[.*)` \|$", PAGE, re.M))
    assert rows == {each.name: each.value for each in mlc.ScaleLayout}
