"""The function that builds the step of a configuration: the trainer's, or one of the user's own."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = "train.audit:program"
"""The trainer's, which a checkout has and a wheel has not; named and not imported, it lies above this package."""

_ROOT = Path(__file__).parents[2]


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
      ModuleNotFoundError: there is no such module, or ``PROGRAM`` is asked for and this is not a checkout.
      ValueError: the module has no such function.
    """
    if program == PROGRAM:
        if not (_ROOT / "train" / "audit.py").is_file():
            raise ModuleNotFoundError(
                f"the training program {PROGRAM!r} is in a checkout of jaxquant and not in the installed package; "
                "install the checkout with pip install -e, or name a function that builds your own step: --program "
                "MODULE:FUNCTION"
            )
        if sys.path[:1] != [str(_ROOT)]:
            sys.path.insert(0, str(_ROOT))  # before another module named train
    module, _, function = program.partition(":")
    build = getattr(importlib.import_module(module), function, None)
    if build is None:
        raise ValueError(
            f"--program {program!r} is not of the form MODULE:FUNCTION, or {module} has no function {function!r}"
        )
    return build
