"""Helpers of the tests of traced functions: shapes without values, configs, and what a report says."""

from __future__ import annotations

import jax

import jaxquant

FP8 = {"quantization": "fp8", "quant_backend": "native"}
CURRENT = {"quantization": "fp8_current", "quant_backend": "native"}


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def normal(seed, *sizes):
    return jax.random.normal(jax.random.key(seed), sizes)


def layers(fn, params, *args, config=CURRENT):
    """The layers of a function as {path: recipe, or the reason for none}, from shapes alone."""
    report = jaxquant.quantize(fn, config).report(params, *args)
    return {row.path: row.recipe or row.reason for row in report if row.weight or row.is_out_of_reach}


def primitives(jaxpr):
    """The names of all primitives of a jaxpr, those of the programs in it too."""
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn.primitive.name)
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    found += primitives(inner)
    return found


def float8_dots(fn, *args):
    """How many contractions of a function's trace have two float8 operands."""

    def count(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                total += all(str(atom.aval.dtype).startswith("float8") for atom in eqn.invars)
            for value in eqn.params.values():
                for item in value if isinstance(value, (tuple, list)) else (value,):
                    inner = getattr(item, "jaxpr", item)
                    if hasattr(inner, "eqns"):
                        total += count(inner)
        return total

    return count(jax.make_jaxpr(fn)(*args).jaxpr)
