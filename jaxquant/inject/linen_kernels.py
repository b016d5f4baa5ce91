"""The kernels of a Linen model that are converted: found on the trace of a call, and checked against the variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import unfreeze

from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.paths import at_layer, layer_name
from jaxquant.core.qtensor import QTensor
from jaxquant.core.trees import leaves_by_path, map_by_path
from jaxquant.inject.faces import STREAMS
from jaxquant.inject.layers import trace_init
from jaxquant.inject.linen import Call, Face, collections_of
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT
from jaxquant.trace.kernels import LayerKernel


def find_kernels(
    model: nn.Module, config: QuantConfig, variables: Mapping[str, Any], *inputs: Any, **kwargs: Any
) -> dict[str, LayerKernel]:
    """Find every kernel that a call with example inputs runs quantized, without computing anything.

    Args:
      model: the float model.
      config: what is asked.
      variables: its parameters, and the quant state of training; anything with a shape and a dtype.
      inputs, kwargs: of the call.

    Returns:
      The kernels by "/"-joined path of the parameter.

    Raises:
      ValueError: a kernel that is missing, of another shape, or read in a dtype that its converted one does not
        tell; quant state that is missing.
    """
    params, rest = collections_of(variables)
    given = leaves_by_path(params, lambda node: isinstance(node, QTensor))
    made = nn.meta.unbox(unfreeze(trace_init(model, *inputs, **kwargs))).get("params", {})

    def as_stored(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, given.get(path, leaf).dtype)

    face = Face(config)
    call = Call(face, model, None, tuple(rest) or False, False)
    args = rest, dict.fromkeys(STREAMS, jax.random.key(0)), inputs, kwargs
    state = variables.get(OVERWRITE_WITH_GRADIENT, {})

    def find(params: Any) -> dict[str, LayerKernel]:
        found, _ = face.engine.find_kernels(call, params, args, state, _missing)
        return {"/".join(name): kernel for name, kernel in found.items()}

    stored = map_by_path(as_stored, made)
    kernels = find(stored)
    served = kernels if jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype, stored, made)) else find(made)
    made = leaves_by_path(made)
    for path, kernel in kernels.items():
        _check_stored(path, kernel, given.get(path), made[path], served[path].dtype)
    return kernels


def _missing(recipe: str, path: str, field: str) -> str:
    return (
        f"recipe {recipe!r} at {at_layer(path)} keeps quant state in '{OVERWRITE_WITH_GRADIENT}', and the variables "
        f"have no {field!r} there; pass all that training keeps, or make it with jaxquant.calibrate"
    )


def _check_stored(path: str, kernel: LayerKernel, given: Any, made: Any, served_dtype: str) -> None:
    """Refuse a parameter that is not the one of the model.

    Args:
      path: of the parameter.
      kernel: what is converted.
      given: the parameter, None where there is none.
      made: that of a new model.
      served_dtype: name of the dtype in which a new model's op reads its own.
    """
    if given is None:
        raise ValueError(
            f"the variables have no parameter {path!r}, the kernel that {kernel.recipe.name!r} converts; pass all "
            "parameters of the model"
        )
    if tuple(given.shape) != tuple(made.shape):
        raise ValueError(
            f"parameter {path!r} of {at_layer(kernel.path)} has shape {tuple(given.shape)}, its layer reads "
            f"{tuple(made.shape)}"
        )
    if kernel.dtype != served_dtype:
        raise ValueError(
            f"{layer_name(kernel.path)} has a kernel of {given.dtype.name}, param_dtype {made.dtype.name} and no dtype "
            "of its own, so the kernel's decides what it computes in; give the layer that dtype or param_dtype"
        )
