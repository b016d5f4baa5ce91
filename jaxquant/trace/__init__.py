"""trace: quantize any JAX function of a tree of parameters by rewriting what it computes.

A model is what it computes: a linear layer is a contraction of data with something that depends on parameters alone,
named by the path of its parameter. Layer classes, frameworks, jit, scan and remat do not matter.

    fn(params, *args) ── jax.make_jaxpr ──► jaxpr
                                              │ analysis (flow.py: what is known of each value)
                                              ▼
                     Contraction: operation, weight's side, leaves it is made of, scans it is stacked over,
                                  batch axes, or the reason for which it stays float
                                              │ quantize.py: path ── rules ──► recipe, bound to the leaves, once
                                              ▼
    params, quant state, args, key ── rewrite ──► outputs
                     the jaxpr evaluated equation by equation; a chosen contraction becomes an op of contract.py, what
                     contains one (jit, remat, scan, while, cond, shard_map) is built again around it

``registry.py`` knows what functions with derivatives of their own compute. ``paths.py`` names leaves, layers and their
state. Quant state goes in beside the parameters, and what was seen comes out as its gradient, as with every op of
``jaxquant.ops``. A jaxpr has no vmap left in it: a batch axis of a weight is what vmap was (or an einsum over experts),
and each element along it has scales and state of its own.
"""

from jaxquant.trace.quantize import QuantizedFunction, quantize
from jaxquant.trace.registry import register_function, unregister_function
from jaxquant.trace.report import Report, Row

__all__ = ["QuantizedFunction", "Report", "Row", "quantize", "register_function", "unregister_function"]
