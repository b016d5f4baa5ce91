"""The training step: micro-batches, non-finite steps, the source of a broken loss, saved residuals, eight devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxquant.core.paths import leaves_by_path
from jaxquant.core.typed import build as build_dataclass
from jaxquant.core.typed import to_mapping
from jaxquant.training.config import TrainConfig
from jaxquant.training.data import make_iterators
from jaxquant.training.health import explain_non_finite
from jaxquant.training.sharding import AXES
from jaxquant.training.step import build, with_global_shards
from tests import numerics
from tests.states import nested
from tests.train.conftest import quantized

# With a large epsilon, AdamW is smooth in the gradient, so rounding differences stay small.
SMOOTH = {"adam_eps": 1.0, "warmup_steps_fraction": 0.0, "learning_rate": 1.0}
# Both programs compute scales from the same history, with at most three divisions, each rounded once.
DELAYED_SCALE = 2 * 3 * numerics.FLOAT32_EPS


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
    # Without packing, micro-batches have different numbers of tokens.
    config = dataclasses.replace(tiny, packing=False, **SMOOTH)
    small = dataclasses.replace(config, gradient_accumulation_steps=4)
    np.testing.assert_allclose(_run(small), _run(config), rtol=numerics.TRAIN_SUMMATION_ORDER)


@pytest.mark.slow
def test_gradient_accumulation_leaves_the_quant_state_of_the_big_batch(tiny: TrainConfig):
    """From a warm state, the states are equal. (In the first step, each micro-batch has a separate scale.)"""
    config = dataclasses.replace(quantized(tiny, "fp8"), packing=False, **SMOOTH)
    data = make_iterators(config, config.batch_size)
    programs = [build(dataclasses.replace(config, gradient_accumulation_steps=k), data.vocab_size) for k in (1, 4)]
    start, _ = programs[0].step(programs[0].init(), next(data.train), jnp.bool_(True))
    start, batch = jax.tree.map(np.array, start), next(data.train)
    big, small = (nested(program.step(start, batch, jnp.bool_(True))[0].quant_state) for program in programs)
    count = same = 0
    for path, large in leaves_by_path(big).items():
        found, before = leaves_by_path(small)[path], leaves_by_path(nested(start.quant_state))[path]
        if path.endswith("_amax_history"):
            count += large[..., 0].size
            assert (large[..., 1] == before[..., 2]).all(), path  # rolled on
            # Amaxes that differ in their last bits are in the same bin; a few are in the next bin, one eighth larger.
            same += int((found[..., 0] == large[..., 0]).sum())
            np.testing.assert_allclose(found[..., 0], large[..., 0], rtol=1 / 8, err_msg=path)
            large, found = large[..., 1:], found[..., 1:]
        np.testing.assert_allclose(found, large, rtol=DELAYED_SCALE, err_msg=path)
    assert count == 3 * 7 * config.num_layers
    assert same >= 0.9 * count


def test_a_non_finite_step_changes_nothing_and_is_explained(tiny: TrainConfig):
    config = quantized(tiny, "fp8")
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)
    state = program.init()
    state.params["layers"]["mlp"]["wo"]["kernel"] = state.params["layers"]["mlp"]["wo"]["kernel"].at[1].set(jnp.nan)
    batch = next(data.train)
    before = jax.tree.map(np.array, state)
    text = explain_non_finite(program, state, batch, jax.random.key(0))
    assert text.startswith("the first non-finite kernel of a linear layer belongs to layers/mlp/wo, layer 1 (")
    assert "the layer before it is layers/mlp/wi_1, layer 1" in text
    after, metrics = program.step(state, batch, jnp.bool_(True))
    assert not metrics["healthy"]
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, after))
    # A later, finite step does not continue from there either, because its batch is not the next one.
    after.params["layers"]["mlp"]["wo"]["kernel"] = jnp.zeros_like(after.params["layers"]["mlp"]["wo"]["kernel"])
    sound = jax.tree.map(np.array, after)
    later, metrics = program.step(after, batch, metrics["healthy"])
    assert np.isfinite(metrics["loss"])
    assert not metrics["healthy"]
    jax.tree.map(np.testing.assert_array_equal, sound, jax.tree.map(np.array, later))


def test_a_non_finite_gradient_under_a_finite_loss_is_explained(tiny: TrainConfig):
    config = quantized(tiny, "fp8")
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)

    def loss(*inputs):
        # The derivative of the square root at 0 is infinite.
        value = program.loss(*inputs)
        return value + jnp.sqrt(0 * value)

    broken = dataclasses.replace(program, loss=loss)
    text = explain_non_finite(broken, program.init(), next(data.train), jax.random.key(0))
    assert text == "the first non-finite output_grad of a linear layer belongs to layers/mlp/wo, layer 1"


def test_blocks_of_the_weight_gradient_lie_on_one_device_each(tiny: TrainConfig):
    mesh: Any = AbstractMesh((2, 2, 2), AXES)
    for options, shards in (
        ({"quantization": "int8"}, 4),
        ({"quantization": "fp8", "rules": [{"path": ".*/mlp/wo", "recipe": "int8"}]}, 4),
        ({"quantization": "int8", "quantization_local_shard_count": 2}, 2),
        ({"quantization": "int8", "quant_backend": "qwix"}, -1),  # cuts the sequence, which no device boundary does
        ({"quantization": "fp8"}, -1),  # does not read it
    ):
        config = build_dataclass(TrainConfig, to_mapping(tiny) | options)
        assert with_global_shards(config, mesh).quantization_local_shard_count == shards
