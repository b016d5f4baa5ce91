"""The rules of the house that a machine can check: the budget of every room, and where some things are known."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import lines

ROOT = Path(__file__).parents[1]
SLACK = 60
"""Lines by which a budget may be above what is there; a room that shrinks more lowers its budget."""
READ_EQUATIONS = {
    "audit/dataflow.py",
    "inject/linen.py",
    "ops/evaluate.py",
    "optim/parts.py",
    "trace/analysis.py",
    "trace/plan.py",
    "trace/rewrite.py",
}
"""Files that go over the equations of a jaxpr: of models, but for optim/parts.py, which divides an optimizer's update.

None may be added; one that no longer does leaves the list.
"""


def files_with(pattern: str) -> set[str]:
    package = ROOT / "jaxquant"
    found = (path for path in package.rglob("*.py") if re.search(pattern, path.read_text()))
    return {path.relative_to(package).as_posix() for path in found}


def test_no_room_is_above_its_budget():
    rooms, budgets = lines.count(), lines.budgets()
    assert set(rooms) == set(budgets)
    wrong = {room: (n, budgets[room]) for room, n in rooms.items() if not n <= budgets[room] <= n + SLACK}
    assert not wrong, f"lines and budget in pyproject.toml: {wrong}"


def test_no_more_files_go_over_equations():
    assert files_with(r"\.eqns\b") == READ_EQUATIONS


def test_no_file_knows_layer_classes():
    assert files_with(r"\b(nn|nnx)\.(Dense|DenseGeneral|Linear|LinearGeneral|Einsum|Conv|Embed)\b") == set()
