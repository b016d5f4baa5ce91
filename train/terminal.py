"""Output that may be closed, or not know a character: neither ends a program with a traceback."""

from __future__ import annotations

import io
import os
import sys

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, as a shell has it."""


def accept_all_characters() -> None:
    """Write what the terminal cannot print as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def close_output() -> None:
    """Let what is still written go nowhere, once nobody reads standard output."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # it is no file
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
