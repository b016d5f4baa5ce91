"""Compositions: fwd, dlhs and drhs of different strings; each operand is quantized from the float tensor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.core.delayed import advance
from jaxquant.core.recipe import Recipe
from jaxquant.ops import dot_general, initial_state
from tests.ops.recipes import recipe
from tests.states import recorded

OPTIMIZED = False

M, K, N = 256, 128, 384
NUMBERS = (((1,), (0,)), ((), ()))
KEY = jax.random.key(7)


def composed(fwd, dlhs=None, drhs=None, **options) -> Recipe:
    return recipe({"fwd": fwd, "dlhs": dlhs, "drhs": drhs}, **options)


def operands():
    shapes = zip(jax.random.split(jax.random.key(0), 3), ((M, K), (K, N), (M, N)), strict=True)
    return tuple(jax.random.normal(key, shape, "bfloat16") for key, shape in shapes)


def step(chosen: Recipe, state=None):
    """Return output, gradients and observations of one step with a key."""
    state = initial_state(chosen) if state is None else state

    @jax.jit
    def run(x, w, g, state):
        out, back = jax.vjp(lambda x, w, s: dot_general(x, w, NUMBERS, recipe=chosen, state=s, key=KEY), x, w, state)
        return out, *back(g.astype(out.dtype))

    return run(*operands(), state)


def assert_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("fwd", ["fp8", "mxfp8", "nvfp4", "int8w"])
def test_the_forward_is_that_of_its_row_to_the_bit(fwd):
    """The gradients' strings do not matter, and the arithmetic is the arithmetic of the string."""
    assert_bits(step(composed(fwd, "quartet2", "int8"))[0], step(recipe(fwd))[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "quartet2"])
def test_a_gradient_does_not_depend_on_the_forward_beside_it(name):
    """Its operands are quantized from the float tensor; from the forward's int4 codes, the error would be over 17 %."""
    _, dlhs, drhs, _ = step(composed(None, name, name))
    for fwd in ("mxfp8", "int4"):
        assert_bits(step(composed(fwd, name, "fp8_block"))[1], dlhs)
        assert_bits(step(composed(fwd, "fp8_block", name))[2], drhs)


@pytest.mark.parametrize(
    ("strings", "tensors"),
    [
        (("fp8", "quartet2", "quartet2"), {"input", "kernel"}),
        (("quartet2", "fp8", "fp8"), {"input", "kernel", "output_grad"}),
        (("mxfp8", None, "fp8"), {"input", "output_grad"}),
        (("fp8_current", "quartet2", "quartet2"), set()),
    ],
)
def test_histories_are_those_of_the_delayed_operands_and_advance(strings, tensors):
    whole = composed(*strings, **({"amax_history_length": 4} if tensors else {}))
    state = initial_state(whole)
    assert set(state) == tensors
    amaxes = dict(zip(("input", "kernel", "output_grad"), (jnp.abs(x).max() for x in operands()), strict=True))
    seen = step(whole, state=state)[3]
    after = {name: advance(state[name], seen[name]) for name in state}
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor["amax_history"], [recorded(amaxes[name]), 0, 0, 0])
    assert step(whole, state=after)[0].shape == (M, N)


@pytest.mark.parametrize(
    ("strings", "options", "error", "message"),
    [
        (("fp8", "int8_delayed"), {}, ValueError, "'fp8' of fwd and 'int8_delayed' of dlhs use different delayed"),
        (("fp8", "fp8", "fp8_current"), {"amax_init": "flax"}, ValueError, "needs one config string for all"),
        (("fp8", "ggml_q4_0"), {}, NotImplementedError, "dlhs reads the weight in the GGML format q4_0"),
    ],
)
def test_what_cannot_be_composed_is_refused(strings, options, error, message):
    with pytest.raises(error, match=message):
        composed(*strings, **options)


def test_coverage_and_report_name_the_composition_and_its_dtypes():
    composition, text = {"fwd": "fp8_current", "dlhs": "int8"}, "{fwd: fp8_current, dlhs: int8, drhs: null}"
    quantized = jaxquant.quantize(lambda params, x: x @ params["up"], {"quantization": composition})
    params, x = {"up": jnp.ones((64, 128))}, jnp.ones((128, 64))
    assert {row.path: row.recipe for row in quantized.report(params, x)} == {"up": text}
    step = jax.grad(lambda p, x: jnp.sum(quantized(p, {}, x).astype(jnp.float32) ** 2), (0, 1))
    found = jaxquant.coverage(step, params, x, config={"quantization": composition})
    found.check()
    assert {row.matmul: (str(row.dtypes.lhs), str(row.dtypes.rhs)) for row in found.rows} == {
        "fwd": ("float8_e4m3fn", "float8_e4m3fn"),
        "dlhs": ("int8", "int8"),
        "drhs": ("float32", "float32"),
    }
