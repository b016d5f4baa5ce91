"""Which operands of a contraction lie in memory: on Hopper a kernel casts those, and XLA the others."""

import jax
import jax.numpy as jnp

import jaxquant
from tests.trace.functions import CURRENT, shape

SIZE = 8
X = shape(4, SIZE)


def stored(fn, params):
    """Return whether activation, weight and output gradient lie in memory, of each layer by its path."""
    quantized = jaxquant.quantize(fn, CURRENT)
    analysis = quantized.engine.trace(quantized.hashable, params, (X,)).analysis
    quantized.engine.decide(analysis)
    return {site.path: site.stored for site in analysis.plan.chosen}


def test_arguments_and_results_of_matmuls_lie_in_memory_and_what_is_computed_does_not():
    def chain(p, x):
        x = (x @ p["a"]) @ p["b"]
        x = jnp.tanh(x) @ p["c"].astype(jnp.float32)
        return x.reshape(-1, 2, SIZE) @ (2 * p["d"])

    params = {name: shape(SIZE, SIZE, dtype="bfloat16" if name == "c" else "float32") for name in "abcd"}
    wanted = {"a": (True, True, True), "b": (True, True, False), "c": (False, False, True), "d": (True, False, True)}
    assert stored(chain, params) == wanted


def test_a_scan_carries_what_lies_in_memory_and_slices_weights_where_they_are_read():
    fn = lambda p, x: jax.lax.scan(lambda h, w: (h @ w, None), x, p["w"])[0]  # noqa: E731
    assert stored(fn, {"w": shape(3, SIZE, SIZE)}) == {"w": (True, False, True)}


def test_a_jit_that_is_called_twice_has_what_holds_for_both_calls():
    layer = jax.jit(lambda w, x: x @ w)
    fn = lambda p, x: layer(p["b"], jnp.tanh(layer(p["a"], x)))  # noqa: E731
    assert stored(fn, {"a": shape(SIZE, SIZE), "b": shape(SIZE, SIZE)}) == dict.fromkeys("ab", (False, True, False))
