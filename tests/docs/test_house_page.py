"""The list of files in docs/about/house.md is the one that scripts/lines.py makes of their docstrings."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_list_of_files_is_that_of_the_package():
    spec = importlib.util.spec_from_file_location("lines", ROOT / "scripts/lines.py")
    assert spec is not None
    assert spec.loader is not None
    lines = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lines)
    page = (ROOT / "docs/about/house.md").read_text()
    listed = page.partition("## The files\n\n")[2].partition("\n\n## ")[0]
    assert listed == lines.describe_files(), "replace the list by what scripts/lines.py --files prints"
