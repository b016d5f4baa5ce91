"""What orbax and tensorstore print of a save that fails, and then raise: it is told once, in a sentence."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import TracebackType

_RAISED_TOO = ("_SignalingThread.run() raised", "Failed to run", "Save Finalize thread")


def silence_failed_saves() -> Callable[[], None]:
    """Keep the tracebacks of a failed save from standard error; everything else is printed as ever.

    Returns:
      What undoes it. After a failure it is left be: threads of tensorstore go on for a while.
    """

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or not any(words in record.getMessage() for words in _RAISED_TOO)

    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        # Of tensorstore's threads, whose write ends after the event loop that gave up on it.
        if not (kind is RuntimeError and str(value) == "Event loop is closed"):
            before(kind, value, trace)

    logger = logging.getLogger("absl")

    def undo() -> None:
        logger.removeFilter(is_wanted)
        sys.excepthook = before

    logger.addFilter(is_wanted)
    sys.excepthook = hook
    return undo
