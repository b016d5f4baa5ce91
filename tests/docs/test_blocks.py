"""Every code block of README and docs runs or is parsed by its program, and every name in it exists."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from jaxquant import RECIPES
from jaxquant.bench import chart
from jaxquant.cli import main, program
from jaxquant.config.explain import poisoned_tensors
from jaxquant.core.typed import build
from jaxquant.training.config import TrainConfig
from jaxquant.training.start import read_config
from scripts import pages

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", flags=re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [text for _, found, text in BLOCK.findall(page.read_text()) if found == language]


def pages_with(language: str) -> list[Any]:
    return [pytest.param(p, id=p.relative_to(ROOT).as_posix()) for p in PAGES if p.is_file() and blocks(p, language)]


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the blocks of a page in order, in an empty folder; README's block prints the text below it."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page"}
    printed = io.StringIO()
    for number, block in enumerate(blocks(page, "python")):
        libraries = re.findall(r"^(?:import|from) (equinox|haiku|keras|maxtext)\b", block, re.M)
        if not all(map(importlib.util.find_spec, libraries)):  # not in this environment
            continue
        with contextlib.redirect_stdout(printed):
            exec(compile(block, f"{page.name}, block {number}", "exec"), scope)
    if page.name == "README.md":
        loss, *coverage = printed.getvalue().splitlines()
        assert float(loss.removeprefix("loss ")) < 0.1  # the loss of the first step is about 1
        assert [line.rstrip() for line in blocks(page, "text")[0].splitlines()[1:]] == coverage


def test_every_public_name_has_one_entry_on_an_api_page():
    names, shown = pages.public_names(), pages.examples().keys()
    written = [pages.on_page_markdown((ROOT / f"docs/api/{page}.md").read_text()) for page in names]
    entries = re.findall("^::: (.*)$", "\n".join(written), re.M)
    assert sorted(entries) == sorted(set().union(*names.values()))
    assert shown <= {*entries, *names}
    assert [name for name in entries if name not in shown and "compat" not in name] == []


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_examples_of_an_api_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": page}
    for heading, text in pages.examples().items():
        if heading in (page, *pages.public_names()[page]) and "```python\n" in text:  # a block with a title is not run
            exec(compile(text.strip("`").removeprefix("python"), heading, "exec"), scope)


def test_every_option_has_a_text_in_its_table():
    assert all(map(pages.options, pages.OPTIONS))  # raises an error for a field without a text


def strings_table() -> str:
    """Return the table of recipes in the form of the docs."""
    groups: dict[int, Any] = {}
    for name, row in RECIPES.items():
        groups.setdefault(id(row), (row, []))[1].append(f"`{name}`" if name else '`""`')
    titles = "| `quantization` | numerics | `auto` | other backends | tensors with one scale | batch invariant to |"
    lines = [titles, "|---" * 6 + "|"]
    for row, names in groups.values():
        poisoned, size = ([], None) if row.recipe is None else (poisoned_tensors(row.recipe), row.recipe)
        size = [f"{size.exact_contraction_size:,}"] if size and size.is_batch_invariant else []
        cells = [names, [row.summary], [row.auto], row.backends[1:], poisoned, size]
        lines.append("".join(f"| {', '.join(cell)} " if any(cell) else "|" for cell in cells) + "|")
    return "\n".join(lines)


def test_the_table_of_strings_and_the_chart_are_current():
    page = (ROOT / "docs/guide/choosing.md").read_text()
    assert strings_table() in page, f"replace the table of docs/guide/choosing.md with:\n{strings_table()}"
    assert chart.draw() == (ROOT / "docs/images/speed.svg").read_text(), chart.__doc__


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_yaml_is_a_config(page: Path):
    for block in blocks(page, "yaml"):
        build(TrainConfig, yaml.safe_load(block))


def _train(words: list[str]) -> None:
    _jaxquant(words if words[0] in program.commands else ["train", *words])


def _jaxquant(words: list[str]) -> None:
    """Run a command if it only prints; otherwise parse its arguments and read its configuration."""
    if words[0] in ("strings", "explain") or words[0].startswith("-"):
        assert main(words) == 0
        return
    command, *rest = [program.commands[words[0]], *words[1:]]
    if isinstance(command, click.Group):
        command, *rest = [command.commands[rest[0]], *rest[1:]]
    params = command.make_context("", rest).params
    if "overrides" in params:
        read_config(params["config"], params["overrides"])


def _parsed_by(module: str) -> Any:
    """Parse a command line with the parser of a script, without running the script."""

    def read(words: list[str]) -> None:
        def stop(parser: argparse.ArgumentParser, given: Any) -> Any:
            parser.parse_known_args(given)
            raise InterruptedError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", stop)
            with pytest.raises(InterruptedError):
                importlib.import_module(module).main(words)

    return read


READ_BY = {
    "python -m train": _train,
    "python -m jaxquant": _jaxquant,
    "jaxquant": _jaxquant,
    "scripts/lines.py": _parsed_by("scripts.lines"),
    "python -m tests.gallery": _parsed_by("tests.gallery.__main__"),
}
UNREAD = (
    *("pip install", "git clone", "source .venv", "printf", "cd ", "eval "),
    *("scripts/demo.sh", "scripts/test.sh", "scripts/docs.sh"),
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


def test_the_rooms_of_the_house_are_the_folders_with_their_files():
    rooms = re.findall(r"^\| `(\w+)/` \| [^|]* \| (.*) \|$", (ROOT / "docs/about/house.md").read_text(), re.M)
    assert sorted(room for room, _ in rooms) == sorted(path.parent.name for path in ROOT.glob("jaxquant/*/__init__.py"))
    for room, files in rooms:
        named = set(re.findall(r"`(\w+)/?`", files))
        assert named >= {path.stem for path in (ROOT / "jaxquant" / room).glob("[!_]*.py")}, room
        assert named <= {path.stem for path in (ROOT / "jaxquant" / room).rglob("*") if path.stem}, room
