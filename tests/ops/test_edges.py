"""Edge cases that work in float and must work quantized: tiny gradients, empty batches, higher derivatives."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.backends import load
from jaxquant.config.recipes import RECIPES
from jaxquant.core.calibration import Calibration
from jaxquant.core.delayed import empty_bins, widen_bins
from jaxquant.core.qtensor import dequantize
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, TensorSpec
from jaxquant.ops import dot_general, initial_state, ragged
from tests import numerics

OPTIMIZED = False  # test_dot_general.py tests the bits of optimized programs
NUMBERS = (((1,), (0,)), ((), ()))
DISTINCT = {row.recipe.name: row.recipe for row in RECIPES.values() if row.recipe is not None}
CLASSES = ("int8", "int8w", "fp8", "fp8_block", "mxfp8", "nvfp4", "quartet2", "ggml_q4_0")
"""One recipe of each kind of scale, rounding and backward pass; other recipes differ only in the element."""


def normal(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def gradients(recipe, x, w, grad, numbers=NUMBERS):
    run = lambda a, b, s: dot_general(a, b, numbers, recipe=recipe, state=s)  # noqa: E731
    out, pull = jax.vjp(run, x, w, initial_state(recipe))
    return (out, *pull(grad * jnp.ones_like(out))[:2])


def distance(ours, exact):
    """Return the relative norm of the difference, in units of the largest number, because squares of 1e-20 are 0."""
    top = jnp.abs(exact).max()
    return float(jnp.linalg.norm(ours / top - exact / top) / jnp.linalg.norm(exact / top))


@pytest.mark.parametrize("name", CLASSES)
def test_small_gradients_are_not_flushed(name):
    """Output gradients down to 1e-20 with activations of 0.01, and activations of 1e-12."""
    recipe = DISTINCT[name]
    x, w, grad = normal((24, 32)), normal((32, 16), 1) * 0.1, normal((24, 16), 2)
    run = jax.jit(lambda a, g: gradients(recipe, a, w, g)[1:])
    usual = [distance(a, b) for a, b in zip(run(x * 0.01, grad), (grad @ w.T, x.T @ grad * 0.01), strict=True)]
    for activation, size in ((0.01, 1e-11), (0.01, 1e-20), (1e-12, 1.0)):
        dx, dw = run(x * activation, grad * size)
        exact = (grad * size) @ w.T, (x * activation).T @ (grad * size)
        # The relative error does not depend on the magnitude; stochastic rounding uses different noise.
        for ours, theirs, error in zip((dx, dw), exact, usual, strict=True):
            assert distance(ours, theirs) <= 1.5 * error + 1e-6


@pytest.mark.parametrize("name", [*CLASSES, "fixed int8"])
def test_an_empty_batch_and_a_batch_of_one(name):
    recipe, w = {**DISTINCT, "fixed int8": RANGED}[name], normal((32, 16))
    run = jax.jit(lambda x: gradients(recipe, x, w, 1.0))
    out, dx, dw = run(jnp.ones((0, 32)))
    assert (out.shape, dx.shape, dw.shape, dw.any()) == ((0, 16), (0, 32), (32, 16), False)
    assert all(jnp.isfinite(part).all() for part in run(jnp.ones((1, 32))))


@pytest.mark.parametrize(("lhs", "rhs"), [((8,), (8, 3)), ((8,), (8,)), ((1, 1), (1, 1))])
def test_vectors(lhs, rhs):
    numbers, x, w = (((len(lhs) - 1,), (0,)), ((), ())), jnp.ones(lhs), jnp.ones(rhs)
    exact, pull = jax.vjp(lambda x, w: jnp.tensordot(x, w, numbers[0]), x, w)
    found = jax.jit(lambda x, w: gradients(DISTINCT["int8"], x, w, 1.0, numbers))(x, w)
    for ours, theirs in zip(found, (exact, *pull(jnp.ones_like(exact))), strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(ours / theirs - 1).max() < 0.01  # the amax is mapped to 127.5 and clipped to 127


RANGE = TensorSpec("int8", "per_tensor", Calibration("fixed", 1.0, -4.0, 4.0))
FIXED = Recipe("fixed int8", MatmulSpec(None, RANGE), MatmulSpec(None, FORWARD))
RANGED = Recipe("fixed int8", MatmulSpec(RANGE, RANGE), MatmulSpec(None, FORWARD), MatmulSpec(FORWARD, None))


@pytest.mark.parametrize("name", ["fp8", "int8w", "fixed int8"])
def test_a_second_derivative_is_refused_only_where_it_is_used(name):
    """First-order meta-learning ignores it; the value of a vjp would be differentiated through the rounding."""
    recipe, x, w = {**DISTINCT, "fixed int8": FIXED}[name], normal((4, 32)), normal((32, 16), 1)
    state = initial_state(recipe)
    loss = lambda w: jnp.sum(jnp.square(dot_general(x, w, NUMBERS, recipe=recipe, state=state)))  # noqa: E731
    adapted = lambda w: loss(w - 0.1 * jax.lax.stop_gradient(jax.grad(loss)(w)))  # noqa: E731
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        assert jax.eval_shape(jax.grad(wrap(adapted)), w).shape == w.shape
    for used in (lambda w: jax.value_and_grad(loss)(w)[0], lambda w: jax.vjp(loss, w)[0]):
        with pytest.raises(NotImplementedError, match=f"second derivatives through recipe '{recipe.name}'"):
            jax.eval_shape(jax.grad(used), w)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.jvp(jax.grad(loss), (w,), (w,))


def converted(recipe, w):
    state = initial_state(recipe)
    for tensor in state.values():
        tensor["amax_history"] = tensor["amax_history"].at[0].set(4.0)
    return load("native").quantize_weight("dot_general", recipe, w, (0,), state).astype(w.dtype.name)


@pytest.mark.parametrize("name", ["int8w", "fp8", "fp8_block", "nvfp4"])
def test_the_input_gradient_of_a_converted_kernel_is_that_of_the_dequantized_one(name):
    """Also if the kernel is a differentiated argument; it contracts the first axis, so it is transposed."""
    recipe, numbers, x, grad = DISTINCT[name], (((0,), (0,)), ((), ())), normal((32, 24)), normal((24, 16), 2)
    weight = converted(recipe, normal((32, 16), 1))
    run = lambda a, b: dot_general(a, b, numbers, recipe=recipe)  # noqa: E731
    exact = lambda a: jax.lax.dot_general(a, dequantize(weight), numbers, precision="highest")  # noqa: E731
    wanted, bound = jax.vjp(exact, x)[1](grad)[0], (numerics.SMALL_SUM_RTOL, numerics.SMALL_SUM_ATOL)
    both = jax.jit(lambda a, b: jax.vjp(run, a, b)[1](grad)[0])(x, weight)
    for found in (both, jax.vjp(lambda a: run(a, weight), x)[1](grad)[0]):
        np.testing.assert_allclose(found, wanted, *bound)


def test_wide_dtypes_and_strict_promotion():
    """Run float64 operands under x64, without any implicit promotion."""
    for name in ("int8", "fp8_full", "mxfp8", "nvfp4", "quartet2", "fp8_current"):
        recipe = DISTINCT[name]
        with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
            x, w = jnp.asarray(np.ones((4, 32))), jnp.asarray(np.ones((32, 16)))
            shapes = jax.eval_shape(lambda a, b, r=recipe: gradients(r, a, b, jnp.float64(1.0)), x, w)
        assert [part.dtype.name for part in shapes] == ["float64"] * 3


@pytest.mark.parametrize(("name", "casts"), [("fp8_block", 5), ("mxfp8", 6)])
def test_no_operand_is_quantized_again(name, casts):
    """Each operand of a recipe is cast once, from the float tensor."""
    x, w = normal((300, 160)), normal((160, 200))
    jaxpr = jax.make_jaxpr(lambda x, w: gradients(DISTINCT[name], x, w, 1.0))(x, w)
    found = re.findall(r":f8_e[45]m[23]\w*\[\d[\d,]*\] = convert_element_type", str(jaxpr))  # padding's 0 is a scalar
    assert len(found) == casts


@pytest.mark.parametrize("name", numerics.SQNR_FLOORS)
def test_block_scaled_matmuls_keep_their_signal(name):
    """Compare forward, dx and dw of a 512 by 512 by 384 matmul of normal numbers with float32."""
    x, w, grad = normal((512, 512)), normal((512, 384), 1), normal((512, 384), 2)
    ours = jax.jit(lambda a, b, g: gradients(DISTINCT[name], a, b, g))(x, w, grad)
    exact = x @ w, grad @ w.T, x.T @ grad
    sqnr = [-20 * np.log10(distance(a, b)) for a, b in zip(ours, exact, strict=True)]
    assert all(found >= floor for found, floor in zip(sqnr, numerics.SQNR_FLOORS[name], strict=True)), sqnr
    if name == "fp8_block":
        assert distance(ours[0], exact[0]) == pytest.approx(0.0369, rel=numerics.BLOCK_RMSE_RTOL)


@pytest.mark.parametrize(
    ("is_warm", "bad", "side", "groups"),
    [(True, jnp.nan, "w", 0), (False, jnp.inf, "x", 0), (False, jnp.nan, "x", 2), (False, jnp.inf, "w", 2)],
)
def test_integers_of_delayed_scales_show_what_is_not_finite(is_warm, bad, side, groups):
    """Integers cannot represent NaN: the scale of an operand with NaN is NaN, in the forward and the backward pass."""
    recipe, sizes = DISTINCT["int8_delayed"], jnp.array([4, 4])
    arrays = {"x": normal((8, 32)), "w": normal((groups, 32, 16) if groups else (32, 16), 1)}
    arrays[side] = arrays[side].at[*(0,) * arrays[side].ndim].set(bad)
    state = ragged.initial_state(recipe, groups) if groups else initial_state(recipe)
    if is_warm:
        for row in state.values():
            row |= {"amax_history": row["amax_history"].at[0].set(4.0), "amax_bins": widen_bins(empty_bins())}

    def loss(x, w, state):
        how = {"recipe": recipe, "state": state}
        out = ragged.ragged_dot(x, w, sizes, **how) if groups else dot_general(x, w, NUMBERS, **how)
        return jnp.sum(out), out

    (dx, dw, observed), out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays.values(), state)
    group = slice(0, 4) if groups else slice(None)
    assert not jnp.isfinite(out[group]).any()
    assert not jnp.isfinite((dw[0] if groups else dw) if side == "x" else dx[group]).any()
    assert not groups or jnp.isfinite(out[4:]).all()
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(observed))
