"""Output for any destination: terminals of any width and encoding, pipes, and closed pipes."""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell."""
_STAND_INS = {"×": "x", "·": "*"}
"""Replacements, of the same width, for characters in tables."""
_PIECE = re.compile(r"\s*[^\s/]*/*")
"""Parts of a cell that are never broken: words, and parts of a path including the slash after them."""


def accept_all_characters() -> None:
    """Escape characters that the terminal cannot encode and replace the signs in tables. Called by every command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="jaxquant")


def run(
    work: Callable[[], int],
    *,
    also: tuple[type[Exception], ...] = (),
    interrupted: str = "interrupted; nothing was written",
) -> int:
    """Run a command and return its exit code.

    Args:
      work: function that runs the command and returns its exit code.
      also: exceptions that are shown as a sentence, in addition to bad input and file system errors.
      interrupted: message on Ctrl-C.

    Returns:
      The exit code of ``work``; 1 if stdout was closed, 2 after an error, 130 after Ctrl-C.
    """
    accept_all_characters()
    try:
        return work()
    except BrokenPipeError:
        close_output()
        return 1
    except (ValueError, TypeError, NotImplementedError, OSError, *also) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(each, ascii(each)[1:-1]) for each in text), error.end


codecs.register_error("jaxquant", _stand_in)


def close_output() -> None:
    """Discard further output after stdout is closed."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # stdout is not a file
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def columns() -> int | None:
    """Return the maximum width of a table: COLUMNS, otherwise the terminal's columns, otherwise None, as in a pipe."""
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def fit(lines: Sequence[Sequence[str]], room: int | None) -> list[list[str]]:
    """Wrap the cells of a table only at blanks and after slashes, so that its lines fit; the widest column shrinks.

    Args:
      lines: cells, including the header.
      room: number of characters for the cells of a line, or None for no limit. A column never gets narrower than its
        longest word.
    """
    cells = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in cells]
    least = [max(len(piece.strip()) for cell in column for piece in _PIECE.findall(cell)) for column in cells]
    while room is not None and sum(widths) > room:
        wide = [index for index in range(len(widths)) if widths[index] > least[index]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return [[_wrap(cell, width) for cell, width in zip(line, widths, strict=True)] for line in lines]


def _wrap(text: str, width: int) -> str:
    lines = [""]
    for piece in _PIECE.findall(text):
        if len(lines[-1] + piece) <= width:
            lines[-1] += piece
        else:
            lines.append(piece.strip())
    return "\n".join(lines).removeprefix("\n")


def show_rows(rows: Sequence[Mapping[str, Any]], left: Collection[str]) -> None:
    """Print rows with equal keys as a table. Columns in ``left`` are aligned to the left, others to the right."""
    from rich.table import Table

    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    show(table)


def show(table: Any) -> None:
    """Print a rich table so that no word is split and lines fit the terminal if possible."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width, given = columns(), list(zip(*([column.header, *column.cells] for column in table.columns), strict=True))
    header, *lines = fit(given, None if width is None else width - 3 * len(table.columns) - 1)
    fitted = Table()
    for text, column in zip(header, table.columns, strict=True):
        fitted.add_column(text, justify=column.justify, no_wrap=True)
    for line, row in zip(lines, table.rows, strict=True):
        fitted.add_row(*map(Text, line), end_section=row.end_section)
    Console(width=1_000_000).print(fitted)
