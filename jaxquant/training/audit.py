"""Training step of a configuration, for ``jaxquant audit`` and ``jaxquant coverage``; no device is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxquant import state as quantization_state
from jaxquant.training.sharding import BATCH
from jaxquant.training.start import read_config
from jaxquant.training.step import build
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
