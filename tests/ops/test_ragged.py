"""``ops.ragged_dot``: each group is what ``ops.dot_general`` computes of its rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxquant import ops
from jaxquant.config import recipes
from jaxquant.ops import ragged
from tests import numerics
from tests.ops.recipes import RECIPES, change

OPTIMIZED = False

STOCHASTIC = RECIPES["int8 stochastic"]
SIZES = (5, 0, 4)
ROWS, K, N = 12, 8, 6
"""Three rows behind the last group, and a group without rows."""


def operands(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((ROWS, K), (len(SIZES), K, N), (ROWS, N))
    lhs, rhs, grad = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    by_group = jnp.array([1.0, 1.0, 5.0])
    return lhs.at[5:].multiply(3), rhs * by_group[:, None, None], grad


@pytest.mark.parametrize(("name", "dtype"), [("fp8_block", "uint8"), ("int8", "int8")])
def test_sizes_of_any_integers_give_one_gradient(name, dtype):
    recipe = recipes.RECIPES[name].recipe
    if name == "int8":
        recipe = dataclasses.replace(recipe, drhs=dataclasses.replace(recipe.drhs, shards=4))
    lhs, rhs, grad = (x.repeat(20, 0) if len(x) == ROWS else x for x in operands())

    def gradients(dtype):
        sizes = jnp.array([100, 0, 80]).astype(dtype)
        fn = lambda x, w: ops.ragged_dot(x, w, sizes, recipe=recipe, key=jax.random.key(0))  # noqa: E731
        return jax.vjp(fn, lhs, rhs)[1](grad)

    for found, expected in zip(gradients(dtype), gradients("int32"), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_shards_of_the_weight_gradient_are_ragged_matmuls_of_their_rows():
    """Four blocks of three rows: the first group ends within the second, the last within the third."""
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


KINDS = ("int8", "fp8", "fp8_block", "mxfp8", "quartet2", "ggml_q4_0")
TABLE = {name: recipes.RECIPES[name].recipe for name in KINDS}
TABLE |= {name: RECIPES[name] for name in ("fp8 as flax", "fp8_full clipping")}
TABLE |= {"nvfp4 to nearest": RECIPES["nvfp4"]}
TABLE |= {f"{n} tiles": change(RECIPES[n], granularity="per_tile", tile_size=32) for n in ("int8", "int4w")}
"""A recipe of each kind with its own rounding, and tiles; to nearest, a dense matmul has the bits."""
LONG, DEEP, WIDE, FILLED = (200, 0, 128, 5), 160, 144, 256
"""A group that is no multiple of a tile, none, a multiple, less than a tile; and to what the reference fills each."""


def _sqnr(found, exact):
    return -20 * np.log10(np.linalg.norm(found - exact) / np.linalg.norm(exact) + 1e-9)


@pytest.mark.parametrize("name", TABLE)
def test_a_group_is_a_dot_general_of_its_rows_filled_with_zeros(name):
    """And the signal is that of the dense matmul; what lies behind the last group, NaN too, changes no bit."""
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
        filled = max(size, 1) if "clipping" in name else FILLED  # zeros would count in a root mean square
        x, g = (jnp.zeros((filled, each.shape[1])).at[:size].set(each[start : start + size]) for each in (lhs, grad))
        parts = alone(x, rhs[group], g, jax.tree.map(lambda each, group=group: each[group], own))
        factors = (x, rhs[group]), (g, rhs[group].T), (x.T, g)
        places = (slice(start, start + size),) * 2 + (group,)
        for one, other in zip(*map(jax.tree.leaves, (found[3], parts[3])), strict=True):  # what was seen
            np.testing.assert_array_equal(one[group], other if size else 0)
        for all_, bound, place, part, (left, right) in zip(dense, bounds, places, parts[:3], factors, strict=True):
            cut = slice(None) if place is group else slice(size)
            all_[place] = part[cut]
            bound[place] = numerics.dot_bound(np.asarray(left), np.asarray(right), max(eps / 4, 2.0**-23))[cut]

    exact = three(lambda x, w, _: jax.lax.ragged_dot(x, w, sizes, precision="highest"), lhs, rhs, grad)
    floors = numerics.SQNR_FLOORS.get(name, (20,) * 3 if name.startswith(("fp8", "nanoo", "aqt")) else (0,) * 3)
    for one, other, bound, real, floor in zip(found[:3], dense, bounds, exact[:3], floors, strict=True):
        signal = _sqnr(one, real)
        assert signal >= floor
        if recipe.is_stochastic:  # the filled group draws other noise
            assert abs(signal - _sqnr(other, real)) <= numerics.GROUPED_SQNR_DB
        else:
            assert np.all(np.abs(one - other) <= bound)


@pytest.mark.parametrize("name", ["fp8", "fp8_current"])
def test_operands_in_bfloat16_are_divided_as_those_of_a_dot_general(name):
    """A code that fell to its neighbour would be 4 % of the largest result; sums and scales round once or twice."""
    recipe = RECIPES[name]
    shapes = zip(jax.random.split(jax.random.key(0), 3), ((64, 128), (1, 128, 96), (64, 96)), strict=True)
    lhs, rhs, grad = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in shapes)

    def three(dot):
        y, pull = jax.jit(lambda x, w: jax.vjp(dot, x, w))(lhs, rhs)
        return y, *pull(grad)

    own, state_of = ragged.initial_state(recipe, 1), lambda own: jax.tree.map(lambda each: each[0], own)
    numbers = (((1,), (0,)), ((), ()))
    found = three(lambda x, w: ops.ragged_dot(x, w, jnp.array([64]), recipe=recipe, state=own))
    wanted = three(lambda x, w: ops.dot_general(x, w[0], numbers, recipe=recipe, state=state_of(own)))
    for one, other in zip(found, wanted, strict=True):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        assert np.abs(one - other).max() <= 2 * numerics.BFLOAT16_EPS * np.abs(other).max()


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_no_rows_at_all_give_no_gradient(name):
    run = lambda x, w: ops.ragged_dot(x, w, jnp.zeros(3, int), recipe=RECIPES[name])  # noqa: E731
    y, pull = jax.vjp(run, jnp.ones((0, K)), jnp.ones((3, K, N)))
    dx, dw = pull(y)
    assert (y.shape, dx.shape, dw.shape) == ((0, N), (0, K), (3, K, N))
    assert not dw.any()


def test_noise_without_a_key_does_not_come_of_rows_behind_the_last_group():
    lhs, rhs, grad = operands()
    pull = jax.jit(lambda g: jax.vjp(lambda w: ops.ragged_dot(lhs, w, jnp.array(SIZES), recipe=STOCHASTIC), rhs)[1](g))
    np.testing.assert_array_equal(pull(grad)[0], pull(grad.at[sum(SIZES) :].set(jnp.nan))[0])


def test_what_does_not_run_is_refused():
    lhs, rhs, _ = operands()
    sizes = jnp.array(SIZES)
    sharded = change(RECIPES["int8 shards"], granularity="per_tile", tile_size=4)
    blocks = change(RECIPES["int8"], granularity="per_block", tile_size=4, free_size=4)
    refused = (RECIPES["int8 asymmetric"], "asymmetric"), (sharded, "shards of .* tiles"), (blocks, "blocks across")
    for r, why in refused:
        with pytest.raises(NotImplementedError, match=f"recipe '{r.name}' has .*{why}.*which ragged_dot does not run"):
            ops.ragged_dot(lhs, rhs, sizes, recipe=r)
    with pytest.raises(ValueError, match="shard_count 4 of recipe 'int8' does not divide the 10 rows"):
        jax.grad(lambda w: jnp.sum(ops.ragged_dot(lhs[:10], w, sizes, recipe=RECIPES["int8 shards"])))(rhs)
    with pytest.raises(ValueError, match=r"got \(12, 8\), \(2, 8, 6\) and \(3,\)"):
        ops.ragged_dot(lhs, rhs[:2], sizes, recipe=RECIPES["int8"])


def test_ragged_dot_and_convolutions_refuse_an_explicit_mesh():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    rows = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, PartitionSpec("x")))
    recipe, image = recipes.RECIPES["fp8_current"].recipe, rows[None, :, :, None]
    with jax.set_mesh(mesh):
        with pytest.raises(NotImplementedError, match="explicit mesh"):
            ops.ragged_dot(rows, jnp.ones((1, 8, 8)), jnp.array([4]), recipe=recipe)
        with pytest.raises(NotImplementedError, match="explicit mesh"):
            ops.conv_general_dilated(image, jnp.ones((1, 1, 1, 1)), (1, 1), "SAME", recipe=recipe)
