"""Rules of the repository that a program can check: line budgets of folders, and modules that may know a fact."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

from scripts import lines, prose

ROOT = Path(__file__).parents[1]
SLACK = 60
"""Number of lines by which a budget may exceed the actual count; a room that shrinks more must lower its budget."""


def test_no_room_is_above_its_budget():
    rooms, budgets = lines.count(), lines.budgets()
    found = {room: (rooms.get(room, 0), budgets.get(room, 0)) for room in rooms.keys() | budgets.keys()}
    assert {room: (n, most) for room, (n, most) in found.items() if not 0 < n <= most <= n + SLACK} == {}


def test_no_pattern_of_prose_is_more_frequent():
    found = collections.Counter(name for name, _ in prose.places())
    assert {name: found[name] for name in prose.PATTERNS if found[name] > prose.allowed().get(name, 0)} == {}


def test_the_library_knows_no_layer_classes():
    classes = r"\b(nn|nnx)\.(Dense|DenseGeneral|Linear|LinearGeneral|Einsum|Conv|Embed)\b"
    found = (path for path in ROOT.glob("jaxquant/**/*.py") if re.search(classes, path.read_text()))
    assert [path for path in found if path.relative_to(ROOT).parts[1] not in ("bench", "training")] == []


def test_every_option_has_a_caller():
    """An argument with a default must be passed by the package, a program or an example, or appear in the docs.

    Kernels are exempt, because a table calls them, and so is ``compat``, which has other libraries' signatures.
    """
    trees = {path: ast.parse(path.read_text()) for room in CALLERS for path in sorted((ROOT / room).rglob("*.py"))}
    trees = {path: tree for path, tree in trees.items() if not path.is_relative_to(ROOT / "jaxquant/bench")}
    passed: dict[str, set[str]] = collections.defaultdict(set)
    counts: collections.Counter[str] = collections.Counter()
    for tree in trees.values():
        for name, count, keywords in calls(tree):
            counts[name] = max(counts[name], count)
            passed[name] |= keywords
    docs = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    unused = []
    for path, tree in trees.items():
        if path.is_relative_to(ROOT / "jaxquant") and path.relative_to(ROOT).parts[1] not in EXEMPT:
            for name, option, place in options(tree):
                # The ``__init__`` of a subclass also calls a class.
                count = max(counts[name], counts["__init__"] if name[:1].isupper() else 0)
                is_passed = option in passed[name] or count > place or EVERYTHING in passed[name]
                if not is_passed and not re.search(rf"\b{option}=|`{option}`", docs):
                    unused.append(f"{path.relative_to(ROOT)}: {name}({option})")
    assert unused == []


EXEMPT = ("kernels", "compat", "training")
CALLERS = ("jaxquant", "examples", "validation")
EVERYTHING = "**"


def calls(tree: ast.AST) -> Iterator[tuple[str, int, set[str]]]:
    """Yield, for each call, the last part of the name, the number of positional arguments, and the keyword names."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function, args = call.func, call.args
        if last_name(function) == "partial" and args:
            function, args = args[0], args[1:]
        stars = [EVERYTHING for each in args if isinstance(each, ast.Starred)]
        yield last_name(function), len(args), {*stars, *(each.arg or EVERYTHING for each in call.keywords)}


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def options(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, str, float]]:
    """Yield a function's name, an argument with a default, and its position (infinite if it is keyword-only)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("__")):
            given = [*node.args.posonlyargs, *node.args.args]
            bound = bool(owner and given and given[0].arg in ("self", "cls"))
            name = owner if node.name == "__init__" else node.name
            first = len(given) - len(node.args.defaults)
            yield from ((name, each.arg, n - bound) for n, each in enumerate(given) if n >= first)
            pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            yield from ((name, each.arg, float("inf")) for each, default in pairs if default is not None)
        yield from options(node, node.name if isinstance(node, ast.ClassDef) else "")
