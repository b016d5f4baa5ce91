"""``ops.ragged_dot``: each group equals ``ops.dot_general`` on the rows of the group."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxquant import ops
from jaxquant.config import recipes
from jaxquant.ops import ragged
from tests import numerics
from tests.ops.recipes import RECIPES, change

OPTIMIZED = False

STOCHASTIC = RECIPES["int8 stochastic"]
SIZES = (5, 0, 4)
ROWS, K, N = 12, 8, 6
"""Group sizes: three rows are after the last group, and one group has no rows."""


def operands(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((ROWS, K), (len(SIZES), K, N), (ROWS, N))
    lhs, rhs, grad = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    by_group = jnp.array([1.0, 1.0, 5.0])
    return lhs.at[5:].multiply(3), rhs * by_group[:, None, None], grad


def test_shards_of_the_weight_gradient_are_ragged_matmuls_of_their_rows():
    """Four blocks of three rows: the first group ends in the second block, the last group in the third."""
    lhs, rhs, grad = operands()

    def gradients(name, rows, sizes):
        fn = lambda x, w: ops.ragged_dot(x, w, jnp.array(sizes), recipe=RECIPES[name])  # noqa: E731
        y, pull = jax.vjp(fn, lhs[rows], rhs)
        return y, *pull(grad[rows])

    found, whole = gradients("int8 shards", slice(None), SIZES), gradients("int8", slice(None), SIZES)
    parts = [(3, 0, 0), (2, 0, 1), (0, 0, 3), (0, 0, 0)]
    drhs = sum(gradients("int8", slice(3 * n, 3 * n + 3), sizes)[2] for n, sizes in enumerate(parts))
    for one, other in zip(found, (*whole[:2], drhs), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=numerics.GROUPED_ATOL["int32"] * np.max(np.abs(other)))
    assert np.any(found[2] != whole[2])


KINDS = ("int8", "fp8", "fp8_block", "quartet2", "ggml_q4_0")
TABLE = {name: recipes.RECIPES[name].recipe for name in KINDS}
TABLE |= {name: RECIPES[name] for name in ("fp8 as flax", "fp8_full clipping")}
TABLE |= {"nvfp4 to nearest": RECIPES["nvfp4"]}
TABLE |= {"int8 tiles": change(RECIPES["int8"], granularity="per_tile", tile_size=32)}
"""Recipes of each kind, with and without tiles; with rounding to nearest, the bits are those of a dense matmul."""
LONG, DEEP, WIDE, FILLED = (200, 0, 128, 5), 160, 144, 256
"""Group sizes (no multiple of a tile, 0, a multiple, less than a tile), and the reference's padded sizes."""


def _sqnr(found, exact):
    return -20 * np.log10(np.linalg.norm(found - exact) / np.linalg.norm(exact) + 1e-9)


