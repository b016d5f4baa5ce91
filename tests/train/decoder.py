"""A small decoder with tokens, for tests of the model without a run."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxquant.training.config import TrainConfig
from jaxquant.training.layers import DecoderConfig
from jaxquant.training.step import Model, make_model

SHAPE = DecoderConfig(64, 32, 64, 2, 4, 2, 16)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)), jnp.int32)
SEGMENTS = jnp.asarray([[1] * 5 + [2] * 7] * 2)
POSITIONS = jnp.asarray([[*range(5), *range(7)]] * 2)


def made(shape: DecoderConfig, **fields) -> Model:
    return make_model(TrainConfig(**{"quantization": "fp8"} | fields), shape, TOKENS)
