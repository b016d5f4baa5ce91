"""Program size and saved bytes, on functions whose cost can be computed by hand."""

import jax
import jax.numpy as jnp

import jaxquant
from jaxquant.audit.cost import saved_for_backward

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def test_what_is_made_on_the_way_is_saved_once_and_arguments_are_not():
    assert saved_for_backward(lambda x, w: x @ w, X, W) == {}
    assert saved_for_backward(lambda x, w: jnp.sin(x @ w), X, W) == {"float32": 4 * 16 * 4}


def test_arguments_handed_through_jitted_functions_are_not_saved():
    inner = jax.jit(lambda x, w: (jnp.sin(x), w))
    outer = jax.jit(lambda x, w: inner(x, w))

    def function(x, w):
        y, w = outer(x, w)
        return y @ w

    # cos(x) for the sine, sin(x) for the kernel's gradient; w is an argument.
    assert saved_for_backward(function, X, W) == {"float32": 2 * 4 * 8 * 4}


def test_quant_state_that_the_function_closes_over_is_a_constant():
    quantized = jaxquant.quantize(lambda w, x: jnp.tanh(x @ w), {"quantization": "fp8"})
    state = quantized.init(jnp.ones((8, 16)), jnp.ones((4, 8)))
    closed = saved_for_backward(lambda w, x: quantized(w, state, x), W, X)
    assert closed == saved_for_backward(quantized, W, state, X)
    assert closed["float8_e4m3fn"] == 4 * 8 + 8 * 16
