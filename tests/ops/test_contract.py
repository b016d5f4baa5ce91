"""contract: which arithmetic multiplies what, that it is as exact as it says, and what it holds in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.config.recipes import RECIPES
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, TensorSpec
from jaxquant.ops import dot_general
from jaxquant.ops.contract import contract, dequantized_dtype
from jaxquant.ops.dimensions import Dimensions
from tests import numerics
from tests.lowering import equations

M, K, N = 48, 256, 64
DIMS = Dimensions((1,), (0,), (), (), 2, 2)
NUMBERS = (((1,), (0,)), ((), ()))
MX = TensorSpec("float8_e4m3fn", "per_tile", tile_size=32, scale_dtype="float8_e8m0fnu", scale_rounding="up")
INT4 = TensorSpec("int4", "per_tile", tile_size=32)
LONE = {
    "int8w": TensorSpec("int8"),
    "int4 tiles": INT4,
    "fp8": TensorSpec("float8_e4m3fn"),
    "fp8 blocks": TensorSpec("float8_e4m3fn", "per_block", tile_size=32, free_size=32),
    "nvfp4": RECIPES["quartet2"].recipe.fwd.rhs,
}
"""Weights that a float activation meets."""


def operands(rows=M, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (rows, K)) * jnp.logspace(-3, 3, K)
    return x.astype(dtype), jax.random.normal(keys[1], (K, N)) * jnp.logspace(-3, 3, N)


def exact(tensor):
    return np.asarray(dequantize(tensor), np.float64) if isinstance(tensor, QTensor) else np.asarray(tensor, np.float64)


def sizes(function, *arguments):
    """Return the elements of every array of a traced function."""
    found = equations(jax.make_jaxpr(function)(*arguments).jaxpr)
    return [variable.aval.size for eqn in found for variable in eqn.outvars]


@pytest.mark.parametrize(("dtype", "out_dtype"), [("float8_e4m3fn", "float32"), ("float4_e2m1fn", "bfloat16")])
def test_tiles_with_scales_that_are_powers_of_two_lose_nothing_in_bfloat16(dtype, out_dtype):
    x, w = operands()
    spec = TensorSpec(dtype, "per_tile", tile_size=32, scale_dtype="float8_e8m0fnu", scale_rounding="up")
    left, right = quantize(x, spec, (1,)), quantize(w, spec, (0,))
    assert dequantized_dtype(left, right, DIMS, out_dtype) == "bfloat16"
    for side in (left, right):
        np.testing.assert_array_equal(exact(side), np.asarray(dequantize(side, "bfloat16"), np.float64))
    found = np.asarray(contract(left, right, DIMS, out_dtype=out_dtype, accumulator="float32"), np.float64)
    eps = numerics.BFLOAT16_EPS if out_dtype == "bfloat16" else 0
    bound = numerics.dot_bound(exact(left), exact(right), numerics.FLOAT32_EPS)
    assert np.all(np.abs(found - exact(left) @ exact(right)) <= bound + eps * np.abs(found))


def test_blocks_with_float32_scales_lose_a_bfloat16_rounding_and_no_more():
    """What README says of ``fp8_block`` in a bfloat16 model; in a float32 one nothing is lost."""
    recipe = RECIPES["fp8_block"].recipe
    assert recipe is not None
    x, w = operands()
    left, right = quantize(x, recipe.fwd.lhs, (1,)), quantize(w, recipe.fwd.rhs, (0,))
    expected = exact(left) @ exact(right)
    for out_dtype, most in (("bfloat16", 4e-3), ("float32", 1e-6)):
        assert dequantized_dtype(left, right, DIMS, out_dtype) == out_dtype
        found = exact(contract(left, right, DIMS, out_dtype=out_dtype, accumulator="float32"))
        assert np.linalg.norm(found - expected) <= most * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4"])
def test_no_step_of_a_block_recipe_holds_a_result_a_tile(name):
    x, w = operands()
    recipe = RECIPES[name].recipe
    assert recipe is not None

    def step(x, w):
        return jax.grad(lambda x, w: dot_general(x, w, NUMBERS, recipe=recipe).astype("float32").sum(), (0, 1))(x, w)

    assert max(sizes(step, x, w)) <= max(M * K, K * N, M * N) * 1.01


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("spec", [TensorSpec("int8"), INT4], ids=str)
def test_a_lone_weight_is_scaled_after_the_product(rows, spec):
    """The qvalues are exact in bfloat16: with channels, or half as many rows as a tile, it is rounded once."""
    x, w = operands(rows)
    weight = quantize(w, spec, (0,))
    found = exact(contract(x, weight, DIMS, out_dtype="bfloat16"))
    expected, is_after = exact(x) @ exact(weight), spec.tile_size is None or 2 * rows <= spec.tile_size
    assert (dequantized_dtype(x, weight, DIMS, "bfloat16") is None) == is_after
    rounded = numerics.dot_bound(exact(x), exact(weight), numerics.FLOAT32_EPS if is_after else numerics.BFLOAT16_EPS)
    assert np.all(np.abs(found - expected) <= rounded + numerics.BFLOAT16_EPS * np.abs(expected))


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in LONE), ("int4 tiles", "float32")])
def test_a_served_row_has_the_bits_of_a_trained_one(name, dtype, monkeypatch):
    """With any number of rows: one, up to half a tile, more. Also where a single row is made two."""
    x, w = (each.astype(dtype) for each in operands(64))
    spec = LONE[name]
    recipe = Recipe("lone", fwd=MatmulSpec(None, spec), dlhs=MatmulSpec(None, FORWARD))
    kernel = jax.jit(lambda w: quantize(w, spec, (0,)).astype(dtype))(w)
    run = jax.jit(lambda x, w: dot_general(x, w, NUMBERS, recipe=recipe))
    for is_padded in (False, True):
        for rows in (1,) if is_padded else (0, 1, 8, 64):
            np.testing.assert_array_equal(run(x[:rows], kernel), run(x[:rows], w))
        jax.clear_caches()
        monkeypatch.setattr("jaxquant.ops.contract.SMALL", 0)
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *given, cpu, default: default(*given))


def test_a_row_is_answered_alike_alone_and_among_half_a_tile_of_others():
    """So a chunk of a prompt is answered as its tokens one by one, but for the order in which products are added."""
    x, w = operands(16)
    for spec in (TensorSpec("int8"), INT4, MX):
        weight = quantize(w, spec, (0,))
        together = exact(contract(x, weight, DIMS, out_dtype="bfloat16"))
        alone = np.concatenate([exact(contract(row[None], weight, DIMS, out_dtype="bfloat16")) for row in x])
        bound = numerics.dot_bound(exact(x), exact(weight), numerics.FLOAT32_EPS)
        assert np.all(np.abs(together - alone) <= 2 * bound + numerics.BFLOAT16_EPS * np.abs(alone))
