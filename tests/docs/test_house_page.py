"""The list of files in docs/about/house.md is the one that scripts/lines.py makes of their docstrings."""

from __future__ import annotations

from pathlib import Path

from scripts import lines

ROOT = Path(__file__).parents[2]


def test_the_list_of_files_is_that_of_the_package():
    page = (ROOT / "docs/about/house.md").read_text()
    listed = page.partition("## The files\n\n")[2].partition("\n\n## ")[0]
    assert listed == lines.describe_files(), "replace the list by what scripts/lines.py --files prints"
