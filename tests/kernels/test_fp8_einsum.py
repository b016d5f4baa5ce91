"""The kernel of the matmul, without a TPU, against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.kernels.fp8_einsum import reference, tpu, tuning
from jaxquant.kernels.fp8_einsum.cases import CASES, Case
from jaxquant.kernels.fp8_einsum.tuning import fit
from tests import numerics


def arguments(case, largest=3):
    """Make operands of small integers, of which every sum is exact, and scales that are powers of two."""
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


def options(case):
    return {name: getattr(case, name) for name in ("out_dtype", "accumulator", "lhs_major", "rhs_major")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_sums_have_the_references_bits(case):
    given = arguments(case)
    got = jax.jit(lambda given: tpu.matmul(**given, **options(case), interpret=True))(given)
    wanted = jax.jit(lambda given: reference.matmul(**given, **options(case)))(given)
    assert got.dtype == wanted.dtype == case.out_dtype
    np.testing.assert_array_equal(got, wanted)
    assert np.asarray(got, np.float32).any()


def test_random_sums_are_within_the_accumulators_bound():
    lhs, rhs = (jax.random.normal(jax.random.key(n), (1, 128, 640)).astype("float8_e4m3fn") for n in (0, 1))
    run = jax.jit(lambda *given: tpu.matmul(*given, out_dtype="float32", accumulator="float32", interpret=True))
    a, b = (np.asarray(x[0], np.float64) for x in (lhs, rhs))
    error = np.abs(np.asarray(run(lhs, rhs, jnp.ones(1))[0], np.float64) - a @ b.T)
    assert np.all(error <= numerics.dot_bound(a, b.T))


def test_blocks_and_vmap_change_nothing(monkeypatch):
    case = Case((2, 128, 256, 256), rhs_major="n")
    many = jax.tree.map(lambda x: jnp.stack([x, x[..., ::-1], -x]), arguments(case))
    many["scale"] = jnp.exp2(jnp.arange(3.0)).reshape(3, 1)
    run = jax.vmap(lambda given: tpu.matmul(**given, **options(case), interpret=True))
    monkeypatch.setattr(tuning, "BLOCK", (128, 128, 128))
    wanted = jax.vmap(lambda given: reference.matmul(**given, **options(case)))(many)
    np.testing.assert_array_equal(jax.jit(run)(many), wanted)


@pytest.mark.parametrize(("size", "block"), [(8192, 512), (640, 128), (768, 384), (5, 128), (1100, 384)])
def test_blocks_cover_an_axis_with_the_least_beyond_its_end(size, block):
    assert fit(size, 512) == block
