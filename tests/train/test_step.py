"""The step: micro-batches, non-finite steps, where the loss broke, what is saved for backward, eight devices."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import numerics
from tests.train.conftest import ROOT, quantized
from train.config import TrainConfig
from train.data import make_iterators
from train.diagnose import explain_non_finite
from train.step import build, saved_activation_bytes

# With a large epsilon AdamW is smooth in the gradient, so that a difference in summation order stays one.
SMOOTH = {"adam_eps": 1.0, "warmup_steps_fraction": 0.0, "learning_rate": 1.0}


def _run(config: TrainConfig, steps: int = 3):
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)
    state, healthy, rows = program.init(), jnp.bool_(True), []
    for _ in range(steps):
        state, metrics = program.step(state, next(data.train), healthy)
        healthy = metrics["healthy"]
        rows.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(rows)


def test_gradient_accumulation_equals_the_big_batch(tiny: TrainConfig):
    # Without packing the micro-batches hold different numbers of tokens.
    config = dataclasses.replace(tiny, packing=False, **SMOOTH)
    small = dataclasses.replace(config, gradient_accumulation_steps=4)
    np.testing.assert_allclose(_run(small), _run(config), rtol=numerics.TRAIN_SUMMATION_ORDER)


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"quantization": "fp8", "amax_init": "flax"}])
def test_gradient_accumulation_leaves_the_quant_state_of_the_big_batch(tiny: TrainConfig, options: dict[str, str]):
    """Two steps on float32 activations: the embedding's rows are the same, so that the first layer's amaxes are too."""
    config = dataclasses.replace(tiny, packing=False, scan_layers=False, **options)
    states = {}
    for k in (1, 4):
        data = make_iterators(config, config.batch_size)
        program = build(dataclasses.replace(config, gradient_accumulation_steps=k), data.vocab_size)
        state, healthy = program.init(), jnp.bool_(True)
        for _ in range(2):
            state, _ = program.step(state, next(data.train), healthy)
        states[k] = state.quant_state
    query = [states[k]["layers_0"]["self_attention"]["query"]["Fp8DirectDotGeneralOp_0"] for k in (1, 4)]
    for tensor in ("input", "kernel"):
        for field in ("amax_history", "scale"):
            np.testing.assert_allclose(
                query[0][f"{tensor}_{field}"], query[1][f"{tensor}_{field}"], rtol=numerics.TRAIN_SUMMATION_ORDER
            )
    # Elsewhere micro-batches differ from the batch by what quantization with other first scales makes of them.
    for big, small in zip(jax.tree.leaves(states[1]), jax.tree.leaves(states[4]), strict=True):
        np.testing.assert_array_equal((np.asarray(big) > 0).sum(), (np.asarray(small) > 0).sum())


@pytest.mark.parametrize("quantization", ["int8w", "fp8"])
def test_gradient_accumulation_trains(tiny: TrainConfig, quantization: str):
    config = dataclasses.replace(quantized(tiny, quantization), gradient_accumulation_steps=2, **SMOOTH)
    losses = _run(config)[:, 0]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_a_non_finite_step_changes_nothing_and_is_explained(tiny: TrainConfig, quantization: str):
    config = quantized(tiny, quantization)
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)
    state = program.init()
    state.params["layers"]["mlp"]["wo"]["kernel"] = state.params["layers"]["mlp"]["wo"]["kernel"].at[1].set(jnp.nan)
    batch = next(data.train)
    before = jax.tree.map(np.array, state)
    text = explain_non_finite(program, state, batch, jax.random.key(0))
    assert text.startswith("the first non-finite output is that of layers/mlp/wo, layer 1, amax nan")
    assert "before it layers/mlp/wi_1, layer 1" in text
    after, metrics = program.step(state, batch, jnp.bool_(True))
    assert not metrics["healthy"]
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, after))
    # A later, sound step does not go on from there either: its batch is not the one to follow.
    after.params["layers"]["mlp"]["wo"]["kernel"] = jnp.zeros_like(after.params["layers"]["mlp"]["wo"]["kernel"])
    sound = jax.tree.map(np.array, after)
    later, metrics = program.step(after, batch, metrics["healthy"])
    assert np.isfinite(metrics["loss"])
    assert not metrics["healthy"]
    jax.tree.map(np.testing.assert_array_equal, sound, jax.tree.map(np.array, later))


@pytest.mark.parametrize(("framework", "quantization"), [("linen", ""), ("nnx", "fp8")])
def test_a_non_finite_gradient_under_a_finite_loss_is_explained(tiny: TrainConfig, framework: str, quantization: str):
    config = dataclasses.replace(quantized(tiny, quantization), framework=framework)
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)

    def loss(params, *rest):
        # The square root's slope at 0 is infinite.
        return program.loss(params, *rest) + jnp.sqrt(0 * params["layers"]["mlp"]["wi_1"]["kernel"][1].sum())

    broken = dataclasses.replace(program, loss=loss)
    text = explain_non_finite(broken, program.init(), next(data.train), jax.random.key(0))
    assert text.startswith("the first non-finite gradient is that of layers/mlp/wi_1/kernel, layer 1, amax nan")
    assert "before it layers/mlp/wo/kernel, layer 1" in text


def test_saved_activation_bytes_shrink_with_remat(tiny: TrainConfig):
    saved = {}
    for policy in ("none", "full"):
        config = dataclasses.replace(tiny, remat_policy=policy)
        data = make_iterators(config, config.batch_size)
        saved[policy] = saved_activation_bytes(build(config, data.vocab_size), next(data.train))
    tokens = tiny.batch_size * tiny.sequence_length
    layer_inputs = 4 * tokens * tiny.emb_dim * tiny.num_layers
    assert layer_inputs <= saved["full"] < saved["none"]


EIGHT = """
import dataclasses, json, sys
import jax
from jaxquant.config.loader import build
from tests.train.test_step import _run
from train.config import TrainConfig
assert jax.device_count() == 8
config = build(TrainConfig, json.loads(sys.argv[1]))
print(json.dumps(_run(dataclasses.replace(config, mesh_data=2, mesh_fsdp=4)).tolist()))
"""


def test_eight_devices_compute_what_one_does(tiny: TrainConfig):
    from jaxquant.config.loader import to_mapping

    config = dataclasses.replace(tiny, **SMOOTH)
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    words = [sys.executable, "-c", EIGHT, json.dumps(to_mapping(config))]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(rows, _run(config), rtol=numerics.TRAIN_SUMMATION_ORDER)
