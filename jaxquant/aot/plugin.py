"""Import of the function that builds the step of a config: a function of the training program, or of the user."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def load_program(program: str) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """Import a function of (config, overrides, devices) that returns (jitted step, shapes).

    Args:
      program: name of the function, ``MODULE:FUNCTION``.

    Raises:
      ModuleNotFoundError: the module does not exist.
      ValueError: the module does not have the function.
    """
    module, _, function = program.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the installed command does not search the current folder
    build = getattr(importlib.import_module(module), function, None)
    if build is None:
        raise ValueError(
            f"--program {program!r} must be MODULE:FUNCTION, but module {module!r} has no function {function!r}; pass "
            "the function that builds the step"
        )
    return build
