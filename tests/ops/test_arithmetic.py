"""Recipes with lean arithmetic, compared with docs/guide/delayed.md: every rounding of the formulas, in numpy.

Magnitudes lie between 1/2 and 1, so that the products are multiples of 256 (e4m3), of 2^16 (with e5m2) or integers, and
their sums are exact in float32 in any order. Only the roundings of the formula remain, and bits are compared.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant.config.recipes import RECIPES
from jaxquant.core.dtypes import element
from jaxquant.ops import dot_general, initial_state
from jaxquant.ops.operand import quantize_kernel
from tests.ops.recipes import nearest

M, K, N = 24, 48, 16
NUMBERS = (((1,), (0,)), ((), ()))
LEAN = {row.recipe.name: row.recipe for row in RECIPES.values() if row.recipe is not None and row.recipe.is_lean}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def operand(seed: int, shape: tuple[int, int], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.uniform(0.5, 1, shape) * rng.choice([-1, 1], shape)).astype(DTYPES[dtype])


def rounded(x, dtype: str) -> np.ndarray:
    return np.asarray(x, np.float32).astype(DTYPES[dtype]).astype(np.float32)


def quantized(x: np.ndarray, spec, past: float | None, margin: int, dtype: str) -> tuple[np.ndarray, np.float32]:
    """Return q and the scale s: ``s = a · (2^margin / max)``, ``q = cast(clip(x / s))``, all in ``dtype`` but s."""
    kind = element(spec.dtype)
    is_delayed = spec.scaling == "delayed"
    amax = np.float32(past if is_delayed and past else np.abs(np.asarray(x, np.float32)).max())
    scale = amax * np.float32(2.0**margin / kind.max if is_delayed else 1 / kind.bound)
    quotient = rounded(np.asarray(x, np.float32) / rounded(scale, dtype), dtype)
    clipped = np.clip(quotient, -kind.max, kind.max)
    q = np.rint(clipped) if kind.kind == "int" else clipped.astype(getattr(ml_dtypes, kind.name))
    return q.astype(np.float64), scale


def contracted(a, b, accumulator: str | None, dtype: str) -> np.ndarray:
    """Return ``(q_a · q_b) · (s_a · s_b)``, in float32 from integers and else in the result's dtype."""
    (q_a, s_a), (q_b, s_b) = a, b
    inside = "float32" if accumulator == "int32" else dtype
    product, scale = rounded(q_a @ q_b, inside), rounded(s_a * s_b, inside)
    return rounded(product * scale, dtype)


def turned(a):
    return a[0].T, a[1]


CASES = [(name, "bfloat16", "float32", 1.7) for name in LEAN]
CASES += [("fp8", "float32", "float32", 1.7), ("fp8_current", "bfloat16", "bfloat16", None)]


@pytest.mark.parametrize(("name", "dtype", "kernel", "past"), CASES)
def test_every_rounding_is_the_documented_one(name, dtype, kernel, past):
    recipe = nearest(LEAN[name])
    margin = 0
    if recipe.delayed is not None:
        margin = 1
        recipe = dataclasses.replace(recipe, delayed=dataclasses.replace(recipe.delayed, margin=margin))
    x, w, grad = operand(0, (M, K), dtype), operand(1, (K, N), kernel), operand(2, (M, N), dtype)
    state = initial_state(recipe)
    if past is not None:
        state = {
            each: {field: v.at[3].set(past) if field == "amax_history" else v for field, v in tensor.items()}
            for each, tensor in state.items()
        }

    @jax.jit
    def run(x, w, grad, state):
        def op(x, w):
            return dot_general(x, w, NUMBERS, preferred_element_type=dtype, recipe=recipe, state=state)

        out, pull = jax.vjp(op, x, w)
        return out, *pull(grad)

    out, dx, dw = run(x, w, grad, state)
    q_x = quantized(x, recipe.fwd.lhs, past, margin, dtype)
    q_w = quantized(w, recipe.fwd.rhs, past, margin, kernel)
    q_grad = quantized(grad, recipe.dlhs.lhs, past, margin, dtype)
    accumulator = recipe.fwd.accumulator
    np.testing.assert_array_equal(np.asarray(out, np.float32), contracted(q_x, q_w, accumulator, dtype))
    np.testing.assert_array_equal(np.asarray(dx, np.float32), contracted(q_grad, turned(q_w), accumulator, dtype))
    # In the kernel's dtype if it is float32, else in the output gradient's dtype and then in the kernel's.
    inner = "float32" if kernel == "float32" else dtype
    expected = rounded(contracted(turned(q_x), q_grad, accumulator, inner), kernel)
    np.testing.assert_array_equal(np.asarray(dw, np.float32), expected)

    converted = quantize_kernel(jnp.asarray(w), (0,), recipe=recipe, state=state)  # conversion and export read these
    np.testing.assert_array_equal(np.asarray(converted.qvalue, np.float64), q_w[0])
    np.testing.assert_array_equal(np.asarray(converted.scale).reshape(()), q_w[1])
