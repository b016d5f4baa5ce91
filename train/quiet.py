"""What orbax and tensorstore print of a save that fails, and then raise: it is told once, in a sentence."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import TracebackType

_RAISED_TOO = {
    "absl": ("_SignalingThread.run() raised", "Failed to run", "Save Finalize thread"),
    "asyncio": ("exception was never retrieved",),  # of the writes beside the one that failed first
}
"""By logger, what its records of a failed save hold."""


def silence_failed_saves() -> Callable[[], None]:
    """Keep the tracebacks of a failed save from standard error; everything else is printed as ever.

    Returns:
      What undoes it. After a failure it is left be: threads of tensorstore go on for a while.
    """

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or not any(
            words in record.getMessage() for words in _RAISED_TOO[record.name]
        )

    before, before_unraisable = sys.excepthook, sys.unraisablehook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not _is_late(value):
            before(kind, value, trace)

    def hook_unraisable(what: sys.UnraisableHookArgs) -> None:
        if not _is_late(what.exc_value):
            before_unraisable(what)

    loggers = [logging.getLogger(name) for name in _RAISED_TOO]

    def undo() -> None:
        for logger in loggers:
            logger.removeFilter(is_wanted)
        sys.excepthook, sys.unraisablehook = before, before_unraisable

    for logger in loggers:
        logger.addFilter(is_wanted)
    sys.excepthook, sys.unraisablehook = hook, hook_unraisable
    return undo


def _is_late(error: BaseException | None) -> bool:
    """Whether this comes from tensorstore's threads, whose write ends after the event loop that gave up on it."""
    return type(error) is RuntimeError and str(error) == "Event loop is closed"
