"""Training checkpoints have sums: no flipped bit is used, and what cannot be used is passed over with a message."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxquant.core.typed import to_mapping
from tests.train.conftest import read_lines
from train import processes, sums
from train.checkpoint import Checkpoints, write_config
from train.config import TrainConfig
from train.conversion import open_parameters
from train.metrics import Metrics
from train.report import load_run
from train.step import TrainState
from train.sums import config_of

PARAMS = {"layers": {"kernel": jnp.arange(64, dtype=jnp.float32).reshape(2, 4, 8)}, "norm": {"scale": jnp.ones(3)}}
POSITION = {"stream": {"corpus": "abc"}, "position": {"next": 7}}


def make_state(step: int, optimizer: optax.GradientTransformation | None = None) -> TrainState:
    optimizer = optimizer or optax.chain(optax.identity(), optax.adamw(1e-3))
    params = jax.tree.map(lambda x: x + step, PARAMS)
    return TrainState(jnp.int32(step), params, optimizer.init(params), {"amax": jnp.full(4, 2.0)})


ABSTRACT = jax.eval_shape(lambda: make_state(0))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 1 and 2; not to be changed."""
    run = tmp_path_factory.mktemp("sums") / "run"
    with Checkpoints(run, TrainConfig()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), POSITION)
    return run


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


def restore(run: Path) -> tuple[tuple[TrainState, Any] | None, list[str]]:
    said: list[str] = []
    with Checkpoints(run, TrainConfig()) as checkpoints:
        return checkpoints.restore(ABSTRACT, said.append), said


def step_of(run: Path) -> int:
    found, _ = restore(run)
    assert found is not None
    return int(found[0].step)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_every_file_has_its_sum_and_what_is_whole_comes_back(written: Path):
    folder = written / "checkpoints/2"
    named = json.loads((folder / sums.NAME).read_text())["files"]
    assert sorted(named) == [path.relative_to(folder).as_posix() for path in files_of(folder) if path.name != sums.NAME]
    sums.check_sums(folder)
    found, said = restore(written)
    assert found is not None
    assert said == []
    assert found[1] == POSITION
    bits, wanted = (jax.tree.map(lambda x: np.asarray(x).tobytes(), tree) for tree in (found[0], make_state(2)))
    assert bits == wanted


