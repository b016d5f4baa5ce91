"""Backends: each turns a recipe into ops. AQT and Qwix are imported here and nowhere else.

``jaxquant.config.backends`` is the table of them, ``load`` imports one, ``base.Backend`` says what each must do.
"""

from __future__ import annotations

import importlib

from jaxquant.backends.base import RANDOM_STREAM, Backend
from jaxquant.config.backends import BACKENDS

__all__ = ["RANDOM_STREAM", "Backend", "load"]


def load(name: str) -> Backend:
    """Import a backend, with the library that it needs.

    Args:
      name: a key of ``BACKENDS``.

    Raises:
      ImportError: its library is missing or of another series; says what to install.
    """
    return importlib.import_module(BACKENDS[name].module).BACKEND  # pyright: ignore[reportArgumentType]
