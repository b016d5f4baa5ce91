"""Programs of a configuration, for ``jaxquant audit`` and ``jaxquant coverage``; no device is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxquant import state as quantization_state
from jaxquant.serving.kv_cache import quantization_of
from jaxquant.training.conversion import layer_config
from jaxquant.training.generate import Engine
from jaxquant.training.sharding import BATCH
from jaxquant.training.start import read_config
from jaxquant.training.step import build, make_model, model_config
from jaxquant.training.tokenizer import open_tokenizer


def program(path: str, overrides: Sequence[str], devices: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return the jitted training step of a configuration and the shapes of its arguments, on a mesh of ``devices``.

    The dataset is not read. The vocabulary size is ``vocab_size``, or the tokenizer's size if ``vocab_size`` is 0.

    Args:
      path: YAML file.
      overrides: ``key=value`` words that override fields of the file.
      devices: devices of the mesh.

    Raises:
      TypeError, ValueError, NotImplementedError, OSError: the configuration is invalid or does not match the devices.
    """
    config = read_config(path, overrides)
    built = build(config, config.vocab_size or open_tokenizer(config.tokenizer_path).vocab_size, devices)
    shape = (config.batch_size, config.sequence_length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(built.mesh, BATCH))
    batch = {name: tokens for name in ("inputs", "targets", "segment_ids", "positions")}
    is_healthy = jax.ShapeDtypeStruct((), jnp.bool_, sharding=built.replicated)
    state = built.abstract_state
    state = state._replace(quant_state=quantization_state.warm(state.quant_state))  # as after one step
    return built.step, (state, batch, is_healthy)


def prefill(path: str, overrides: Sequence[str], devices: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return the jitted program that reads a chunk of a prompt, and the shapes of its arguments; see ``program``."""
    return _generation(path, overrides, devices, "prefill")


def decode(path: str, overrides: Sequence[str], devices: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return the jitted program that generates a token in each slot, and the shapes of its arguments."""
    return _generation(path, overrides, devices, "decode")


def _generation(path: str, overrides: Sequence[str], devices: Sequence[Any], name: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a program of ``Engine`` for the model as trained, on the first device."""
    config = read_config(path, overrides)
    shape = model_config(config, config.vocab_size or open_tokenizer(config.tokenizer_path).vocab_size)
    tokens = jnp.zeros((1, config.sequence_length), jnp.int32)
    model = make_model(layer_config(config), shape, tokens)
    params, quant_state = jax.eval_shape(model.init, jax.random.key(0))
    variables = params, quantization_state.warm(quant_state)
    engine = Engine(model, *variables, shape, max_length=config.sequence_length, **quantization_of(config))
    jitted, shapes = engine.programs()[name]
    place = NamedSharding(Mesh(np.array(devices[:1]), ("device",)), PartitionSpec())
    return jitted, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)
