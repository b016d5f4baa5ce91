"""The decoder, quantized as a configuration says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

import jaxquant
from jaxquant import state as quantization_state
from jaxquant.backends import RANDOM_STREAM
from jaxquant.config.backends import BACKENDS
from jaxquant.trace.report import Row
from train.config import TrainConfig
from train.model import Decoder, DecoderConfig

Rngs = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """A quantized decoder.

    Attributes:
      init: key -> (params, quant_state), nested dicts by module name.
      apply: (params, quant_state, inputs, segment_ids, positions, rngs[, cache]) -> logits, and with a cache
        (logits, cache); with ``targets`` the loss of each token, without all logits at once; see
        ``train.model.Decoder``.
      module: the Linen module of ``apply``, for reading its intermediates.
      layers: row of the report for each linear layer.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    apply: Callable[..., Any]
    module: nn.Module
    layers: list[Row]


def make_model(config: TrainConfig, shape: DecoderConfig, tokens: jax.Array) -> Model:
    """Build the decoder of a configuration and quantize it.

    With ``checkpoint_is_quantized`` it runs on converted parameters (``jaxquant.convert``) and has no ``init``.

    Args:
      config: configuration of the run.
      shape: shape and numerics of the decoder.
      tokens: example tokens of one micro-batch.

    Raises:
      ValueError, NotImplementedError: the quantization does not fit the model.
    """
    module = jaxquant.maybe_quantize_model(Decoder(shape), config, tokens)
    backend = config.resolved_backend
    # Without the stream, the native backend derives its noise from the bits of each gradient.
    streams = (RANDOM_STREAM,) if backend and BACKENDS[backend].needs_random_stream else ()

    def init(key: jax.Array) -> tuple[Any, Any]:
        return quantization_state.split(module.init({"params": key, RANDOM_STREAM: key}, tokens))

    def apply(params: Any, quant_state: Any, *inputs: jax.Array, rngs: Rngs, **given: Any) -> Any:
        variables = quantization_state.merge(params, quant_state)
        return module.apply(variables, *inputs, rngs={name: rngs[name] for name in streams}, **given)

    return Model(init, apply, module, jaxquant.describe_layers(Decoder(shape), config, tokens))
