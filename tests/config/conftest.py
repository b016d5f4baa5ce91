"""Shipped configs name files from the root of the repository."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _in_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
