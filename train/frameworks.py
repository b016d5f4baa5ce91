"""The decoder in Linen and in NNX behind one face: parameters and quant state are the same nested dicts in both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

import jaxquant
from jaxquant import serving
from jaxquant import state as quantization_state
from jaxquant.backends import RANDOM_STREAM
from jaxquant.config.backends import BACKENDS
from jaxquant.trace.report import Row
from train import model as linen_model
from train import model_nnx
from train.config import TrainConfig
from train.model import DecoderConfig

Rngs = Mapping[str, jax.Array]
_NNX_STATE = "quant_kernel"


@dataclasses.dataclass(frozen=True)
class Model:
    """A quantized decoder.

    Attributes:
      init: key -> (params, quant_state), nested dicts by module name, the same in both frameworks.
      apply: (params, quant_state, inputs, segment_ids, positions, rngs[, cache]) -> logits, and with a cache
        (logits, cache); with ``targets`` the loss of each token, without all logits at once; see
        ``train.model.Decoder``.
      linen: the Linen decoder of these parameters, for looking inside: itself, or the twin of an NNX one.
      apply_linen: its ``apply``, called as ours.
      layers: what the configuration makes of each linear layer.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    apply: Callable[..., Any]
    linen: nn.Module
    apply_linen: Callable[..., Any]
    layers: list[Row]


def make_model(config: TrainConfig, shape: DecoderConfig, tokens: jax.Array) -> Model:
    """Build the decoder of a configuration in its framework and quantize it.

    With ``checkpoint_is_quantized`` it runs on converted parameters (``jaxquant.convert``) and has no ``init``.

    Args:
      shape: the decoder's shape and numerics.
      tokens: of the shape of one micro-batch.

    Raises:
      ValueError, NotImplementedError: the quantization does not fit the model.
    """
    linen = jaxquant.maybe_quantize_model(linen_model.Decoder(shape), config, tokens)
    backend = config.resolved_backend
    # Without the stream the native op draws its noise from each gradient's bits: the same in both frameworks.
    streams = (RANDOM_STREAM,) if backend and BACKENDS[backend].needs_random_stream else ()

    def init(key: jax.Array) -> tuple[Any, Any]:
        return quantization_state.split(linen.init({"params": key, RANDOM_STREAM: key}, tokens))

    def apply(params: Any, quant_state: Any, *inputs: jax.Array, rngs: Rngs, **given: Any) -> Any:
        variables = quantization_state.merge(params, quant_state)
        return linen.apply(variables, *inputs, rngs={name: rngs[name] for name in streams}, **given)

    if config.framework == "linen":
        layers = jaxquant.describe_layers(linen_model.Decoder(shape), config, tokens)
        return Model(init, apply, linen, apply, layers)
    plain = nnx.eval_shape(lambda: model_nnx.Decoder(shape, nnx.Rngs(0)))
    layers = jaxquant.describe_layers(plain, config, tokens)
    return Model(init, _nnx_apply(config, shape, tokens, plain), linen, apply, layers)


def _nnx_apply(config: TrainConfig, shape: DecoderConfig, tokens: jax.Array, plain: nnx.Module) -> Callable[..., Any]:
    """Return the forward pass of the NNX decoder; ``plain`` is the float one, as shapes."""
    trained = dataclasses.replace(config, checkpoint_is_quantized=False)

    def quantized(params: Any) -> Any:
        model = model_nnx.Decoder(shape, nnx.Rngs(0))
        nnx.update(model, params)
        model = jaxquant.maybe_quantize_model(model, trained, tokens)
        return jaxquant.convert(model, trained, tokens) if config.checkpoint_is_quantized else model

    structure, blank = nnx.split(nnx.eval_shape(quantized, nnx.to_pure_dict(nnx.state(plain, nnx.Param))))

    def apply(params: Any, quant_state: Any, *inputs: jax.Array, rngs: Rngs, **given: Any) -> Any:
        model = nnx.merge(structure, blank, copy=True)
        serving.update_nnx(model, params)
        # Checkpoints are the same: Linen's quant state, under the names of its ops.
        state = flatten_dict(quantization_state.unpack(quant_state))
        nnx.update(model, unflatten_dict({(*path[:-2], _NNX_STATE, path[-1]): x for path, x in state.items()}))
        with quantization_state.by_hand():  # the step differentiates both arguments and updates both
            return model(*inputs, **given)  # pyright: ignore[reportCallIssue]

    return apply
