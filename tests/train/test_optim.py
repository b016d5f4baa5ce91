"""The training program with moments in 8 bits and weights in bfloat16."""

from __future__ import annotations

import dataclasses
import typing

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxquant.core.trees import leaves_by_path, tree_bytes
from jaxquant.core.typed import build as build_typed
from jaxquant.core.typed import type_hints
from jaxquant.optim import SCHEMES
from train.config import TrainConfig
from train.data import make_iterators
from train.sharding import AXES, state_shardings
from train.step import build

ONE = {"mesh_data": 1, "mesh_fsdp": 1, "emb_dim": 64, "head_dim": 32, "mlp_dim": 128}
LOW = {"optimizer_state": "fp8_coat", "weight_dtype": "bfloat16", "stochastic_rounding": True, "learning_rate": 4e-3}


def test_steps_learn_and_lie_where_the_parameters_lie(tiny: TrainConfig):
    config = dataclasses.replace(tiny, quantization="fp8", gradient_accumulation_steps=2, **ONE | LOW)
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)
    state, losses = program.init(), []
    for _ in range(12):
        state, metrics = program.step(state, next(data.train), np.bool_(True))
        losses.append(float(metrics["loss"]))
        assert metrics["healthy"]
    assert losses[-1] < losses[0] - 0.3
    weights = sum(x.size for x in jax.tree.leaves(state.params))
    assert tree_bytes(state.params) == 2 * weights
    assert tree_bytes(state.opt_state) < 3 * weights  # float32: 8

    mesh = AbstractMesh((1, 2, 2), AXES)
    places = leaves_by_path(state_shardings(mesh, program.abstract_state))
    coded = 0
    for path, place in places.items():
        if path.startswith("opt_state/1/largest/0/"):
            name = path.split("/", 5)[5]
            same = [f"params/{name}", *(f"opt_state/1/inner/0/{moment}/{name}" for moment in ("mu", "nu"))]
            assert {places[each].spec for each in same} == {place.spec}
            coded += any(place.spec)
    assert coded >= 2 * 6


def test_fields_name_what_there_is():
    assert typing.get_args(type_hints(TrainConfig)["optimizer_state"]) == ("float32", *SCHEMES)
    with pytest.raises(ValueError, match="stochastic_rounding rounds weights in bfloat16; set weight_dtype: bfloat16"):
        build_typed(TrainConfig, {"stochastic_rounding": True})
