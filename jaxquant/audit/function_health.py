"""FunctionHealth: the tensors of every layer of a function of ``jaxquant.quantize``, whatever its framework.

An NNX model is a function of its parameters: ``graph, params, rest = nnx.split(model, nnx.Param, ...)``, and
``lambda params, rest, x: nnx.merge(graph, params, rest)(x)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxquant.audit.health import Monitor
from jaxquant.trace.quantize import QuantizedFunction


class FunctionHealth(Monitor):
    """Measure the layers of a quantized function: ``monitor(params, quant_state, *args)`` takes what it takes.

    Attributes:
      rows: the layers, in the order of the forward pass.
    """

    def __init__(self, function: QuantizedFunction, loss: Callable[..., jax.Array], params: Any, *args: Any):
        """Find the layers; nothing is computed.

        Args:
          function: made by ``jaxquant.quantize``.
          loss: (what the function returns, ...) -> scalar; it gets the further arguments of the function, too.
          params, args: arguments of the function; arrays may be ``jax.ShapeDtypeStruct``.

        Raises:
          TypeError: not a quantized function.
          ValueError: the config quantizes nothing of it.
        """
        if not isinstance(function, QuantizedFunction):
            raise TypeError(
                f"FunctionHealth measures a function of jaxquant.quantize, got {type(function).__name__}; "
                "HealthMonitor measures Linen models"
            )
        engine = function.engine
        if engine.resolver is None:
            raise ValueError("quantization is off, so there is no health to measure")

        def run(params: Any, quant_state: Any, *args: Any) -> jax.Array:
            return loss(function(params, quant_state, *args), *args)

        super().__init__(engine, engine.trace(function.hashable, params, args).analysis, run)
