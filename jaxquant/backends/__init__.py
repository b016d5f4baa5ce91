"""Backends: each turns a recipe into ops. AQT and Qwix are imported here and nowhere else.

``jaxquant.config.backends`` is the table of them, ``load`` imports one, ``base.Backend`` says what each must do.
"""

from __future__ import annotations

import functools
import importlib

from jaxquant.backends.base import RANDOM_STREAM, Backend

__all__ = ["RANDOM_STREAM", "Backend", "load"]


@functools.lru_cache
def load(name: str, *, is_completed: bool = False) -> Backend:
    """Import a backend, with the library that it needs.

    Args:
      name: a key of ``BACKENDS``.
      is_completed: whether native computes the contractions for which the library has no op.

    Raises:
      ImportError: its library is missing or too old; names the command that installs it.
    """
    backend = importlib.import_module(f"jaxquant.backends.{name}").BACKEND
    return backend.completed_by(load("native")) if is_completed and name != "native" else backend
