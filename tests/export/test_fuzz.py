"""Mutated checkpoints are read as another reader reads them, or refused in words; ``tests.export.fuzz`` tries many."""

from tests.export.fuzz import main


def test_mutated_checkpoints_are_read_or_refused_in_words():
    found = main(400)
    assert found["ValueError"] > 150
    assert found["read"] > 10
