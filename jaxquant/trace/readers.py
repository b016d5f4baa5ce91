"""Readers of parameter leaves, and which of them cannot use a converted kernel instead of the leaf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxquant.trace.flow import Derived, Flow, Route
from jaxquant.trace.plan import Contraction


class Readers:
    """Readers of the leaves of a traced function.

    Attributes:
      records: index of a leaf and its reader, a contraction or the description of an operation, in program order.
    """

    def __init__(self) -> None:
        self.records: list[tuple[int, str | Contraction]] = []

    def float_readers(self) -> Iterator[tuple[int, str | Contraction]]:
        """Yield the leaf and the reader for each reader that cannot use a converted kernel.

        Such a contraction stays in float, or the leaf cannot be recovered from the value that it reads. Call this after
        recipes are chosen.
        """
        for leaf, reader in self.records:
            if isinstance(reader, str) or reader.recipe is None or getattr(reader.route, "obstacle", ""):
                yield leaf, reader

    def record(self, ins: Sequence[Flow], why: str) -> Derived | None:
        """Record every leaf whose elements an operation reads unchanged. Returns the route of its output."""
        leaves, routes = set[int](), [each.route for each in ins]
        for each in routes:
            if isinstance(each, Route):
                self.records.append((each.leaf, why))
                leaves.add(each.leaf)
            elif each is not None:
                leaves |= each.leaves
                why = why if any(isinstance(other, Route) for other in routes) else each.why
        return Derived(frozenset(leaves), why) if leaves else None

    def record_unlike(self, ways: Sequence[Flow], why: str) -> None:
        """Record a read of the leaves if their routes differ; the last of ``ways`` is the join of the others."""
        if any(each.route != ways[-1].route for each in ways):
            self.record(ways, why)
