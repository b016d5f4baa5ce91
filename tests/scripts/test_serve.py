"""The serve command: streaming, order, refusals on stderr with status 1, and errors before it starts."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest
import yaml

from jaxquant.cli import main
from jaxquant.training import commands
from jaxquant.training.config import TrainConfig
from tests.train.conftest import CI_CONFIG, train

WORDS = ["--max-new-tokens", "4", "--slots", "2", "--prefill-chunk", "8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "corpus").mkdir()
    for document in range(12):
        (folder / "corpus" / f"{document}.txt").write_text(f"item {document} of twelve\n" * 20)
    data = {"dataset": "text", "dataset_path": str(folder / "corpus"), "steps": 1, "learning_rate": 1e-2}
    train(TrainConfig(**yaml.safe_load(CI_CONFIG.read_text()) | data), folder / "run")
    return folder / "run"


def files(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_one_prompt_streams_and_leaves_the_run_as_it_was(run, capsys, monkeypatch):
    before, written = files(run), []
    monkeypatch.setattr("sys.stdout.write", lambda text: written.append(text), raising=False)
    assert main(["serve", str(run), "--prompt", "item", *WORDS]) == 0
    monkeypatch.undo()
    assert written[0].startswith("item")
    assert len(written) == 5  # four tokens, and the end of the line that was buffered
    assert files(run) == before


def test_prompts_come_in_order_and_refused_ones_last(run, tmp_path, capsys):
    # The second prompt ends after one token, long before the first.
    (tmp_path / "prompts").write_text(f"item\n{'z' * 30}\n\n{'x' * 40}\nitem 2 of\n")
    assert main(["serve", str(run), "--prompts-file", str(tmp_path / "prompts"), "--kv-cache", "int4", *WORDS]) == 1
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("--- ")] == [
        f"--- {tmp_path}/prompts line {number}" for number in (1, 2, 5)
    ]
    assert "\x1b" not in out
    assert err.splitlines() == [
        f"error: {tmp_path}/prompts line 3 is empty; provide at least one token",
        f"error: {tmp_path}/prompts line 4 has 41 tokens, but the limit is 31; shorten it or raise max_length",
    ]
    (tmp_path / "prompts").write_text("\n")
    assert main(["serve", str(run), "--prompts-file", str(tmp_path / "prompts"), *WORDS]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/prompts line 1 is empty; provide at least one token\n"


def test_standard_input_and_repeated_prompts_give_the_same(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"item\nitem 7")))
    assert main(["serve", str(run), "--prompts-file", "-", *WORDS]) == 0
    piped = capsys.readouterr().out
    assert main(["serve", str(run), "--prompt", "item", "--prompt", "item 7", *WORDS]) == 0
    assert capsys.readouterr().out == piped.replace("standard input line", "prompt")


@pytest.fixture
def told(run, capsys):
    """Return stderr of a command that exits with status 2 and prints nothing to stdout."""

    def call(*words: str, folder: Path = run) -> str:
        assert main(["serve", str(folder), *words, *WORDS]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err.removeprefix("error: ").removesuffix("\n")

    return call


def test_a_bad_option_and_prompts_that_cannot_be_read_are_named(tmp_path, told, monkeypatch):
    for name, data in (("latin", b"item\ncaf\xe9\n"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
    path, latin = str(tmp_path), "is not UTF-8 (byte 3); save it as UTF-8"
    for words, message in (
        (("--prompt", "item", "--top-p", "1.5"), "top_p 1.5 must be above 0 and at most 1"),
        (("--prompt", "item", "--temperature", "-1"), "temperature -1.0 must not be negative"),
        (
            ("--prompts-file", f"{path}/absent"),
            f"--prompts-file {path}/absent cannot be read: No such file or directory",
        ),
        (("--prompts-file", f"{path}/latin"), f"{path}/latin line 2 {latin}"),
        (("--prompts-file", f"{path}/empty"), f"{path}/empty contains no prompt; write one prompt per line"),
        (("--prompt", os.fsdecode(b"caf\xe9")), f"prompt 1 {latin}"),
    ):
        assert told(*words).startswith(message)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert told("--prompts-file", "-") == f"standard input line 1 {latin}"


def test_a_folder_that_is_no_run_is_an_error(run, tmp_path, told):
    def of(folder: Path) -> str:
        return told("--prompt", "item", folder=folder)

    assert "is not a folder; pass the folder of a run" in of(tmp_path / "absent")
    assert "has no config.yml or jaxquant.json; pass the folder of a run" in of(tmp_path)
    shutil.copy(run / "config.yml", tmp_path)
    assert "has no checkpoint of `jaxquant train`; let it save one" in of(tmp_path)
    shutil.copytree(run, tmp_path / "other")
    text = (run / "config.yml").read_text().replace("num_layers: 2", "num_layers: 2\nbanana: 1")
    (tmp_path / "other/config.yml").write_text(text)
    assert "banana" in of(tmp_path / "other")


def test_a_reader_that_leaves_early_is_no_traceback(run, monkeypatch):
    def leave(*arguments, **options):
        raise BrokenPipeError

    monkeypatch.setattr(commands.Printer, "on_done", leave)
    redirected = []
    monkeypatch.setattr(os, "dup2", lambda *files: redirected.append(files))
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1, raising=False)
    assert main(["serve", str(run), "--prompt", "a", "--prompt", "b", *WORDS]) == 1
    assert redirected
