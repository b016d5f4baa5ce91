"""``ops.conv_general_dilated``, compared with ``ops.dot_general`` and with the numpy reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import ops
from tests import numerics
from tests.ops.recipes import RECIPES

OPTIMIZED = False

NHWC = ("NHWC", "HWIO", "NHWC")
NAMES = ["int8", "fp8", "int8w", "fp8_full clipping"]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("name", NAMES)
def test_a_window_of_the_whole_image_is_a_dot_general(name):
    """Without overlap, a convolution is one matmul of examples and output features, with the same scales and sums."""
    recipe = RECIPES[name]
    lhs, rhs, grad = normal(0, 8, 2, 3, 4), normal(1, 2, 3, 4, 6), normal(2, 8, 6)
    state = ops.initial_state(recipe)

    @jax.jit
    def both(lhs, rhs, grad):
        def convolve(x, w, s):
            return ops.conv_general_dilated(
                x, w, (1, 1), "VALID", dimension_numbers=NHWC, recipe=recipe, state=s
            ).reshape(8, 6)

        def multiply(x, w, s):
            return ops.dot_general(x, w, (((1, 2, 3), (0, 1, 2)), ((), ())), recipe=recipe, state=s)

        results = []
        for fn in (convolve, multiply):
            y, pull = jax.vjp(fn, lhs, rhs, state)
            results.append((y, *pull(grad)))
        return results

    found, expected = both(lhs, rhs, grad)
    bound = numerics.GROUPED_ATOL[recipe.fwd.accumulator or "float32"]
    for one, other in zip(found[:3], expected[:3], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=bound * np.max(np.abs(other)))
    for one, other in zip(*map(jax.tree.leaves, (found[3], expected[3])), strict=True):
        np.testing.assert_array_equal(one, other)


IMAGE, KERNEL = (2, 6, 7, 4), (3, 2, 4, 6)
CASES = {
    "strides": (KERNEL, {"window_strides": (2, 1), "padding": "SAME"}),
    "rhs_dilation": (KERNEL, {"window_strides": (1, 1), "padding": ((2, 0), (1, 1)), "rhs_dilation": (2, 1)}),
    "lhs_dilation": (KERNEL, {"window_strides": (1, 2), "padding": ((0, 1), (0, 0)), "lhs_dilation": (2, 2)}),
    "groups": ((3, 2, 2, 6), {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2}),
    "depthwise": ((3, 2, 1, 4), {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_representable_integers_are_exact(case):
    """Small integers with scale 1: the quantized convolution and its gradients equal the float ones, bit for bit."""
    rhs_shape, options = CASES[case]
    recipe = RECIPES["fp8 as flax"]  # scale 1 at the first step
    integers = lambda seed, shape: jnp.round(3 * jax.random.uniform(jax.random.key(seed), shape))  # noqa: E731
    lhs, rhs = integers(0, IMAGE), integers(1, rhs_shape)
    state = ops.initial_state(recipe)

    @jax.jit
    def both(lhs, rhs):
        def quantized(x, w):
            return ops.conv_general_dilated(x, w, dimension_numbers=NHWC, recipe=recipe, state=state, **options)

        def plain(x, w):
            return jax.lax.conv_general_dilated(x, w, dimension_numbers=NHWC, **options)

        results = []
        for fn in (quantized, plain):
            y, pull = jax.vjp(fn, lhs, rhs)
            results.append((y, *pull(integers(2, y.shape))))
        return results

    for one, other in zip(*both(lhs, rhs), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_does_not_run_is_refused():
    lhs, rhs = jnp.ones((2, 4, 6, 6)), jnp.ones((6, 4, 3, 3))
    for name, why in {"tiles": "tile or block", "asymmetric": "asymmetric quantization", "shards": "count 4"}.items():
        with pytest.raises(NotImplementedError, match=rf"dilated does not support recipe .* \(.*{why}\); use another"):
            ops.conv_general_dilated(lhs, rhs, (1, 1), "SAME", recipe=RECIPES[f"int8 {name}"])
    with pytest.raises(NotImplementedError, match="does not support batch_group_count 2; use 1"):
        ops.conv_general_dilated(lhs, rhs, (1, 1), "SAME", batch_group_count=2, recipe=RECIPES["int8"])
