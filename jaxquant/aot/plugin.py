"""The function that builds the step of a configuration: the trainer's, or one of the user's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def load_program(program: str) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """Import a function (config, overrides, devices) -> (jitted step, shapes).

    Args:
      program: its name, ``MODULE:FUNCTION``.

    Raises:
      ModuleNotFoundError: there is no such module.
      ValueError: the module has no such function.
    """
    module, _, function = program.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # an installed command does not look in the current folder
    build = getattr(importlib.import_module(module), function, None)
    if build is None:
        raise ValueError(
            f"--program {program!r} is not of the form MODULE:FUNCTION, or {module} has no function {function!r}"
        )
    return build
