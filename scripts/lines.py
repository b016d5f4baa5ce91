#!/usr/bin/env python3
"""Count the lines of code of every room, without blank lines, comments and docstrings.

A room is a folder of the package or another top-level folder.

scripts/lines.py           rooms of the working tree, next to their budgets in pyproject.toml
scripts/lines.py FOLDER    rooms of another checkout
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Return the number of lines of a Python file that contain code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        first = node.body[0] if isinstance(node, _DOCUMENTED) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in _BLANK for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


def room_of(path: str) -> str:
    """Return the room of a tracked file: a folder of the package, or a folder at the top."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "jaxquant" and len(parts) > 2 else parts[0]


def count(root: Path = ROOT) -> dict[str, int]:
    """Return the lines of code of every room of a checkout, from the files that git tracks."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=root, check=True, capture_output=True, text=True).stdout
    rooms: collections.Counter[str] = collections.Counter()
    for path in tracked.splitlines():
        if (root / path).is_file():
            rooms[room_of(path)] += code_lines((root / path).read_text())
    return dict(sorted(rooms.items()))


def budgets(root: Path = ROOT) -> dict[str, int]:
    """Return the maximum number of lines of each room, from pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["house"]["lines"]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count the lines of code of every room.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, metavar="FOLDER", help="default: this checkout")
    root = parser.parse_args(words).root
    rooms, most = count(root), budgets()
    for room, lines in rooms.items():
        print(f"{lines:7,}  {most.get(room, 0):7,}  {room}")
    programs = ("jaxquant/training", "jaxquant/bench")
    library = sum(lines for room, lines in rooms.items() if room.startswith("jaxquant") and room not in programs)
    print(f"{library:7,}           jaxquant without training and bench\n{sum(rooms.values()):7,}           all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
