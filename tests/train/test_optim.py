"""The training program with moments in 8 bits and weights in bfloat16."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxquant.core.paths import leaves_by_path
from jaxquant.optim import state as optim_state
from jaxquant.training.config import TrainConfig
from jaxquant.training.step import build
from tests.train.conftest import read_losses, train

ONE = {"mesh_data": 1, "mesh_fsdp": 1, "emb_dim": 64, "head_dim": 32, "mlp_dim": 128}
LOW = {"optimizer_state": "fp8_coat", "weight_dtype": "bfloat16", "stochastic_rounding": True, "learning_rate": 4e-3}
MUON = {"optimizer": "muon", "optimizer_state": "int8_linear", "learning_rate": 4e-3}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [LOW, MUON], ids=["AdamW", "Muon"])
def test_a_run_learns_and_goes_on_to_the_bit(tiny: TrainConfig, tmp_path: Path, fields: dict[str, Any]):
    config = dataclasses.replace(tiny, quantization="fp8", gradient_accumulation_steps=2, **ONE | fields)
    run, fields = tmp_path / "run", {"steps": 9, "checkpoint_every": 6, "health_every": 9}
    train(config, run, **fields)
    losses = read_losses(run)
    moments = json.loads((run / "health.jsonl").read_text())["moments"]
    found = [each for path, each in moments.items() if path.endswith("/wo/kernel")]
    assert found
    # Linear codes lose small moments.
    assert config.optimizer_state != "fp8_coat" or {"zero": 0, "smallest": 0} in found
    assert losses[9] < losses[1] - 0.3
    shutil.rmtree(run / "checkpoints/9")
    assert any(line.endswith("step 6") for line in train(config, run, **fields))
    assert read_losses(run) == losses


def test_a_run_goes_on_along_the_axis_of_another_platform(
    tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On TPUs, groups are along rows, or along an earlier axis for heads; other platforms can load these moments."""
    config = dataclasses.replace(tiny, **ONE | {"optimizer_state": "int8_dynamic"})

    def shapes(platform: str, axis: str) -> dict[str, tuple[tuple[int, ...], Any]]:
        with monkeypatch.context() as patch:
            patch.setattr(optim_state, "platform_of", lambda x: platform)
            found = build(dataclasses.replace(config, optimizer_state_axis=axis), 256).abstract_state.opt_state
        return {path: (leaf.shape, leaf.dtype) for path, leaf in leaves_by_path(found).items()}

    assert shapes("tpu", "auto") == shapes("cpu", "rows") != shapes("cpu", "auto")
    assert shapes("cpu", "auto") == shapes("tpu", "last")
    run = tmp_path / "run"
    train(config, run, steps=2, optimizer_state_axis="rows")
    with pytest.raises(ValueError, match=r"none of .* loads .* set optimizer_state_axis=rows"):
        train(config, run, steps=4)
    assert any(line.endswith("step 2") for line in train(config, run, steps=4, optimizer_state_axis="rows"))


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
