"""Backends: each backend runs a recipe with the ops of one library. AQT and Qwix are imported only here.

``jaxquant.config.backends`` is the table of backends, ``load`` imports a backend, and ``base.Backend`` is the
interface.
"""

from __future__ import annotations

import functools
import importlib

from jaxquant.backends.base import RANDOM_STREAM, Backend

__all__ = ["RANDOM_STREAM", "Backend", "load"]


@functools.lru_cache
def load(name: str, *, is_completed: bool = False) -> Backend:
    """Import a backend and the library that it needs.

    Args:
      name: key of ``BACKENDS``.
      is_completed: whether native computes the contractions that the library does not support.

    Raises:
      ImportError: the library is missing or too old; the error has the command that installs it.
    """
    backend = importlib.import_module(f"jaxquant.backends.{name}").BACKEND
    return backend.completed_by(load("native")) if is_completed and name != "native" else backend
