"""The training program with moments in 8 bits and weights in bfloat16."""

from __future__ import annotations

import dataclasses
import json
import shutil
import typing
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh

from jaxquant.core.paths import leaves_by_path, tree_bytes
from jaxquant.core.typed import build as build_typed
from jaxquant.core.typed import type_hints
from jaxquant.optim import SCHEMES
from jaxquant.optim import state as optim_state
from tests.train.conftest import read_losses, train
from train.config import TrainConfig
from train.report import load_run
from train.sharding import AXES, state_shardings
from train.step import build

ONE = {"mesh_data": 1, "mesh_fsdp": 1, "emb_dim": 64, "head_dim": 32, "mlp_dim": 128}
LOW = {"optimizer_state": "fp8_coat", "weight_dtype": "bfloat16", "stochastic_rounding": True, "learning_rate": 4e-3}
MUON = {"optimizer": "muon", "optimizer_state": "int8_linear", "learning_rate": 4e-3}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [LOW, MUON], ids=["AdamW", "Muon"])
def test_a_run_learns_and_goes_on_to_the_bit(tiny: TrainConfig, tmp_path: Path, fields: dict[str, Any]):
    config = dataclasses.replace(tiny, quantization="fp8", gradient_accumulation_steps=2, **ONE | fields)
    run, fields = tmp_path / "run", {"steps": 9, "checkpoint_every": 6}
    train(config, run, **fields)
    losses = read_losses(run)
    assert losses[9] < losses[1] - 0.3
    shutil.rmtree(run / "checkpoints/9")
    assert any(line.endswith("step 6") for line in train(config, run, **fields))
    assert read_losses(run) == losses


def test_a_run_goes_on_along_the_axis_of_another_platform(
    tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """TPUs have groups along rows, of heads along an axis further to the left; they load elsewhere, and the reverse."""
    config = dataclasses.replace(tiny, **ONE | {"optimizer_state": "int8_dynamic"})

    def shapes(platform: str, axis: str) -> dict[str, tuple[tuple[int, ...], Any]]:
        with monkeypatch.context() as patch:
            patch.setattr(optim_state, "platform_of", lambda x: platform)
            found = build(dataclasses.replace(config, optimizer_state_axis=axis), 256).abstract_state.opt_state
        return {path: (leaf.shape, leaf.dtype) for path, leaf in leaves_by_path(found).items()}

    assert shapes("tpu", "auto") == shapes("cpu", "rows") != shapes("cpu", "auto")
    assert shapes("cpu", "auto") == shapes("tpu", "last")
    run, straight = tmp_path / "run", tmp_path / "straight"
    rows = {"optimizer_state_axis": "rows"}
    train(config, straight, steps=4, checkpoint_every=2, **rows)
    shutil.copytree(straight, run)
    shutil.rmtree(run / "checkpoints/4")
    with pytest.raises(ValueError, match=r"none of .* loads .* set optimizer_state_axis=rows, else =last; choose an"):
        train(config, run, steps=4)
    assert any(line.endswith("step 2") for line in train(config, run, steps=4, **rows))
    assert read_losses(run) == read_losses(straight)


def test_health_says_how_many_moments_are_at_the_ends_of_their_code(tiny: TrainConfig, tmp_path: Path):
    config = dataclasses.replace(tiny, **ONE, optimizer_state="fp8_coat", steps=4, health_every=2)
    train(config, tmp_path / "run")
    run = load_run(tmp_path / "run", "run")
    shares = run.health[-1]["moments"]
    assert set(shares) >= {f"1/0/{moment}/token_embedder/embedding" for moment in ("mu", "nu")}
    assert shares["1/0/nu/layers/mlp/wo/kernel"] == {"zero": 0, "smallest": 0}
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = [row["health/largest_moments_zero"] for row in rows if "health/largest_moments_zero" in row]
    assert found[-1] == pytest.approx(max(each["zero"] for each in shares.values()), rel=1e-5)


def test_moments_lie_where_the_parameters_lie(tiny: TrainConfig):
    program = build(dataclasses.replace(tiny, **ONE | LOW), 256)
    state = program.abstract_state
    weights = sum(x.size for x in jax.tree.leaves(state.params))
    assert tree_bytes(state.params) == 2 * weights
    assert tree_bytes(state.opt_state) < 3 * weights  # float32: 8
    mesh = AbstractMesh((1, 2, 2), AXES)
    places = leaves_by_path(state_shardings(mesh, state))
    coded = 0
    for path, place in places.items():
        if path.startswith("opt_state/1/largest/0/"):
            name = path.split("/", 5)[5]
            same = [f"params/{name}", *(f"opt_state/1/inner/0/{moment}/{name}" for moment in ("mu", "nu"))]
            assert {places[each].spec for each in same} == {place.spec}
            coded += any(place.spec)
    assert coded >= 2 * 6


def test_muon_updates_the_matrices_of_blocks(tiny: TrainConfig):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "num_kv_heads": tiny.num_query_heads}
    latent = {"kv_lora_rank": 64, "q_lora_rank": 64, "rope_head_dim": 16}
    for more, of_attention in (({}, {"query", "key", "value"}), (experts | latent, {"wq_a", "wq_b", "wkv_a", "wkv_b"})):
        found = leaves_by_path(build(dataclasses.replace(tiny, **ONE | MUON | more), 256).abstract_state.opt_state)
        by_muon = [path.removesuffix("/kernel") for path in found if "/muon/inner_state/0/mu/" in path]
        assert {path.rpartition("/")[2] for path in by_muon} == of_attention | {"out", "wi_0", "wi_1", "wo"}
        rest = [path for path in found if "/adam/inner_state/0/mu/" in path]
        assert {path.rpartition("/")[2] for path in rest} >= {"scale", "embedding"}
        assert all(path.endswith(("/scale", "/embedding", "/gate/kernel")) for path in rest)


def test_fields_name_what_there_is():
    assert typing.get_args(type_hints(TrainConfig)["optimizer_state"]) == ("float32", *SCHEMES)
    with pytest.raises(ValueError, match="stochastic_rounding rounds weights in bfloat16; set weight_dtype: bfloat16"):
        build_typed(TrainConfig, {"stochastic_rounding": True})
    with pytest.raises(ValueError, match=r"optimizer_state_axis 'rows' is of moments in 8 bits, and .*; set it to an"):
        build_typed(TrainConfig, {"optimizer_state_axis": "rows"})
    with pytest.raises(TypeError, match=r"optimizer_state_axis.* must be one of 'auto', 'last', 'rows', got -2"):
        build_typed(TrainConfig, {"optimizer_state": "fp8_coat", "optimizer_state_axis": -2})
