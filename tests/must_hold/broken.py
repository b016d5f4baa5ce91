"""Check that a test fails if its property is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest


def fails_when_broken(owner: Any, attribute: str, broken: Any, check: Callable[[], None]) -> None:
    """Run a check with ``owner.attribute`` replaced, and require that it fails."""
    jax.clear_caches()  # earlier traces do not contain the replacement
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, broken)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check()
    jax.clear_caches()
