"""Scripts end quietly on Ctrl-C and on a terminal that cannot print a character."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxquant import terminal
from scripts import convert, evaluate, serve
from train import __main__ as training

MAINS: dict[str, tuple[Any, str, list[str]]] = {
    "convert": (convert.main, "scripts.convert.convert_run", ["--checkpoint", "a", "--out", "b"]),
    "serve": (serve.main, "scripts.serve.open_served", ["a", "--prompt", "b"]),
    "evaluate": (evaluate.main, "scripts.evaluate.contenders", ["a"]),
    "train": (training.main, "train.__main__.read_config", ["a.yml"]),
}


@pytest.mark.parametrize("name", MAINS)
def test_ctrl_c_is_no_traceback(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    main, place, words = MAINS[name]
    monkeypatch.setattr(place, interrupt)
    assert main(words) == terminal.INTERRUPTED
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["convert", "serve", "train"])
def test_a_closed_output_is_no_traceback(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def close(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    main, place, words = MAINS[name]
    monkeypatch.setattr(place, close)
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # which is no file that could be closed for the tests after this
    assert main(words) == 1


def test_a_character_that_a_terminal_has_not_is_an_escape(monkeypatch: pytest.MonkeyPatch):
    bytes_ = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_, encoding="ascii"))
    terminal.accept_all_characters()
    print("naïve – ✓")
    sys.stdout.flush()
    assert bytes_.getvalue() == b"na\\xefve \\u2013 \\u2713\n"
