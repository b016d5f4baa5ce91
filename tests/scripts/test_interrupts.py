"""Scripts end quietly on Ctrl-C and on a terminal that cannot print a character."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from jaxquant import terminal
from train.__main__ import main

COMMANDS: dict[str, list[str]] = {
    "train.conversion.convert_run": ["convert", "a", "--out", "b"],
    "train.cli.open_served": ["serve", "a", "--prompt", "b"],
    "train.serving.contenders": ["evaluate", "a"],
    "train.__main__.read_config": ["a.yml"],
}


@pytest.mark.parametrize("place", COMMANDS)
def test_neither_ctrl_c_nor_a_closed_output_is_a_traceback(place: str, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    def ended_by(error: type[BaseException]) -> int:
        monkeypatch.setattr(place, lambda *_, **__: (_ for _ in ()).throw(error))
        return main(COMMANDS[place])

    assert ended_by(KeyboardInterrupt) == terminal.INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # no file that could be closed for the tests after this
    assert ended_by(BrokenPipeError) == 1


def test_a_character_that_a_terminal_has_not_is_an_escape(monkeypatch: pytest.MonkeyPatch):
    bytes_ = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_, encoding="ascii"))
    terminal.accept_all_characters()
    print("naïve – ✓")
    sys.stdout.flush()
    assert bytes_.getvalue() == b"na\\xefve \\u2013 \\u2713\n"
