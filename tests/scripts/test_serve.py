"""The command: streaming, order, refusals on stderr with status 1, and clear errors for what cannot start."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest
import yaml

from tests.train.conftest import CI_CONFIG, train
from train import cli
from train.__main__ import main
from train.config import TrainConfig

WORDS = ["--max-new-tokens", "4", "--slots", "2", "--prefill-chunk", "8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "corpus").mkdir()
    for document in range(12):
        (folder / "corpus" / f"{document}.txt").write_text(f"item {document} of twelve\n" * 20)
    fields = yaml.safe_load(CI_CONFIG.read_text())
    fields |= {"learning_rate": 1e-2, "dataset": "text", "dataset_path": str(folder / "corpus"), "steps": 2}
    train(TrainConfig(**fields), folder / "run")
    return folder / "run"


def files(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_one_prompt_streams_and_leaves_the_run_as_it_was(run, capsys, monkeypatch):
    before, written = files(run), []
    monkeypatch.setattr("sys.stdout.write", lambda text: written.append(text), raising=False)
    assert main(["serve", str(run), "--prompt", "item", *WORDS]) == 0
    monkeypatch.undo()
    assert written[0].startswith("item")
    assert len(written) == 5  # four tokens, and what was held back with the end of the line
    assert files(run) == before


def test_prompts_come_in_order_and_refused_ones_last(run, tmp_path, capsys):
    # The second is done after one token, long before the first.
    (tmp_path / "prompts").write_text(f"item\n{'z' * 30}\n\n{'x' * 40}\nitem 2 of\n")
    assert main(["serve", str(run), "--prompts-file", str(tmp_path / "prompts"), "--kv-cache", "int4", *WORDS]) == 1
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("--- ")] == [
        f"--- {tmp_path}/prompts line {number}" for number in (1, 2, 5)
    ]
    assert "\x1b" not in out
    assert err.splitlines() == [
        f"error: {tmp_path}/prompts line 3 is empty; give it at least one token",
        f"error: {tmp_path}/prompts line 4 has 41 tokens, and the limit is 31; shorten it or raise max_length",
    ]


def test_standard_input_and_repeated_prompts_give_the_same(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"item\nitem 7")))
    assert main(["serve", str(run), "--prompts-file", "-", *WORDS]) == 0
    piped = capsys.readouterr().out
    assert main(["serve", str(run), "--prompt", "item", "--prompt", "item 7", *WORDS]) == 0
    assert capsys.readouterr().out == piped.replace("standard input line", "prompt")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-p", "0"], "top_p 0.0 must lie above 0 and not above 1"),
        (["--top-p", "1.5"], "top_p 1.5 must lie above 0 and not above 1"),
        (["--temperature", "-1"], "temperature -1.0 must not be negative"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be at least 1"),
    ],
)
def test_a_bad_option_is_an_error(run, words, message, capsys):
    assert main(["serve", str(run), "--prompt", "item", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, message in err, err.count("\n")) == ("", True, 1)


def test_prompts_that_cannot_be_read_are_named(run, tmp_path, capsys):
    (tmp_path / "prompts").write_bytes(b"item\ncaf\xe9\n")
    absent = tmp_path / "absent"
    assert main(["serve", str(run), "--prompts-file", str(absent), *WORDS]) == 2
    assert f"--prompts-file {absent} cannot be read: [Errno 2] No such file" in capsys.readouterr().err
    for words, named in (
        (["--prompts-file", str(tmp_path / "prompts")], f"{tmp_path}/prompts cannot be read: 'utf-8' codec"),
        (["--prompt", os.fsdecode(b"caf\xe9")], "'utf-8' codec can't encode"),
    ):
        assert main(["serve", str(run), *words, *WORDS]) == 2
        out, err = capsys.readouterr()
        assert (out, named in err, err.count("\n")) == ("", True, 1)


def test_a_folder_that_is_no_run_is_an_error(run, tmp_path, capsys):
    def told(folder: Path) -> str:
        assert main(["serve", str(folder), "--prompt", "item"]) == 2
        return capsys.readouterr().err

    assert "does not exist; give the folder of a run" in told(tmp_path / "absent")
    assert "has neither config.yml nor jaxquant.json; give the folder of a run" in told(tmp_path)
    shutil.copy(run / "config.yml", tmp_path)
    assert "has no checkpoint; let it save one" in told(tmp_path)
    copy = tmp_path / "other"
    shutil.copytree(run, copy)
    (copy / "config.yml").write_text(
        (run / "config.yml").read_text().replace("num_layers: 2", "num_layers: 2\nbanana: 1")
    )
    assert "banana" in told(copy)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert main(["serve", str(run), "--prompts-file", str(empty)]) == 2
    assert f"{empty} holds no prompt; write one a line" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_traceback(run, monkeypatch, capsys):
    def leave(*arguments, **options):
        raise BrokenPipeError

    monkeypatch.setattr(cli.Printer, "on_done", leave)
    redirected = []
    monkeypatch.setattr(os, "dup2", lambda *files: redirected.append(files))
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1, raising=False)
    assert main(["serve", str(run), "--prompt", "a", "--prompt", "b", *WORDS]) == 1
    assert redirected
