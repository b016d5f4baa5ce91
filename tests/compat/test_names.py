"""The page on MLC lists every public name of the module, and every name that it lists exists."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

from jaxquant.compat import mlc

PAGE = (Path(__file__).parents[2] / "docs/from/mlc.md").read_text()
TABLE = PAGE.partition("## Names")[2].partition("\n## ")[0]


def test_every_name_of_the_page_is_there_and_every_public_one_is_in_it():
    named = set(re.findall(r"`(jaxquant(?:\.\w+)+)`", PAGE))
    assert {f"jaxquant.compat.mlc.{name}" for name in mlc.__all__} <= named
    for name in named:
        pkgutil.resolve_name(name)
    rows = [line for line in TABLE.splitlines() if line.startswith("|")][2:]
    assert [line for line in rows if not re.search(r"\| [^|]*`jaxquant\.[^|]*\|$", line)] == []
    layouts = dict(re.findall(r"^\| `(\w+)`[^|]*\| `(\[.*)` \|$", PAGE, re.M))
    assert layouts == {each.name: each.value for each in mlc.ScaleLayout}
