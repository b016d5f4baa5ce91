"""The attacks themselves: a few of each that is quick, and that they notice what they look for."""

from __future__ import annotations

import pytest

from tests.attacks.exports import attack_exports
from tests.attacks.inputs import attack_configs
from tests.attacks.quantizations import attack_quantizations
from tests.attacks.tally import Tally


@pytest.mark.parametrize(
    ("attack", "count", "least"),
    [(attack_configs, 300, 10), (attack_quantizations, 300, 150), (attack_exports, 400, 10)],
)
def test_what_is_mutated_is_read_or_refused(attack, count, least):
    tally = attack(count, seed=7)
    assert tally.wrong == []
    assert tally.read >= least
    assert tally.refused > count / 2
    assert tally.slowest_s < 2


def test_an_attack_notices_what_is_not_documented():
    tally = Tally()
    for error in (KeyError("x"), ValueError(""), UnicodeDecodeError("utf-8", b"x", 0, 1, "no"), ValueError("x" * 3000)):
        tally.attempt("it", lambda error=error: (_ for _ in ()).throw(error))
    tally.attempt("it", lambda: None)
    assert (len(tally.wrong), tally.read, tally.refused) == (4, 1, 0)
