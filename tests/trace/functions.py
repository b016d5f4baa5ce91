"""Helpers of the tests of traced functions: shapes without values, configs, and texts of a report."""

from __future__ import annotations

import jax
import numpy as np

import jaxquant
from tests.lowering import equations

FP8 = {"quantization": "fp8", "quant_backend": "native"}
CURRENT = {"quantization": "fp8_current", "quant_backend": "native"}


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def normal(seed, *sizes):
    return jax.random.normal(jax.random.key(seed), sizes)


def layers(fn, params, *args, config=CURRENT):
    """Return the layers of a function as {path: recipe, or the reason for float}, from shapes only."""
    report = jaxquant.quantize(fn, config).report(params, *args)
    return {row.path: row.recipe or row.reason for row in report if row.weight or row.is_out_of_reach}


def primitives(jaxpr):
    """Return the names of all primitives of a jaxpr and of the programs nested in it."""
    return [eqn.primitive.name for eqn in equations(jaxpr)]


def float8_dots(fn, *args):
    """Return the number of contractions of a function's trace that have two float8 operands."""
    dots = [eqn for eqn in equations(jax.make_jaxpr(fn)(*args).jaxpr) if eqn.primitive.name == "dot_general"]
    return sum(all(str(atom.aval.dtype).startswith("float8") for atom in eqn.invars) for eqn in dots)


def assert_same_bits(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for (path, a), b in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64), jax.tree_util.keystr(path))
