"""Option types and decorators that all commands of the command line share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import click

from jaxquant import terminal
from jaxquant.training import report_missing_library

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
"""Settings of all commands."""


class Names(click.Choice):
    """Names that a module defines; the module is imported only when the option is read or described.

    Args:
      place: tuple or dict of the names, as ``MODULE:ATTRIBUTE``.
    """

    def __init__(self, place: str):
        self._place, self.case_sensitive = place, True

    @functools.cached_property
    def choices(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        module, _, attribute = self._place.partition(":")
        return tuple(filter(None, getattr(importlib.import_module(module), attribute)))


def exit_code(*errors: type[Exception], interrupted: str) -> Callable[[Callable[..., int | None]], Callable[..., int]]:
    """Return a decorator that makes a command print an error as one line and return its exit code.

    Args:
      errors: errors that are printed as one line, in addition to errors of input and of the file system.
      interrupted: message after Ctrl-C.
    """

    def decorate(command: Callable[..., int | None]) -> Callable[..., int]:
        @functools.wraps(command)
        def call(**options: Any) -> int:
            def work() -> int:
                with report_missing_library():
                    return command(**options) or 0

            return terminal.run(work, also=errors, interrupted=interrupted)

        return call

    return decorate
