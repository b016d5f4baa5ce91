"""The step: micro-batches, non-finite steps, where the loss broke, what is saved for backward, eight devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxquant.core.typed import build as build_dataclass
from jaxquant.core.typed import to_mapping
from tests import numerics
from tests.states import nested
from tests.train.conftest import quantized
from train.config import TrainConfig
from train.data import make_iterators
from train.health import explain_non_finite
from train.sharding import AXES
from train.step import build, saved_activation_bytes, with_global_shards

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


@pytest.mark.slow
def test_gradient_accumulation_leaves_the_quant_state_of_the_big_batch(tiny: TrainConfig):
    """A step from one and the same state, whose histories give the scales: every layer's state is that of the batch.

    (In a very first step each micro-batch scales by itself, and what follows differs by what that quantization makes.)
    """
    config = dataclasses.replace(quantized(tiny, "fp8"), packing=False, **SMOOTH)
    data = make_iterators(config, config.batch_size)
    programs = {k: build(dataclasses.replace(config, gradient_accumulation_steps=k), data.vocab_size) for k in (1, 4)}
    start, _ = programs[1].step(programs[1].init(), next(data.train), jnp.bool_(True))
    start, batch = jax.tree.map(np.array, start), next(data.train)
    step = lambda program: nested(program.step(start, batch, jnp.bool_(True))[0].quant_state)  # noqa: E731
    found = {k: step(program) for k, program in programs.items()}
    count = same = 0
    for (path, big), small, before in zip(
        jax.tree_util.tree_leaves_with_path(found[1]),
        jax.tree.leaves(found[4]),
        jax.tree.leaves(nested(start.quant_state)),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        if name.endswith("_amax_history']"):
            count += big[..., 0].size
            assert (big[..., 1] == before[..., 2]).all(), name  # rolled on
            # Amaxes that differ in their last bits lie in one bin, a few in neighbours, whose ends are an eighth apart.
            same += int((small[..., 0] == big[..., 0]).sum())
            np.testing.assert_allclose(small[..., 0], big[..., 0], rtol=1 / 8, err_msg=name)
            big, small = big[..., 1:], small[..., 1:]
        np.testing.assert_allclose(small, big, rtol=numerics.DELAYED_SCALE, err_msg=name)
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
    assert text.startswith("the first non-finite kernel of a linear layer is that of layers/mlp/wo, layer 1 (")
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


def test_a_non_finite_gradient_under_a_finite_loss_is_explained(tiny: TrainConfig):
    config = quantized(tiny, "fp8")
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)

    def loss(*inputs):
        # The square root's slope at 0 is infinite.
        value = program.loss(*inputs)
        return value + jnp.sqrt(0 * value)

    broken = dataclasses.replace(program, loss=loss)
    text = explain_non_finite(broken, program.init(), next(data.train), jax.random.key(0))
    assert text == "the first non-finite output_grad of a linear layer is that of layers/mlp/wo, layer 1"


def test_saved_activation_bytes_shrink_with_remat(tiny: TrainConfig):
    saved = {}
    for policy in ("none", "full"):
        config = dataclasses.replace(tiny, remat_policy=policy)
        data = make_iterators(config, config.batch_size)
        saved[policy] = saved_activation_bytes(build(config, data.vocab_size), next(data.train))
    tokens = tiny.batch_size * tiny.sequence_length
    layer_inputs = 4 * tokens * tiny.emb_dim * tiny.num_layers
    assert layer_inputs <= saved["full"] < saved["none"]


@pytest.mark.parametrize(
    ("options", "shards"),
    [
        ({"quantization": "int8"}, 4),
        ({"quantization": "int8", "quant_backend": "aqt"}, 4),
        ({"quantization": "fp8", "rules": [{"path": ".*/mlp/wo", "recipe": "int8"}]}, 4),
        ({"rules": [{"path": ".*/mlp/wo", "recipe": "int8"}], "quant_backend": "native"}, 4),
        ({"quantization": "int8", "quantization_local_shard_count": 2}, 2),
        ({"quantization": "int8", "quant_backend": "qwix"}, -1),  # cuts the sequence, which no device boundary does
        ({"quantization": "fp8"}, -1),  # does not read it
    ],
)
def test_blocks_of_the_weight_gradient_lie_on_one_device_each(tiny: TrainConfig, options: dict[str, Any], shards: int):
    config = build_dataclass(TrainConfig, to_mapping(tiny) | options)
    mesh: Any = AbstractMesh((2, 2, 2), AXES)
    assert with_global_shards(config, mesh).quantization_local_shard_count == shards
