"""Output for any destination: terminals of any width and encoding, pipes, and closed pipes."""

from __future__ import annotations

import codecs
import html
import io
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

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


def table(lines: Sequence[Sequence[str]], right: Collection[str] = ()) -> str:
    """Format cells as a table, and wrap them only after blanks and slashes so that lines fit the terminal.

    The widest column is made narrower first. A terminal that is narrower than the words gets lines that are too long.

    Args:
      lines: cells, the header first.
      right: names of the columns that are aligned to the right, such as numbers.
    """
    room, cells = columns(), list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in cells]
    least = [max(len(piece.strip()) for cell in column for piece in _PIECE.findall(cell)) for column in cells]
    while room is not None and sum(widths) + 2 * (len(widths) - 1) > room:
        wide = [index for index in range(len(widths)) if widths[index] > least[index]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    wrapped = [list(map(_wrap, line, widths)) for line in lines]
    widths = [max(len(part) for cell in column for part in cell) for column in zip(*wrapped, strict=True)]
    align = [str.rjust if name in right else str.ljust for name in lines[0]]
    return "\n".join(
        "  ".join(place(part, width) for place, part, width in zip(align, parts, widths, strict=True)).rstrip()
        for line in wrapped
        for parts in itertools.zip_longest(*line, fillvalue="")
    )


def _wrap(text: str, width: int) -> list[str]:
    lines = [""]
    for piece in _PIECE.findall(text):
        if len(lines[-1] + piece) <= width:
            lines[-1] += piece
        else:
            lines.append(piece.strip())
    return lines if lines[0] or len(lines) == 1 else lines[1:]


def show_rows(rows: Sequence[Mapping[str, Any]], left: Collection[str]) -> None:
    """Print rows of equal keys as a table; the columns of ``left`` are aligned to the left, the others to the right."""
    print(table([[*rows[0]], *([str(cell) for cell in row.values()] for row in rows)], {*rows[0]} - {*left}))


class Tabular:
    """A result that prints as a table, and that a notebook shows as one; its ``repr`` is one line."""

    __slots__ = ()
    _right: ClassVar[Collection[str]] = ()

    def _lines(self) -> list[Sequence[str]]:
        """Return the cells of the table, the header first."""
        raise NotImplementedError

    def summary(self) -> str:
        """Describe the result in one line."""
        raise NotImplementedError

    def __str__(self) -> str:
        last, width = self.summary(), columns()
        last = last if width is None else textwrap.fill(last, width, break_long_words=False, break_on_hyphens=False)
        return f"{table(self._lines(), self._right)}\n{last}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def _repr_html_(self) -> str:
        header, *lines = self._lines()
        rows = "".join([_html_row("th", header), *(_html_row("td", line) for line in lines)])
        return f"<table>{rows}</table><p>{html.escape(self.summary())}</p>"


def _html_row(kind: str, cells: Sequence[str]) -> str:
    opened = f"<{kind} style='text-align:left'>"
    return f"<tr>{''.join(f'{opened}{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"
