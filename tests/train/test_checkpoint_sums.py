"""Checksums of training checkpoints: a flipped bit is never used; a damaged checkpoint is skipped with a message."""

from __future__ import annotations

import functools
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxquant.core.paths import leaves_by_path
from jaxquant.core.typed import to_mapping
from jaxquant.export.sums import NAME, read_sums
from jaxquant.training import checkpoint, sums
from jaxquant.training.checkpoint import Checkpoints, write_config
from jaxquant.training.config import TrainConfig
from jaxquant.training.conversion import open_parameters
from jaxquant.training.metrics import Metrics
from jaxquant.training.report import load_run
from jaxquant.training.step import TrainState
from jaxquant.training.sums import config_of
from tests.train.conftest import read_lines

PARAMS = {"layers": {"kernel": jnp.arange(64, dtype=jnp.float32).reshape(2, 4, 8)}, "norm": {"scale": jnp.ones(3)}}
POSITION = {"stream": {"corpus": "abc"}, "position": {"next": 7}}


def make_state(step: int, optimizer: optax.GradientTransformation | None = None) -> TrainState:
    optimizer = optimizer or optax.chain(optax.identity(), optax.adamw(1e-3))
    params = jax.tree.map(lambda x: x + step, PARAMS)
    return TrainState(jnp.int32(step), params, optimizer.init(params), {"amax": jnp.full(4, 2.0)})


ABSTRACT = jax.eval_shape(lambda: make_state(0))


def made_with(folder: Path, **fields: Any) -> Path:
    """Return a run folder with config.yml and checkpoints of steps 1 and 2."""
    config = TrainConfig(**fields)
    with Checkpoints(folder, config) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), POSITION)
    write_config(folder, config)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_with(tmp_path_factory.mktemp("sums") / "run")


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


def restore(run: Path) -> tuple[tuple[TrainState, Any] | None, list[str]]:
    said: list[str] = []
    with Checkpoints(run, TrainConfig()) as checkpoints:
        return checkpoints.restore(ABSTRACT, said.append), said


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def whole_share(folder: Path, share: int) -> bool:
    try:
        sums.check_checkpoint_sums(folder, None, share, 3)
    except ValueError:
        return False
    return True


