"""Grouped matmuls and convolutions against float32: how far each recipe's result and gradients are, in dB."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import ops
from jaxquant.core.recipe import TensorSpec
from jaxquant.ops import conv, ragged
from tests import numerics
from tests.ops.recipes import RECIPES

SIZES = jnp.array([90, 0, 120])
NHWC = ("NHWC", "HWIO", "NHWC")
SHAPES = {"ragged_dot": ((220, 48), (3, 48, 32)), "conv_general_dilated": ((4, 8, 8, 16), (3, 3, 16, 24))}
EXPLAIN = {"ragged_dot": ragged.unsupported, "conv_general_dilated": conv.unsupported}


def run(op, recipe, lhs, rhs):
    if op == "ragged_dot":
        if recipe is None:
            return jax.lax.ragged_dot(lhs, rhs, SIZES)
        return ops.ragged_dot(lhs, rhs, SIZES, recipe=recipe, state=ragged.initial_state(recipe, 3))
    if recipe is None:
        return jax.lax.conv_general_dilated(lhs, rhs, (2, 1), "SAME", dimension_numbers=NHWC)
    state = ops.initial_state(recipe)
    return ops.conv_general_dilated(lhs, rhs, (2, 1), "SAME", dimension_numbers=NHWC, recipe=recipe, state=state)


def floor(recipe, matmul):
    """The dB that are left by two independent roundings."""
    specs = [recipe.resolve(matmul, side) for side in ("lhs", "rhs")]
    errors = [numerics.NORMAL_ERROR[spec.dtype] for spec in specs if isinstance(spec, TensorSpec)]
    return -10 * np.log10(sum(error**2 for error in errors)) - numerics.SQNR_MARGIN_DB if errors else 100


def sqnr(found, expected):
    return 10 * np.log10(np.sum(np.square(expected)) / max(np.sum(np.square(found - expected)), 1e-30))


# Clipping recipes lose the largest values by design, and tiles and zero points do not run here.
NAMES = [name for name in RECIPES if "clipping" not in name and not EXPLAIN["ragged_dot"](RECIPES[name])]


@pytest.mark.parametrize("op", SHAPES)
def test_results_and_gradients_are_as_near_as_two_roundings(op):
    keys = jax.random.split(jax.random.key(3), 3)
    lhs, rhs = (jax.random.normal(key, shape) for key, shape in zip(keys, SHAPES[op], strict=False))
    grad = jax.random.normal(keys[2], jax.eval_shape(lambda: run(op, None, lhs, rhs)).shape)
    names = [name for name in NAMES if not EXPLAIN[op](RECIPES[name])]

    @jax.jit
    def all_of_them(lhs, rhs, grad):
        results = []
        for recipe in (None, *(RECIPES[name] for name in names)):
            y, pull = jax.vjp(lambda x, w, recipe=recipe: run(op, recipe, x, w), lhs, rhs)
            results.append((y, *pull(grad)))
        return results

    expected, *found = jax.device_get(all_of_them(lhs, rhs, grad))
    assert len(found) >= 12
    low = {
        (name, matmul): (round(float(sqnr(own, reference)), 1), round(float(floor(RECIPES[name], matmul)), 1))
        for name, results in zip(names, found, strict=True)
        for matmul, own, reference in zip(("fwd", "dlhs", "drhs"), results, expected, strict=True)
        if sqnr(own, reference) < floor(RECIPES[name], matmul)
    }
    assert not low
