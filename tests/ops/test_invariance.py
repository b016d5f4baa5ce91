"""Batch invariance: a row has the same bits in every batch, and in every program that continues with it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import ops
from jaxquant.config.recipes import RECIPES
from jaxquant.core.calibration import parse_calibration
from jaxquant.ops import ragged
from jaxquant.ops.operand import quantize_kernel
from tests.ops.recipes import RECIPES as RECIPES_OF_OPS
from tests.ops.recipes import change

INVARIANT = {row.recipe.name: row.recipe for row in RECIPES.values() if row.recipe and row.recipe.is_batch_invariant}
GROUP_SIZES = (5, 0, 9)


def dot(x, w, **options):
    return ops.dot_general(x, w, (((1,), (0,)), ((), ())), **options)


def conv(x, w, **options):
    return ops.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def ragged_dot(x, w, **options):
    return ops.ragged_dot(x, w, jnp.array(GROUP_SIZES), **options)


def convert(*axes, batch=()):
    return lambda recipe, w: quantize_kernel(w, axes, recipe=recipe, batch=batch)


CASES = {
    "dot": (dot, (16, 48), (48, 40), convert(0)),
    "kernel": (functools.partial(dot, implementation="pallas"), (16, 128), (128, 128), convert(0)),
    "einsum": (functools.partial(ops.einsum, "bsk,knh->bsnh"), (4, 5, 48), (48, 4, 10), convert(0)),
    "experts": (functools.partial(ops.einsum, "bek,ekn->ben"), (16, 3, 48), (3, 48, 40), convert(1, batch=(0,))),
    "ragged": (ragged_dot, (16, 48), (3, 48, 40), lambda recipe, w: ragged.convert_kernel(recipe, w, {})),
    "conv": (conv, (4, 6, 6, 8), (3, 3, 8, 20), convert(0, 1, 2)),
}


def normal(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape)


PAIRS = [(name, "dot") for name in INVARIANT] + [("int8", "ragged")]
PAIRS += [pytest.param("int8", case, marks=pytest.mark.slow) for case in ("kernel", "einsum", "experts", "conv")]


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_a_row_has_the_same_bits_in_every_program(name, case, is_converted):
    op, x_shape, w_shape, to_kernel = CASES[case]
    weight = to_kernel(INVARIANT[name], normal(0, w_shape)).astype("float32") if is_converted else normal(0, w_shape)
    multiply = jax.jit(functools.partial(op, recipe=INVARIANT[name]))
    multiply_and_add = jax.jit(lambda x, w, residual: multiply(x, w) + residual)
    for seed in range(1, 4):
        x = normal(seed, x_shape)
        y = multiply(x, weight)
        residual = normal(-seed, y.shape)
        np.testing.assert_array_equal(multiply_and_add(x, weight, residual), np.asarray(y) + np.asarray(residual))
        np.testing.assert_array_equal(multiply(x[:-2], weight), y[:-2])
        np.testing.assert_array_equal(multiply(x.at[-2:].multiply(100), weight)[:-2], y[:-2])


@pytest.mark.parametrize("name", INVARIANT)
def test_a_single_row_with_one_output_feature_has_the_bits_of_a_batch(name):
    x, w, multiply = normal(0, (12, 97)), normal(1, (97, 1)), jax.jit(functools.partial(dot, recipe=INVARIANT[name]))
    np.testing.assert_array_equal(jnp.concatenate([multiply(row[None], w) for row in x]), multiply(x, w))


LONG = [(140002, 2, 2), (2, 140002, 2), (2, 2, 140002), (3, 50000, 2, 2)]
LONG_PAIRS = [(name, shape) for name in ("int8", "int8 asymmetric") for shape in LONG]


@pytest.mark.parametrize(("name", "shape"), [*LONG_PAIRS, ("int8 shards", (560008, 2, 2))], ids=str)
def test_sums_beyond_int32_are_split(name, shape):
    """Each matmul of a step in turn contracts more elements of one sign than int32 sums hold."""
    *rows, size, features = shape
    numbers = (((len(rows),), (0,)), ((), ()))
    product = functools.partial(ops.dot_general, dimension_numbers=numbers, recipe=RECIPES_OF_OPS[name])
    x, w = jnp.full((*rows, size), -1.0), jnp.full((size, features), -1.0)
    out, pull = jax.vjp(product, x, w)
    for found, want in zip((out, *pull(jnp.ones_like(out))), (size, -features, -np.prod(rows)), strict=True):
        np.testing.assert_allclose(found, jnp.full_like(found, want), rtol=0.02)


def test_sums_beyond_int32_of_an_axis_sharded_explicitly_are_split():
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(jnp.ones(140002 * 8), jax.NamedSharding(mesh, jax.P("data"))) for _ in range(2))
        found = dot(x[None], w[:, None], recipe=RECIPES_OF_OPS["int8"], out_sharding=jax.P())
    np.testing.assert_allclose(found, [[x.size]], rtol=0.02)


def test_only_per_row_scales_and_integer_sums_are_batch_invariant():
    """The properties of every string; the limit is where the largest codes fill int32, -128 of a weight included."""
    table = {name: row.recipe for name, row in RECIPES.items() if row.recipe}
    of = lambda kind: {name for name, recipe in table.items() if recipe.row_dependence == kind}  # noqa: E731
    assert of("history") >= {"fp8", "nanoo_fp8", "int8_delayed"}
    assert of("batch") >= {"fp8_current", "nvfp4", "quartet2", "aqt_fp8_full"}
    assert of("row") >= {"int8", "int4", "int8w", "fp8_full", "fp8_block", "mxfp8", "aqt_fp8"}
    assert set(INVARIANT) == {"int8", "int4"}
    size = table["int8"].exact_contraction_size
    assert size * 127 * 128 < 2**31 <= (size + 1) * 127 * 128
    fixed = change(table["aqt_fp8_full"], calibration=parse_calibration("fixed,4"))
    tiled = change(table["int8"], granularity="per_tile", tile_size=32)
    assert (fixed.row_dependence, tiled.exact_contraction_size, tiled.row_dependence) == ("row", None, "row")
    assert change(table["int8"], rounding="stochastic").row_dependence == "batch"
