"""Arrays in a tensor format: decoding, the matmul that decodes its operand, and training for a format."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.formats import fake_quantize, matmul, pack_array
from tests.lowering import equations
from tests.numerics import dot_bound

FORMATS = ["q4_k", "mxfp6_e2m3", "nvfp4"]


def arrays(rows: int, depth: int = 256) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((3, depth)).astype(np.float32), rng.standard_normal((depth, rows)).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_matmul_is_that_of_the_decoded_kernel(name, monkeypatch):
    monkeypatch.setattr("jaxquant.formats.packed_matmul.DECODED_ELEMENTS", 4 * 256)  # four rows at a time
    x, kernel = arrays(11)
    packed = pack_array(jnp.asarray(kernel), name, 0)
    decoded = np.asarray(packed.decode())
    out, pullback = jax.vjp(lambda x: matmul(x, packed), jnp.asarray(x))
    assert np.all(np.abs(out - x @ decoded) <= dot_bound(x, decoded))
    grad = np.random.default_rng(1).standard_normal(out.shape).astype(np.float32)
    assert np.all(np.abs(pullback(jnp.asarray(grad))[0] - grad @ decoded.T) <= dot_bound(grad, decoded.T))


def test_matmul_takes_checkpoint_order_leading_axes_and_bfloat16():
    x, kernel = arrays(8)
    packed = pack_array(jnp.asarray(kernel.T), "q8_0")
    x = jnp.asarray(x, jnp.bfloat16).reshape(1, 3, 256)
    out = matmul(x, packed)
    assert (out.shape, out.dtype) == ((1, 3, 8), jnp.bfloat16)
    reference = np.asarray(x, np.float32) @ np.asarray(packed.decode("bfloat16"), np.float32).T
    bound = dot_bound(np.asarray(x, np.float32), np.asarray(packed.decode("bfloat16"), np.float32).T)
    assert np.all(np.abs(np.asarray(out, np.float32) - reference) <= bound + 2.0**-8 * np.abs(reference))
    assert matmul(jnp.ones((0, 256)), packed).shape == (0, 8)


def test_the_kernel_is_never_whole_in_float():
    packed = jax.eval_shape(lambda x: pack_array(x, "q4_k"), jax.ShapeDtypeStruct((20000, 256), jnp.float32))

    def loss(x, kernel):
        return matmul(x, kernel).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jax.ShapeDtypeStruct((4, 256), jnp.float32), packed)
    made = [variable.aval for eqn in equations(jaxpr.jaxpr) for variable in eqn.outvars]
    assert max(aval.size for aval in made if jnp.issubdtype(aval.dtype, jnp.floating)) <= 1 << 20 < 20000 * 256


@pytest.mark.parametrize(("name", "dtype"), [("q4_0", "float32"), ("mxfp4", "bfloat16"), ("nvfp4", "bfloat16")])
def test_fake_quantization_is_the_round_trip_with_a_straight_gradient(name, dtype):
    x = jnp.asarray(arrays(4)[1], dtype)
    expected = pack_array(x, name, 0).decode(dtype)
    out, pullback = jax.vjp(lambda x: fake_quantize(x, name, 0), x)
    np.testing.assert_array_equal(out, expected)
    assert out.dtype == x.dtype
    grad = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape), dtype)
    np.testing.assert_array_equal(pullback(grad)[0], grad)
