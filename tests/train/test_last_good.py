"""Saved, resumed and last-good states are finite; a message names the first non-finite tensor; runs can be adjusted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.training import metrics
from jaxquant.training.checkpoint import Checkpoints
from jaxquant.training.config import TrainConfig
from jaxquant.training.health import FiniteCheck
from jaxquant.training.loop import Diverged
from jaxquant.training.step import Program, TrainState, build
from tests.states import edited
from tests.train.conftest import STEPS, read_lines, read_losses, train


@pytest.fixture(scope="module")
def program(tiny: TrainConfig) -> Program:
    return build(dataclasses.replace(tiny, quantization="fp8"), 320)


def poisoned(state: TrainState, part: str, *keys: Any, layer: int, value: float) -> TrainState:
    """Return a state in which one number of one array is replaced."""

    def change(path: Any, leaf: Any) -> Any:
        names = tuple(getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path)
        return leaf.at[(layer, *(0,) * (leaf.ndim - 1))].set(value) if names == keys else leaf

    changed = jax.tree_util.tree_map_with_path(change, getattr(state, part))
    return state._replace(**{part: changed})


OVERFLOWING = {"learning_rate": 3e38, "weight_decay": 3.0, "warmup_steps_fraction": 0.0, "steps": 1}
KERNEL = ("layers", "mlp", "wo", "kernel")


def test_every_part_of_a_state_is_looked_at(program: Program):
    state = program.init()
    check = FiniteCheck(program)
    assert check(state) is None
    assert check(poisoned(state, "params", *KERNEL, layer=1, value=-np.inf)) == "params/layers/mlp/wo/kernel, layer 1"
    moment = poisoned(state, "opt_state", 1, 0, "nu", *KERNEL, layer=0, value=np.nan)
    assert check(moment) == "opt_state/1/0/nu/layers/mlp/wo/kernel, layer 0"
    broken = edited(state.quant_state, lambda row, fields: fields | {"scale": fields["scale"].at[1].set(np.nan)})
    assert check(state._replace(quant_state=broken)).startswith("quant_state/")


def test_an_update_that_overflows_is_told_of_its_own_step(tiny: TrainConfig, tmp_path: Path):
    """Loss and gradient of the step are finite, but its update is not. The step is also the last step of the run."""
    with pytest.raises(Diverged, match="nothing is saved yet") as caught:
        train(tiny, tmp_path / "run", **OVERFLOWING)
    message = str(caught.value)
    assert message.startswith("step 1: loss is ")
    assert "and the update overflows: params/" in message
    assert "is not finite" in message
    assert not (tmp_path / "run/summary.json").exists()
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


def test_what_is_not_finite_is_neither_an_end_nor_saved(copy: Path, tiny: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr("jaxquant.training.loop._evaluate_held_out", lambda *_: float("nan"))
        (copy / "summary.json").unlink()  # stopped after its last checkpoint
        with pytest.raises(Diverged, match=rf"the held-out loss is nan; the last good state, step {STEPS}, is saved"):
            train(tiny, copy)
    found = iter([None, "opt_state/x"])  # after resuming, before the next checkpoint
    monkeypatch.setattr(FiniteCheck, "__call__", lambda self, state: next(found))
    with pytest.raises(Diverged, match=rf"after step {STEPS + 1} opt_state/x is not finite; .* step {STEPS}, is saved"):
        train(tiny, copy, steps=STEPS + 1)
    assert not (copy / f"checkpoints/{STEPS + 1}").exists()


def test_a_checkpoint_that_is_not_finite_is_not_gone_on_from(copy: Path, tiny: TrainConfig):
    """A run never saves such a checkpoint, but an imported one may be non-finite."""
    program = build(tiny, 320)
    with Checkpoints(copy, tiny) as checkpoints:
        found = checkpoints.restore(program.abstract_state)
        assert found is not None
        bad = poisoned(found[0], "params", *KERNEL, layer=1, value=np.nan)
        checkpoints.save(STEPS + 1, bad._replace(step=jnp.int32(STEPS + 1)), found[1])
    message = rf"start with params/layers/mlp/wo/kernel, layer 1 that is not finite; delete checkpoint {STEPS + 1}"
    with pytest.raises(ValueError, match=message):
        train(tiny, copy, steps=STEPS + 3)


def test_a_step_that_is_not_finite_is_explained_by_its_first_layer(copy: Path, tiny: TrainConfig):
    with Checkpoints(copy, tiny) as checkpoints:
        state, position = checkpoints.restore(build(tiny, 320).abstract_state)
        kernel = state.params["layers"]["mlp"]["wi_0"]
        kernel["kernel"] = kernel["kernel"].at[1].set(3e38)
        checkpoints.save(STEPS + 1, state._replace(step=jnp.int32(STEPS + 1)), position)
    where = r"first non-finite input of a linear layer belongs to layers/mlp/wo, layer 1 \(the layer before it is"
    kept = f"layers/mlp/wi_1, layer 1, .*the last good state, step {STEPS + 1}, is saved"
    with pytest.raises(Diverged, match=rf"^step {STEPS + 2}: loss is nan; the {where} {kept}"):
        train(tiny, copy, steps=STEPS + 4)


def test_a_run_goes_on_with_less_of_everything(copy: Path, tiny: TrainConfig, capsys: pytest.CaptureFixture[str]):
    fields = {"learning_rate": 1e-3, "weight_decay": 0.0, "gradient_clipping_threshold": 0.0}
    train(tiny, copy, steps=STEPS + 3, **fields)
    assert f"learning_rate is 0.001 from step {STEPS + 1} on (before: 0.01)\n" in capsys.readouterr().out
    assert list(read_losses(copy)) == list(range(1, STEPS + 4))
    lines = read_lines(copy)
    changed = {"learning_rate": [0.01, 1e-3], "weight_decay": [0.1, 0.0], "gradient_clipping_threshold": [1.0, 0.0]}
    assert {"step": STEPS, "changed": changed} in lines
    rates = {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}
    assert rates[STEPS + 1] < 1e-3


def test_damaged_metrics_are_left_out_with_a_message(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 1, "loss": 1.0}', b'{"step": 2, "loss": 1.0}']
    odd = [b"5", b'{"stp": 1}', b"\xff\xfe", b""]
    path.write_bytes(b"\n".join([good[0], *odd, good[1], b'{"step": 3}', b'{"step": 4, "lo']))
    said: list[str] = []
    metrics.truncate_metrics(path, 2, said.append)
    assert path.read_bytes().splitlines() == good
    assert said == [f"{path}: removed {len(odd)} damaged lines"]
