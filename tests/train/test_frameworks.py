"""The decoder in NNX against the one in Linen: the same parameters, quant state and losses, bit for bit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.config import TrainConfig
from train.frameworks import make_model
from train.model import DecoderConfig

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"scan_layers": False, "logits_via_embedding": False, "dtype": "bfloat16"},
        *({"remat_policy": policy} for policy in ("full", "matmuls", "quantized")),
        {"saved_activations": "fp8"},
    ],
    ids=["unscanned untied bfloat16", "full", "matmuls", "quantized", "saved in fp8"],
)
def test_same_parameters_state_and_gradients(fields):
    """With delayed scales, and in one layer noise, which is drawn by its path."""
    shape, rules = dataclasses.replace(SHAPE, **fields), [{"path": ".*/mlp/wi_0", "recipe": "int8"}]
    ours, theirs = (gradients(made(shape, framework, rules=rules)) for framework in ("nnx", "linen"))
    assert_same(ours, theirs)


def test_the_report_is_the_same():
    assert made(SHAPE, "nnx").layers == made(SHAPE, "linen").layers
    assert [layer.path for layer in made(SHAPE, "nnx").layers if layer.recipe][-1] == "layers/mlp/wo"
