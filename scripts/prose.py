#!/usr/bin/env python3
"""Find patterns in prose that a reader has to read twice: pages, docstrings, comments and error messages.

scripts/prose.py           how often each pattern occurs, next to the number that pyproject.toml allows
scripts/prose.py -v        also prints every place
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRACKED = ("*.md", "jaxquant/*.py", "train/*.py", "scripts/*.py", "examples/*.py", "validation/*.py")
PATTERNS = {
    "fronted Of": r"(?:^|[.:;] )Of (?:an?|the|two|one|all|each|what|which)\b",
    "negated noun": r"(?<![Tt]here )\b(?:is|are|was|were) (?:none\b|no (?!longer\b|more than\b)[a-z])",
    "any more": r"\bany more\b(?! than)",
    "beside": r"\bbeside\b",
    "but for": r"\bbut for\b",
    "goes on": r"\bgo(?:es)? on\b",
    "alone": r"\b(?:kernel|weight|parameter|name|test)s? alone\b|\b(?:them|it|itself|these|that) alone\b",
    "asked, said, told": r"\b(?:is|are|was|were) (?:asked|said|told)\b|\bsays? (?:so|what|why|how)\b",
    "what is": r"\b[Ww]hat (?:is|was|are|were) (?:asked|kept|left|made|not|read|seen|there)\b",
    "stands": r"\bstands? (?:in(?! for\b)|on|there|where|behind|once)\b",
    "None where": r"\b(?:None|True|False|0) where\b",
    "of its own": r"\bof (?:its|their|our|your) own\b",
    "in place of": r"\bin (?:the )?place of\b",
    "by itself": r"\bby (?:itself|themselves)\b",
    "bare decimal": r"(?<![\w.)\]`])\.\d{1,3}\b(?!\w)",
    "docstring verb": r"\A(?:Ask|Be|Give|Go|Let|Put|Say|Take|Tell)\b",
    "entry without a noun": r"^ +[a-z_]\w*(?:, \w+)*: (?:as|by|from|how|in|is|of|that|what|when|where|which|with)\b",
}
"""Patterns by name. The last two apply only to docstrings."""
OF_DOCSTRINGS = ("docstring verb", "entry without a noun")
_CODE = re.compile(r"^ *```.*?^ *```|<!--.*?-->|(`{1,2})(?!`)[^`\n]+\1|\]\([^)\s]*\)|https?://\S+", re.S | re.M)


def prose(path: str, source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each page, docstring, comment and error message, with inline code masked."""
    if path.endswith(".md"):
        yield 1, "page", _masked(source)
        return
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            text = each.value if isinstance(each, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield each.lineno, "docstring", _masked(text.value)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            message = ast.walk(node.exc.args[0])
            words = (part.value for part in message if isinstance(part, ast.Constant) and isinstance(part.value, str))
            yield node.lineno, "error", _masked("`".join(words))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], "comment", _masked(token.string.lstrip("# "))


def _masked(text: str) -> str:
    return _CODE.sub(lambda found: re.sub(r"[^\n]", "`", found[0]), text)


def places(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield the name of a pattern and a line "FILE:LINE: text" for each place in a checkout."""
    tracked = subprocess.run(["git", "ls-files", *TRACKED], cwd=root, check=True, capture_output=True, text=True).stdout
    for path in tracked.splitlines():
        if not (root / path).is_file() or path.startswith(("tests/", "benchmarks/results/")):
            continue
        for line, kind, text in prose(path, (root / path).read_text(encoding="utf-8")):
            for name, pattern in PATTERNS.items():
                if name in OF_DOCSTRINGS and kind != "docstring":
                    continue
                for found in re.finditer(pattern, text, re.M):
                    at = line + text[: found.start()].count("\n")
                    excerpt = " ".join(text[max(0, found.start() - 30) : found.end() + 30].split())
                    yield name, f"{path}:{at}: {excerpt}"


def allowed(root: Path = ROOT) -> dict[str, int]:
    """Return how often each pattern may occur, from pyproject.toml; these numbers must not grow."""
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["house"]["prose"]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Find patterns in prose that a reader has to read twice.")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every place")
    options = parser.parse_args(words)
    found = collections.defaultdict(list)
    for name, place in places():
        found[name].append(place)
    for name in PATTERNS:
        print(f"{len(found[name]):5,}  {allowed().get(name, 0):5,}  {name}")
        if options.verbose:
            print("".join(f"       {place}\n" for place in found[name]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
