"""Quantization of any JAX function of a parameter tree by rewriting its jaxpr.

A linear layer is a contraction of data with a value that is computed from parameters only. It is named by the path of
its parameter. Layer classes, frameworks, jit, scan and remat do not matter.

    fn(params, *args) ── jax.make_jaxpr ──► jaxpr
                                              │ analysis (flow.py: the facts about each value)
                                              ▼
                     Contraction: operation, side of the weight, leaves it is computed from, scans that stack it,
                                  batch axes, or the reason for which it stays in float
                                              │ decisions.py: path ── rules ──► recipe, chosen once for the leaves
                                              ▼
    params, quant state, args, key ── rewrite ──► outputs
                     the jaxpr is evaluated equation by equation; a chosen contraction becomes an op of contract.py,
                     and an equation that contains one (jit, remat, scan, while, cond, shard_map) is rebuilt around it

``registry.py`` holds the programs of functions with custom derivatives. ``paths.py`` names leaves, layers and their
state. Quant state is an input next to the parameters, and the new observations are its gradient, as for every op of
``jaxquant.ops``. A jaxpr contains no vmap: a batch axis of a weight comes from a vmap or from an einsum over experts,
and each element along it has its own scales and state.
"""

from jaxquant.trace.quantize import QuantizedFunction, quantize
from jaxquant.trace.registry import register_function, unregister_function
from jaxquant.trace.report import Report, Row

__all__ = ["QuantizedFunction", "Report", "Row", "quantize", "register_function", "unregister_function"]