@pytest.mark.parametrize("name", TABLE)
def test_a_group_is_a_dot_general_of_its_rows_filled_with_zeros(name):
    """The SQNR equals that of the dense matmul; rows after the last group change no bit, even if they are NaN."""
    recipe, rows = TABLE[name], sum(LONG)
    keys = [*jax.random.split(jax.random.key(0), 3), jax.random.key(3)]
    shapes = ((rows + 7, DEEP), (len(LONG), DEEP, WIDE), (rows + 7, WIDE))
    lhs, rhs, grad = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False))
    lhs, rhs = lhs.at[LONG[0] :].multiply(3), rhs * jnp.array([1.0, 1.0, 5.0, 2.0])[:, None, None]
    sizes, more = jnp.array(LONG), {"recipe": recipe, "key": keys[3] if recipe.is_stochastic else None}
    own = ragged.initial_state(recipe, len(LONG))

    def three(dot, lhs, rhs, grad, quant_state=own):
        y, pull = jax.vjp(dot, lhs, rhs, quant_state)
        return y, *pull(grad)

    grouped = jax.jit(functools.partial(three, lambda x, w, s: ops.ragged_dot(x, w, sizes, state=s, **more)))
    found = grouped(lhs, rhs, grad)
    again = grouped(lhs.at[rows:].set(jnp.nan), rhs, grad.at[rows:].set(jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, found, again)
    assert not found[0][rows:].any() and not found[1][rows:].any() and not found[2][1].any()  # noqa: PT018

    dense, bounds = ([np.zeros(each.shape, np.float32) for each in found[:3]] for _ in range(2))
    dot = lambda x, w, s: ops.dot_general(x, w, (((1,), (0,)), ((), ())), state=s, **more)  # noqa: E731
    alone, eps = jax.jit(functools.partial(three, dot)), numerics.GROUPED_ATOL[recipe.fwd.accumulator or "float32"]
    for group, (start, size) in enumerate(zip(np.cumsum(LONG) - LONG, LONG, strict=True)):
        filled = max(size, 1) if "clipping" in name else FILLED  # zeros would change a root mean square
        x, g = (jnp.zeros((filled, each.shape[1])).at[:size].set(each[start : start + size]) for each in (lhs, grad))
        parts = alone(x, rhs[group], g, jax.tree.map(lambda each, group=group: each[group], own))
        factors = (x, rhs[group]), (g, rhs[group].T), (x.T, g)
        places = (slice(start, start + size),) * 2 + (group,)
        for one, other in zip(*map(jax.tree.leaves, (found[3], parts[3])), strict=True):  # observations
            np.testing.assert_array_equal(one[group], other if size else 0)
        for all_, bound, place, part, (left, right) in zip(dense, bounds, places, parts[:3], factors, strict=True):
            cut = slice(None) if place is group else slice(size)
            all_[place] = part[cut]
            bound[place] = numerics.dot_bound(np.asarray(left), np.asarray(right), max(eps / 4, 2.0**-23))[cut]

    exact = three(lambda x, w, _: jax.lax.ragged_dot(x, w, sizes, precision="highest"), lhs, rhs, grad)
    floors = numerics.SQNR_FLOORS.get(name, (20,) * 3 if name.startswith("fp8") else (0,) * 3)
    for one, other, bound, real, floor in zip(found[:3], dense, bounds, exact[:3], floors, strict=True):
        signal = _sqnr(one, real)
        assert signal >= floor
        if recipe.is_stochastic:  # the padded group has different noise
            assert abs(signal - _sqnr(other, real)) <= numerics.GROUPED_SQNR_DB
        else:
            assert np.all(np.abs(one - other) <= bound)


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_no_rows_at_all_give_no_gradient(name):
    run = lambda x, w: ops.ragged_dot(x, w, jnp.zeros(3, int), recipe=RECIPES[name])  # noqa: E731
    y, pull = jax.vjp(run, jnp.ones((0, K)), jnp.ones((3, K, N)))
    dx, dw = pull(y)
    assert (y.shape, dx.shape, dw.shape) == ((0, N), (0, K), (3, K, N))
    assert not dw.any()


def test_what_does_not_run_is_refused():
    lhs, rhs, _ = operands()
    sizes = jnp.array(SIZES)
    for r, why in (
        (RECIPES["int8 asymmetric"], "asymmetric quantization"),
        (change(RECIPES["int8"], granularity="per_block", tile_size=4, free_size=4), "in blocks of several rows"),
    ):
        with pytest.raises(NotImplementedError, match=rf"dot does not support recipe '{r.name}' \(.*{why}\); use"):
            ops.ragged_dot(lhs, rhs, sizes, recipe=r)
    with pytest.raises(ValueError, match="4 of recipe 'int8' does not divide the 10 rows of a ragged matmul; use a"):
        jax.grad(lambda w: jnp.sum(ops.ragged_dot(lhs[:10], w, sizes, recipe=RECIPES["int8 shards"])))(rhs)
    with pytest.raises(ValueError, match=r"got shapes \(12, 8\), \(2, 8, 6\) and \(3,\)"):
        ops.ragged_dot(lhs, rhs[:2], sizes, recipe=RECIPES["int8"])


def test_ragged_dot_and_convolutions_refuse_an_explicit_mesh():
    recipe = RECIPES["fp8_current"]
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))):
        rows = jax.device_put(jnp.ones((4, 8)), PartitionSpec("x"))
        with pytest.raises(NotImplementedError, match="ragged_dot argument lhs is sharded on a mesh with explicit"):
            ops.ragged_dot(rows, jnp.ones((1, 8, 8)), jnp.array([4]), recipe=recipe)
        with pytest.raises(NotImplementedError, match="dilated argument lhs is sharded on a mesh with explicit axes"):
            ops.conv_general_dilated(rows[None, :, :, None], jnp.ones((1, 1, 1, 1)), (1, 1), "SAME", recipe=recipe)