def test_no_flipped_bit_is_silent_and_what_is_whole_comes_back(run: Path):
    folder = run / "checkpoints/2"
    names = [path.relative_to(folder).as_posix() for path in files_of(folder) if path.name != NAME]
    assert sorted(read_sums(folder)) == names
    for path in files_of(folder):
        bits = 8 * path.stat().st_size
        for bit in {0, bits // 3, bits // 2 + 1, bits - 1} if bits else ():
            flip(path, bit)
            with pytest.raises(ValueError, match=r"copy the folder again" if path.name == NAME else path.name):
                sums.check_checkpoint_sums(folder)
            if path == folder / sums.DATA:
                with pytest.raises(ValueError, match="data/metadata has changed"):
                    config_of(folder)
            shares = [whole_share(folder, share) for share in range(3)]  # each of three processes reads one part
            assert path.name == NAME or shares.count(False) == 1
            flip(path, bit)
    found, said = restore(run)
    assert found is not None
    assert said == []
    assert found[1] == POSITION
    bits, wanted = (jax.tree.map(lambda x: np.asarray(x).tobytes(), tree) for tree in (found[0], make_state(2)))
    assert bits == wanted


def _data(folder: Path) -> Path:
    """Return a file that contains arrays."""
    return max(files_of(folder / "state/ocdbt.process_0"), key=lambda path: path.stat().st_size)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit of an array": lambda folder: flip(_data(folder), 200),
    "the sums cut": lambda folder: os.truncate(folder / NAME, 300),
    "an earlier version's sums.json": lambda folder: (folder / NAME).rename(folder / "sums.json"),
    "a file too many": lambda folder: (folder / "state/more").write_text("x"),
    "the largest file gone": lambda folder: _data(folder).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_passed_over_with_a_message_by_all_that_read(run: Path, damage: str):
    DAMAGES[damage](run / "checkpoints/2")
    said: list[str] = []
    assert open_parameters(run, say=said.append).step == 1  # convert, serve, evaluate
    assert said[0].startswith(f"checkpoint 2 in {run}/checkpoints does not open (")
    found, said = restore(run)
    assert found is not None
    assert int(found[0].step) == 1
    assert said[0].startswith(f"checkpoint 2 does not load ({run}/checkpoints/2")
    assert said[1] == f"moved checkpoint 2 to {run}/unreadable_checkpoints/2"
    DAMAGES[damage](run / "checkpoints/1")
    words = "with jaxquant at commit a87bb9a" if "earlier" in damage else r"checkpoints?.* (does not open|loads)"
    for read in (lambda: open_parameters(run, step=1), lambda: restore(run)):
        with pytest.raises(ValueError, match=words):
            read()


def resume(run: Path, config: TrainConfig) -> tuple[Checkpoints, list[str]]:
    """Resume like ``jaxquant.training.loop``, up to the first step."""
    said: list[str] = []
    with Checkpoints(run, config) as checkpoints:
        assert checkpoints.restore(ABSTRACT, said.append) is not None
    return checkpoints, said


def test_what_may_differ_is_told_or_changes_with_the_next_checkpoint(run: Path):
    slower = TrainConfig(learning_rate=1e-4)
    assert resume(run, TrainConfig())[1] == []
    _, said = resume(run, TrainConfig(steps=2000, run_dir="elsewhere"))
    assert said == ["steps is 2000, it was 1000 when checkpoint 2 was saved"]
    checkpoints, said = resume(run, slower)
    assert said == []
    assert checkpoints.changes == {"learning_rate": (1e-3, 1e-4)}
    with Checkpoints(run, slower) as checkpoints:
        checkpoints.restore(ABSTRACT, said.append)
        checkpoints.save(3, make_state(3), POSITION)
    assert resume(run, slower)[0].changes == {}
    assert config_of(run / "checkpoints/3") == slower


def test_what_a_branch_that_is_gone_wrote_goes_with_it(tmp_path: Path):
    with Metrics(tmp_path, TrainConfig(tensorboard=False, health_every=1), 4) as metrics:
        metrics.record_changes(2, {"weight_decay": (0.1, 0.2)})
        metrics.record_health({"step": 4}, {"lowest": 1.0})
        metrics.record_changes(4, {"learning_rate": (1e-3, 5e-4)})
        metrics.record_health({"step": 5}, {"lowest": 2.0})
    with Metrics(tmp_path, TrainConfig(tensorboard=False), 4) as metrics:
        metrics.record_changes(4, {})
    kept = [{"step": 2, "changed": {"weight_decay": [0.1, 0.2]}}, {"step": 4, "health/lowest": 1.0}]
    assert read_lines(tmp_path) == kept
    assert [json.loads(line) for line in (tmp_path / "health.jsonl").open("rb")] == [{"step": 4}]


def test_no_bit_of_config_yml_decides_what_is_read(tmp_path: Path):
    """Comparisons use the checkpoint's own config; a command that uses its parameters names the difference."""
    run = made_with(tmp_path / "run", quantization="int8")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    path, expected = run / "config.yml", open_parameters(run).config
    assert expected == TrainConfig(quantization="int8")
    path.write_text(path.read_text().replace("rope_theta: 500000.0", "rope_theta: 900000.0"))
    with pytest.raises(ValueError, match=r"rope_theta: 500000.0 in the checkpoint, 900000.0 in config.yml"):
        open_parameters(run)
    assert load_run(run, "run").config == to_mapping(expected)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    run = made_with(tmp_path / "tokens", tokenizer_path=str(tokenizer))
    assert open_parameters(run).step == 2
    tokenizer.write_text("{ }")
    for read in (lambda: open_parameters(run), lambda: resume(run, TrainConfig(tokenizer_path=str(tokenizer)))):
        with pytest.raises(ValueError, match=r"was made with tokenizer_path .*, which has changed; restore the file"):
            read()


def readers_of(params: Any, alive: list[Any]) -> Any:
    """Return ``Readers`` of a kernel in slices and a whole scale; ``alive`` gets the number of parts in memory."""
    parts: list[weakref.ref[Any]] = []

    def read(array: Any, length: int) -> Any:
        for start in range(0, len(array), length):
            part = np.array(array[start : start + length])
            parts.append(weakref.ref(part))
            alive.append(sum(each() is not None for each in parts))
            yield slice(start, start + length), part
            del part

    return {path: functools.partial(read, array) for path, array in leaves_by_path(params).items()}


def test_parameters_are_written_part_by_part_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 4 * 64)
    monkeypatch.setattr(checkpoint, "SLICE_BYTES", 4 * 32)
    kernel = jnp.arange(6 * 32.0).reshape(6, 4, 8).at[2].set(0)  # one of six chunks is zero
    params, alive = {"layers": {"kernel": kernel}, "norm": {"scale": jnp.zeros(3)}}, []
    state = make_state(0)._replace(params=params, opt_state=(), quant_state={})
    with Checkpoints(tmp_path, TrainConfig()) as checkpoints:
        checkpoints.create(state, POSITION, readers_of(params, alive))
        restored = checkpoints.restore(jax.eval_shape(lambda: state))
    assert restored is not None
    jax.tree.map(np.testing.assert_array_equal, restored[0].params, params)
    assert len(alive) == 6 + 1
    assert max(alive) <= 2
    assert set(read_sums(tmp_path / "checkpoints/0")) >= {*sums.LATE_FILES, "data/metadata"}


def test_a_checkpoint_with_an_unwritten_parameter_is_not_used(tmp_path: Path) -> None:
    readers = readers_of(PARAMS, [])
    readers["norm/scale"] = lambda length: iter([(slice(None), 1 / 0)])
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, TrainConfig()) as checkpoints:
        checkpoints.create(make_state(0), POSITION, readers)
    with pytest.raises(ValueError, match="SHA256SUMS is missing"):
        restore(tmp_path)
