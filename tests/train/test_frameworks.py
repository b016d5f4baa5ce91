"""The decoder in NNX against the one in Linen: the same parameters, quant state and losses, bit for bit."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.inject.test_linen import NATIVE
from tests.train.conftest import read_losses, train
from tests.train.test_run import start, wait_for_step
from train.config import TrainConfig
from train.data import make_iterators
from train.frameworks import make_model
from train.model import DecoderConfig
from train.step import build

SHAPE = DecoderConfig(64, 32, 64, 2, 4, 2, 16)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)), jnp.int32)
SEGMENTS = jnp.asarray([[1] * 5 + [2] * 7] * 2)
POSITIONS = jnp.asarray([[*range(5), *range(7)]] * 2)


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def made(shape: DecoderConfig, framework: str, **fields):
    config = TrainConfig(framework=framework, **{"quantization": "fp8"} | fields)
    return make_model(config, shape, TOKENS)


def gradients(model):
    params, quant_state = jax.jit(model.init)(jax.random.key(0))

    def loss(params, quant_state):
        rngs = {"quant": jax.random.key(1)}
        return (model.apply(params, quant_state, TOKENS, SEGMENTS, POSITIONS, rngs=rngs) ** 2).mean()

    return params, quant_state, jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, quant_state)


@pytest.mark.parametrize(
    "fields",
    [
        {"scan_layers": False, "logits_via_embedding": False, "dtype": "bfloat16"},
        *({"remat_policy": policy} for policy in ("full", "quantized")),
    ],
    ids=["unscanned untied bfloat16", "full", "quantized"],
)
def test_same_parameters_state_and_gradients(fields):
    shape = dataclasses.replace(SHAPE, **fields)
    assert_same(gradients(made(shape, "nnx")), gradients(made(shape, "linen")))


def test_the_report_is_the_same():
    assert made(SHAPE, "nnx").layers == made(SHAPE, "linen").layers
    assert [layer.path for layer in made(SHAPE, "nnx").layers if layer.recipe][-1] == "layers/mlp/wo"


def run(config: TrainConfig, steps: int):
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)
    state, healthy, losses = program.init(), jnp.bool_(True), []
    for _ in range(steps):
        state, metrics = program.step(state, next(data.train), healthy)
        healthy = metrics["healthy"]
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state)


@pytest.mark.slow
def test_all_native_recipes_side_by_side_train_to_the_same_bits(tiny: TrainConfig):
    """Every layer of one decoder has a recipe of its own: all native ones in one program."""
    names = [f"layers_{layer}/{place}" for layer in range(5) for place in _PLACES]
    rules = [{"path": path, "recipe": recipe} for path, recipe in zip(names, NATIVE, strict=False)]
    assert len(rules) == len(NATIVE)
    fields = {"scan_layers": False, "num_layers": 5, "quant_backend": "native", "rules": rules, "quantization": "int8"}
    config = dataclasses.replace(tiny, **fields)
    losses, state = run(dataclasses.replace(config, framework="nnx"), 50)
    expected, expected_state = run(config, 50)
    assert losses == expected
    assert losses[-1] < 0.8 * losses[0]
    assert_same(state, expected_state)


_PLACES = [*(f"self_attention/{name}" for name in ("query", "key", "value", "out")), "mlp/wi_0", "mlp/wi_1", "mlp/wo"]


@pytest.mark.slow
def test_an_nnx_run_is_interrupted_and_goes_on_to_the_bits_of_linen(finished, tiny: TrainConfig, tmp_path):
    whole, run_dir = finished("fp8"), tmp_path / "run"
    config = dataclasses.replace(tiny, framework="nnx", quantization="fp8")
    process = start(config, run_dir, tmp_path)
    wait_for_step(process, run_dir, 12)  # the checkpoint of a step before it is whole by then
    process.kill()
    process.communicate()
    assert not (run_dir / "summary.json").exists(), "it ended before it was killed"
    assert any("resumed" in line for line in train(config, run_dir))
    assert read_losses(run_dir) == read_losses(whole)
    ours, theirs = (json.loads((path / "summary.json").read_text()) for path in (run_dir, whole))
    for name in ("held_out_loss", "layers", "parameter_bytes", "quant_state_bytes", "backend"):
        assert ours[name] == theirs[name]


def test_aqt_runs_on_nnx_and_auto_is_linens():
    config = TrainConfig(framework="nnx", quantization="int8", quant_backend="aqt")
    assert config.resolved_backend == "aqt"
    model = made(SHAPE, "nnx", quantization="int8", quant_backend="aqt")
    _, _, (loss, grads) = gradients(model)
    assert np.isfinite(loss)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads[0]))
    for framework in ("linen", "nnx"):
        assert TrainConfig(framework=framework, quantization="int8").resolved_backend == "aqt"