def test_no_flipped_bit_is_silent(run: Path):
    folder = run / "checkpoints/2"
    for path in files_of(folder):
        bits = 8 * path.stat().st_size
        for bit in {0, bits // 3, bits // 2 + 1, bits - 1} if bits else ():
            flip(path, bit)
            with pytest.raises(ValueError, match=path.name):
                sums.check_sums(folder)
            flip(path, bit)
    sums.check_sums(folder)


def _data(folder: Path) -> Path:
    """Return a file that holds arrays."""
    return max(files_of(folder / "state/ocdbt.process_0"), key=lambda path: path.stat().st_size)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit of an array": lambda folder: flip(_data(folder), 200),
    "a bit of the data position": lambda folder: flip(folder / "data/metadata", 30),
    "a bit of the sums": lambda folder: flip(folder / sums.NAME, 400),
    "no sums": lambda folder: (folder / sums.NAME).unlink(),
    "sums that are no table": lambda folder: (folder / sums.NAME).write_text('{"files": [1]}'),
    "a file too many": lambda folder: (folder / "state/more").write_text("x"),
    "the largest file cut": lambda folder: cut(_data(folder)),
    "the largest file gone": lambda folder: _data(folder).unlink(),
    "tree cut": lambda folder: cut(folder / "state/_METADATA"),
    "data position gone": lambda folder: shutil.rmtree(folder / "data"),
    "a file that is a link": lambda folder: [
        shutil.copy(_data(folder), folder.parent.parent / "elsewhere"),
        link(_data(folder), folder.parent.parent / "elsewhere"),
    ],
}


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def link(path: Path, target: Path) -> None:
    path.unlink()
    os.symlink(target, path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_passed_over_with_a_message_by_all_that_read(run: Path, damage: str):
    DAMAGES[damage](run / "checkpoints/2")
    said: list[str] = []
    assert open_parameters(run, say=said.append).step == 1  # convert, serve, evaluate
    assert said[0].startswith(f"checkpoint 2 in {run}/checkpoints does not open (")
    with pytest.raises(ValueError, match=r"checkpoint 2 in .* does not open"):
        open_parameters(run, step=2)
    found, said = restore(run)
    assert found is not None
    assert int(found[0].step) == 1
    assert said[0].startswith(f"checkpoint 2 does not load ({run}/checkpoints/2/")
    assert said[1] == f"moved checkpoint 2 to {run}/unreadable_checkpoints/2"
    DAMAGES[damage](run / "checkpoints/1")
    with pytest.raises(ValueError, match=r"none of the checkpoints \[1\]"):
        open_parameters(run, say=said.append)
    with pytest.raises(ValueError, match=r"none of the checkpoints \[1\]"):
        restore(run)


def test_a_checkpoint_gets_its_name_with_its_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that was killed while it was summed is none, and orbax clears it away."""
    named = []
    write = sums.write_sums
    monkeypatch.setattr(sums, "write_sums", lambda folder: [named.append(folder.name), write(folder)])
    with Checkpoints(tmp_path, TrainConfig()) as checkpoints:
        checkpoints.save(1, make_state(1), None)
        checkpoints.wait()
    assert named[0].startswith("1.")
    assert (tmp_path / "checkpoints/1" / sums.NAME).is_file()


def test_files_are_summed_in_shares(run: Path):
    """Each process of a run reads its part; together they read all."""
    folder = run / "checkpoints/2"
    flip(_data(folder), 99)
    found = []
    for share in range(3):
        try:
            sums.check_sums(folder, share, 3)
        except ValueError:
            found.append(share)
    assert len(found) == 1


# What a checkpoint knows of its run.


def made_with(folder: Path, **fields: Any) -> Path:
    """A run folder with its config.yml and checkpoints of steps 1 and 2."""
    config = TrainConfig(**fields)
    with Checkpoints(folder, config) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), POSITION)
    write_config(folder, config)
    return folder


def resume(run: Path, config: TrainConfig) -> tuple[Checkpoints, list[str]]:
    """Go on as ``train.loop`` does, up to the first step."""
    said: list[str] = []
    with Checkpoints(run, config) as checkpoints:
        assert checkpoints.restore(ABSTRACT, said.append) is not None
    return checkpoints, said


def test_what_may_differ_is_told(tmp_path: Path):
    run = made_with(tmp_path / "run")
    assert resume(run, TrainConfig())[1] == []
    _, said = resume(run, TrainConfig(steps=2000, log_every=3, run_dir="elsewhere"))
    assert said == [
        "steps is 2000, it was 1000 when checkpoint 2 was made",
        "log_every is 3, it was 10 when checkpoint 2 was made",
    ]


def test_a_learning_rate_changes_with_the_next_checkpoint(tmp_path: Path):
    run, slower = made_with(tmp_path / "run"), TrainConfig(learning_rate=1e-4)
    checkpoints, said = resume(run, slower)
    assert said == []
    assert checkpoints.changes == {"learning_rate": (1e-3, 1e-4)}
    assert resume(run, TrainConfig())[0].changes == {}
    with Checkpoints(run, slower) as checkpoints:
        checkpoints.restore(ABSTRACT, said.append)
        checkpoints.save(3, make_state(3), POSITION)
    assert resume(run, slower)[0].changes == {}
    assert config_of(run / "checkpoints/3") == slower


def test_what_a_branch_that_is_gone_wrote_goes_with_it(tmp_path: Path):
    with Metrics(tmp_path, TrainConfig(tensorboard=False, health_every=1), 4) as metrics:
        metrics.changed(2, {"weight_decay": (0.1, 0.2)})
        metrics.health({"step": 4}, {"lowest": 1.0})
        metrics.changed(4, {"learning_rate": (1e-3, 5e-4)})
        metrics.health({"step": 5}, {"lowest": 2.0})
    with Metrics(tmp_path, TrainConfig(tensorboard=False), 4) as metrics:
        metrics.changed(4, {})
    kept = [{"step": 2, "changed": {"weight_decay": [0.1, 0.2]}}, {"step": 4, "health/lowest": 1.0}]
    assert read_lines(tmp_path) == kept
    assert [sums.read_signed(line) for line in (tmp_path / "health.jsonl").open("rb")] == [{"step": 4}]


def test_a_checkpoint_that_knows_no_config_is_refused(tmp_path: Path):
    run = made_with(tmp_path / "run", seed=3)
    for step in (1, 2):
        folder = run / f"checkpoints/{step}"
        position = json.loads((folder / "data/metadata").read_text())
        (folder / "data/metadata").write_text(json.dumps({k: v for k, v in position.items() if k != "config"}))
        sums.write_sums(folder)
    for read in (lambda: open_parameters(run, say=print), lambda: resume(run, TrainConfig(seed=3))):
        with pytest.raises(ValueError, match=r"does not say what configuration made it; commit .* still reads it"):
            read()


def test_a_file_in_the_place_of_checkpoints_is_refused(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ValueError, match=r"/checkpoints is not a folder; move it away, or choose another run_dir$"):
        Checkpoints(tmp_path, TrainConfig())


def test_damage_that_another_process_found_is_told(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "all_agree", lambda mine: False)
    with pytest.raises(ValueError, match=r"loads \(damage found by another process; see its output\)"):
        restore(run)


def test_a_process_that_is_not_the_first_prints_the_damage_that_it_found(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(processes, "is_main", lambda: False)
    (run / "checkpoints/2" / sums.NAME).unlink()
    assert step_of(run) == 1
    assert f"checkpoint 2 is damaged: {run}/checkpoints/2/sums.json is gone" in capsys.readouterr().err


def test_no_bit_of_config_yml_decides_what_is_read(tmp_path: Path):
    """What is compared goes by the checkpoint's own; what computes with its parameters names what differs."""
    run = made_with(tmp_path / "run", quantization="int8")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    path, expected = run / "config.yml", open_parameters(run).config
    assert expected == TrainConfig(quantization="int8")
    path.write_text(path.read_text().replace("rope_theta: 500000.0", "rope_theta: 900000.0"))
    with pytest.raises(ValueError, match=r"rope_theta: 500000.0 in the checkpoint, 900000.0 in config.yml"):
        open_parameters(run)
    assert load_run(run, "run").config == to_mapping(expected)


def test_no_flipped_bit_of_a_recorded_configuration_is_silent(run: Path):
    path = run / "checkpoints/2/data/metadata"
    expected = config_of(run / "checkpoints/2")
    for bit in range(0, 8 * path.stat().st_size, 7):
        flip(path, bit)
        with pytest.raises(ValueError, match="data/metadata is damaged"):
            config_of(run / "checkpoints/2")
        flip(path, bit)
    assert config_of(run / "checkpoints/2") == expected


def test_a_tokenizer_that_is_another_now_is_refused(tmp_path: Path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    run = made_with(tmp_path / "run", tokenizer_path=str(tokenizer))
    assert open_parameters(run).step == 2
    tokenizer.write_text("{ }")
    for read in (lambda: open_parameters(run), lambda: resume(run, TrainConfig(tokenizer_path=str(tokenizer)))):
        with pytest.raises(ValueError, match=r"was made with tokenizer_path .*, which is another file now; put it bac"):
            read()


def test_a_flipped_bit_of_a_line_shows():
    row = {"step": 3, "loss": 1.25, "name": "é"}
    text = sums.signed(row).encode()
    assert sums.read_signed(text + b"\n") == row
    for bit in range(8 * len(text)):
        damaged = bytearray(text)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found = sums.read_signed(bytes(damaged))
        except ValueError:
            continue
        assert {name: found[name] for name in row} == row  # it hit the name of the sum


def test_a_path_may_lead_up(run: Path):
    (run / "below").mkdir()
    assert open_parameters(run / "below" / "..").step == 2
    assert step_of(run / "below" / "..") == 2
