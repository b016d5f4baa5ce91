"""The function that builds the step of a configuration: the trainer's, or one of the user's own."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

PROGRAM = "jaxquant.training.audit:program"
"""Program of ``jaxquant.training``, by name: it lies above this package and is not imported by it."""


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the function which builds a step."""
    parser.add_argument(
        "--program",
        default=PROGRAM,
        metavar="MODULE:FUNCTION",
        help="builds the step: FUNCTION(config, overrides, devices) -> (jitted step, shapes) (default: %(default)s)",
    )


def load_program(program: str) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """Import a function (config, overrides, devices) -> (jitted step, shapes).

    Args:
      program: its name, ``MODULE:FUNCTION``.

    Raises:
      ModuleNotFoundError: there is no such module.
      ValueError: the module has no such function.
    """
    module, _, function = program.partition(":")
    build = getattr(importlib.import_module(module), function, None)
    if build is None:
        raise ValueError(
            f"--program {program!r} is not of the form MODULE:FUNCTION, or {module} has no function {function!r}"
        )
    return build
