"""A few hundred random configs: each is read or refused in a documented way."""

from __future__ import annotations

from tests.config.hf_fuzz import main


def test_mutated_configs_are_read_or_refused_in_words():
    found = main(300)
    assert found["read"] > 50
    assert found["ValueError"] > 50
    assert found["TypeError"] > 20
