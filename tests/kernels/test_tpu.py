"""The TPU kernels of quantization and matmul, compared with their references without a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.core.quantize import quantize_with_scale
from jaxquant.core.recipe import TensorSpec
from jaxquant.kernels.fp8_einsum import reference as einsum_reference
from jaxquant.kernels.fp8_einsum import tpu as einsum_tpu
from jaxquant.kernels.fp8_einsum import tuning as einsum_tuning
from jaxquant.kernels.fp8_einsum.cases import CASES as EINSUM_CASES
from jaxquant.kernels.fp8_einsum.cases import Case
from jaxquant.kernels.quantize import reference, tpu, tuning
from jaxquant.kernels.quantize.cases import CASES


def arguments(case):
    x = 3 * jax.random.normal(jax.random.key(0), case.shape, case.x_dtype)
    x = x.at[1, 2].set(-1e6)
    return x, jax.random.uniform(jax.random.key(1), (1, 1), minval=0.005, maxval=0.1)


def options(case):
    return {"dtype": case.dtype, "compute_dtype": case.compute_dtype}


def bits(x):
    return None if x is None else np.asarray(x).tobytes()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_bit_is_the_references(case):
    x, scale = arguments(case)
    run = jax.jit(lambda x, scale: tpu.quantize(x, scale, **options(case), interpret=True))
    expected = jax.jit(lambda x, scale: reference.quantize(x, scale, **options(case)))
    got, wanted = run(x, scale), expected(x, scale)
    assert {name: bits(x) for name, x in got._asdict().items()} == {
        name: bits(x) for name, x in wanted._asdict().items()
    }
    limit = 127 if case.dtype == "int8" else float(jnp.finfo(case.dtype).max)
    assert got.q[1, 2] == -limit
    assert got.amax == jnp.abs(x).max()


def test_the_reference_is_the_cast_of_the_ops():
    x, scale = jax.random.normal(jax.random.key(0), (24, 40), jnp.bfloat16), jnp.full((1, 1), 0.01)
    q = reference.quantize(x, scale, dtype="float8_e5m2").q
    assert bits(q) == bits(quantize_with_scale(x, TensorSpec("float8_e5m2"), scale).qvalue)


@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf])
def test_an_amax_shows_what_is_not_finite(bad):
    x = jnp.ones((64, 256)).at[33, 77].set(bad)
    got = tpu.quantize(x, jnp.ones((1, 1)), dtype="float8_e4m3fn", interpret=True)
    assert np.isnan(got.amax) if np.isnan(bad) else got.amax == jnp.inf
    assert np.isnan(float(got.q[33, 77])) if np.isnan(bad) else abs(float(got.q[33, 77])) == 448


def test_blocks_and_vmap_change_nothing(monkeypatch):
    x = jax.random.normal(jax.random.key(0), (3, 160, 512))
    scale = jnp.exp2(jnp.array([-7.0, -6.0, -5.0])).reshape(3, 1, 1)
    run = jax.vmap(lambda x, scale: tpu.quantize(x, scale, dtype="int8", interpret=True))
    monkeypatch.setattr(tuning, "BLOCK", (64, 128))
    got = jax.jit(run)(x, scale)
    for i in range(3):
        wanted = reference.quantize(x[i], scale[i], dtype="int8")
        assert bits(got.q[i]) == bits(wanted.q)
        assert got.amax[i] == wanted.amax


def einsum_arguments(case, largest=3):
    """Return operands of small integers, whose sums are exact, and power-of-two scales."""
    B, M, N, K = case.sizes
    generator = np.random.default_rng(0)
    lhs, rhs = (
        jnp.asarray(generator.integers(-largest, largest + 1, shape if major == "k" else (B, K, shape[1])), dtype)
        for shape, major, dtype in (
            ((B, M, K), case.lhs_major, case.lhs_dtype),
            ((B, N, K), case.rhs_major, case.rhs_dtype),
        )
    )
    if not case.per_channel:
        return {"lhs": lhs, "rhs": rhs, "scale": jnp.full((1,), 0.25)}
    left, right = (jnp.exp2(jnp.asarray(generator.integers(-3, 4, n), jnp.float32)) for n in (B * M, B * N))
    return {"lhs": lhs, "rhs": rhs, "left": left.reshape(B, M, 1), "right": right.reshape(B, 1, N)}


def einsum_options(case):
    return {name: getattr(case, name) for name in ("out_dtype", "accumulator", "lhs_major", "rhs_major")}


@pytest.mark.parametrize("case", EINSUM_CASES, ids=str)
def test_exact_sums_have_the_references_bits(case):
    given = einsum_arguments(case)
    got = jax.jit(lambda given: einsum_tpu.matmul(**given, **einsum_options(case), interpret=True))(given)
    wanted = jax.jit(lambda given: einsum_reference.matmul(**given, **einsum_options(case)))(given)
    assert got.dtype == wanted.dtype == case.out_dtype
    np.testing.assert_array_equal(got, wanted)
    assert np.asarray(got, np.float32).any()


def test_blocks_and_vmap_change_nothing_in_a_matmul(monkeypatch):
    case = Case((2, 128, 256, 256), rhs_major="n")
    many = jax.tree.map(lambda x: jnp.stack([x, x[..., ::-1], -x]), einsum_arguments(case))
    many["scale"] = jnp.exp2(jnp.arange(3.0)).reshape(3, 1)
    run = jax.vmap(lambda given: einsum_tpu.matmul(**given, **einsum_options(case), interpret=True))
    monkeypatch.setattr(einsum_tuning, "BLOCK", (128, 128, 128))
    wanted = jax.vmap(lambda given: einsum_reference.matmul(**given, **einsum_options(case)))(many)
    np.testing.assert_array_equal(jax.jit(run)(many), wanted)
