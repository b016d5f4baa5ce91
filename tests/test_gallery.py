"""Every string computes the same numbers as when the gallery was made, and its step has the expected matmuls.

Each string runs in one of Linen, NNX and a plain function, in turn. ``python -m tests.gallery --against COMMIT``
computes every string on every backend in all three frameworks, and compares the rows with those of another commit.
"""

from __future__ import annotations

import pytest

from tests.gallery import rows
from tests.numerics import GALLERY_LOSS, GALLERY_SECOND_LOSS

OPTIMIZED = None  # the setting with which the digests were computed


def test_every_row_is_kept_for_every_environment():
    for environment, known in rows.every_environment().items():
        assert set(known) == set(rows.suite()), environment


@pytest.mark.parametrize("name", rows.suite())
def test_a_row_is_what_it_was(name: str):
    found = rows.attempt(name)
    known = rows.committed()
    if known is not None:
        assert found == known[name]
        return
    known = next(iter(rows.every_environment().values()))[name]  # another CPU or jax version changes last bits
    assert found.get("refused") == known.get("refused")
    assert found.get("served as trained") == known.get("served as trained")
    bounds = (GALLERY_LOSS, GALLERY_SECOND_LOSS)
    for loss, other, bound in zip(found.get("losses", ()), known.get("losses", ()), bounds, strict=False):
        assert loss == pytest.approx(other, rel=bound)
