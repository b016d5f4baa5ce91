"""4 bits on Qwix, on CPUs, whose compiler fails on 4-bit operands that it need not reshape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant


@pytest.mark.parametrize("name", ["int4", "fp4"])
@pytest.mark.parametrize(
    ("equation", "x", "w"),
    [
        ("mk,kn->mn", (8, 32), (32, 16)),
        ("k,kn->n", (32,), (32, 16)),
        ("km,nk->mn", (32, 8), (16, 32)),
        ("mk,k->m", (8, 32), (32,)),
        ("bmk,bkn->bmn", (2, 8, 32), (2, 32, 16)),
        ("bk,bkn->bn", (2, 32), (2, 32, 16)),
        ("mjk,jkn->mn", (8, 4, 8), (4, 8, 16)),
        ("bmk,kn->bmn", (2, 8, 32), (32, 16)),
    ],
)
def test_any_contraction_compiles_and_converts(name, equation, x, w):
    x, params = jax.random.normal(jax.random.key(0), x), {"w": jax.random.normal(jax.random.key(1), w)}

    def plain(params, x):
        return jnp.einsum(equation, x, params["w"])

    q = jaxquant.quantize(plain, {"quantization": name, "quant_backend": "qwix"})
    assert [row.recipe for row in q.report(params, x).rows] == [name]
    grads = jax.jit(jax.grad(lambda p, x: jnp.sum(q(p, {}, x) ** 2), argnums=(0, 1)))(params, x)
    exact = jax.grad(lambda p, x: jnp.sum(plain(p, x) ** 2), argnums=(0, 1))(params, x)
    for found, want in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        assert np.linalg.norm(found - want) < 0.5 * np.linalg.norm(want)
    served = jax.jit(q)(q.convert(params, {}, x), {}, x)
    np.testing.assert_array_equal(served, jax.jit(q)(params, {}, x))


@pytest.mark.parametrize("name", ["int4", "fp4"])
def test_groups_are_multiplied_by_the_native_backend(name):
    x, params = jax.random.normal(jax.random.key(0), (64, 32)), {"w": jax.random.normal(jax.random.key(1), (3, 32, 16))}

    def plain(params, x):
        return jax.lax.ragged_dot(x, params["w"], jnp.array([20, 0, 44], jnp.int32))

    q = jaxquant.quantize(plain, {"quantization": name})
    exact = plain(params, x)
    assert 0 < np.linalg.norm(jax.jit(q)(params, {}, x) - exact) < 0.5 * np.linalg.norm(exact)
    with pytest.raises(ValueError, match="Qwix has no ragged_dot_general; use quant_backend 'native'"):
        jaxquant.quantize(plain, {"quantization": name, "quant_backend": "qwix"}).init(params, x)
