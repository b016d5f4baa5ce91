"""Every code block of README and docs runs, or is read by the program that it is for; what they name is there."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", flags=re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [text for _, found, text in BLOCK.findall(page.read_text()) if found == language]


def pages_with(language: str) -> list[Any]:
    pages = [page for page in PAGES if page.is_file() and blocks(page, language)]
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in pages]


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page.id != "README.md"])
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page, one after the other, in an empty folder; README's one is in ``scripts/test_readme.py``."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks(page, "python")):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, f"{page.name}, block {number}", "exec"), scope)


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_yaml_is_a_config(page: Path):
    from jaxquant.core.typed import build
    from train.config import TrainConfig

    for block in blocks(page, "yaml"):
        build(TrainConfig, yaml.safe_load(block))


READ_BY: dict[str, Any] = {}


def reads(program: str) -> Any:
    def note(function: Any) -> Any:
        READ_BY[program] = function
        return function

    return note


@reads("python -m train")
def _train(words: list[str]) -> None:
    from train.__main__ import read_config

    read_config(words[0], [word for word in words[1:] if "=" in word])


@reads("python -m jaxquant")
def _jaxquant(words: list[str]) -> None:
    from jaxquant.__main__ import main

    if words[0] in ("strings", "explain"):
        assert main(words) == 0
    elif words[0] == "coverage":
        _train([word for word in words[1:] if not word.startswith("--")])
    elif words[0] == "audit":
        from jaxquant.aot.command import _parse

        options = _parse(words[1:])
        _train([options.config, *options.overrides])


def _parsed_by(module: str) -> Any:
    """Read a command line with a script's parser, and go no further."""

    def read(words: list[str]) -> None:
        import argparse
        import importlib

        class Read(Exception):
            pass

        def stop(parser: argparse.ArgumentParser, given: Any) -> Any:
            parse_known(parser, given, None)
            raise Read

        parse_known = argparse.ArgumentParser.parse_known_args
        main = importlib.import_module(module).main
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", stop)
            patch.setattr(argparse.ArgumentParser, "parse_intermixed_args", stop)
            with pytest.raises(Read):
                main(words)

    return read


for _name in ("compare", "convert", "evaluate", "export", "import", "lines", "serve"):
    READ_BY[f"scripts/{_name}.py"] = _parsed_by(f"scripts.{_name}")
READ_BY["python -m tests.gallery"] = _parsed_by("tests.gallery.__main__")

UNREAD = (
    "pip install",
    "scripts/demo.sh",
    "scripts/test.sh",
    "scripts/docs.sh",
    "source .venv",
    "printf",
    "git clone",
    "cd ",
)


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_are_read_by_their_programs(page: Path, capsys: pytest.CaptureFixture[str]):
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if not words or " ".join(words).startswith(UNREAD):
                continue
            program = " ".join(words[:3]) if words[:2] == ["python", "-m"] else words[0]
            rest = words[3:] if words[:2] == ["python", "-m"] else words[1:]
            if words[0] == "python" and words[1].startswith("examples/"):
                assert (ROOT / words[1]).is_file(), line
                continue
            assert program in READ_BY, f"{page.name}: nothing reads {line!r}"
            READ_BY[program]([word for word in rest if word not in ("|", "head")])


def test_there_is_no_other_kind_of_block():
    kinds = {found for page in PAGES if page.is_file() for _, found, _ in BLOCK.findall(page.read_text())}
    assert kinds <= {"python", "yaml", "sh", "text"}


@pytest.mark.parametrize("page", [pytest.param(p, id=p.relative_to(ROOT).as_posix()) for p in PAGES if p.is_file()])
def test_what_it_names_is_there(page: Path):
    text = page.read_text()
    named = re.findall(
        r"`((?:configs|scripts|constraints|benchmarks|tests|train|jaxquant|examples|docs)/[\w./-]*)`", text
    )
    assert [path for path in named if not (ROOT / path).exists()] == []
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_rooms_of_the_house_are_the_folders():
    rooms = re.findall(r"^\| `jaxquant/(\w+)/` \|", (ROOT / "docs/about/house.md").read_text(), re.M)
    assert sorted(rooms) == sorted(path.parent.name for path in (ROOT / "jaxquant").glob("*/__init__.py"))
