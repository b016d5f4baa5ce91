"""The function that builds the step of a configuration: the training program's, or the user's own."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

PROGRAM = "jaxquant.training.audit:program"
"""Program of ``jaxquant.training``, by name: this package must not import it."""


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the option for the function that builds a step."""
    parser.add_argument(
        "--program",
        default=PROGRAM,
        metavar="MODULE:FUNCTION",
        help="builds the step: FUNCTION(config, overrides, devices) -> (jitted step, shapes) (default: %(default)s)",
    )


def load_program(program: str) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """Import a function of (config, overrides, devices) that returns (jitted step, shapes).

    Args:
      program: name of the function, ``MODULE:FUNCTION``.

    Raises:
      ModuleNotFoundError: the module does not exist.
      ValueError: the module does not have the function.
    """
    module, _, function = program.partition(":")
    build = getattr(importlib.import_module(module), function, None)
    if build is None:
        raise ValueError(
            f"--program {program!r} is not of the form MODULE:FUNCTION, or {module} has no function {function!r}"
        )
    return build
