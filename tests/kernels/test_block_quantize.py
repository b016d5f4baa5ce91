"""The kernel of the block cast, without a TPU, against its reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.core.calibration import Calibration
from jaxquant.kernels.block_quantize import api, reference, tpu
from jaxquant.kernels.block_quantize.cases import CASES

TINY = 2.0**-140


def hard(shape, dtype):
    """Return numbers of many magnitudes, with blocks that are zero, subnormal, infinite or not numbers."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], shape) * jnp.exp(4 * jax.random.normal(keys[1], (shape[0], 1)))
    x = x.at[3].set(0.0).at[4, ::2].set(-0.0).at[5].set(TINY).at[6, 7].set(jnp.inf).at[8, 9].set(jnp.nan)
    return x.at[10, :4].set(jnp.array([448.0, -464.0, 2.0**-9, -(2.0**-10)])).astype(dtype)


def bits(tree):
    """Return the bytes of every array; all that is not a number alike."""

    def of(x):
        return np.where(np.isnan(np.asarray(x, np.float32)), np.float32(1), np.asarray(x)).astype(x.dtype).tobytes()

    return jax.tree.map(of, tree)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_bit_is_the_references(case):
    x = hard(case.shape, case.x_dtype)
    got = jax.jit(lambda x: tpu.block_quantize(x, case.casts, interpret=True))(x)
    wanted = jax.jit(lambda x: reference.block_quantize(x, case.casts))(x)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, wanted)
    assert bits(got) == bits(wanted)


def test_what_the_kernel_does_not_cast_is_refused_by_name():
    tile = CASES[0].casts[0]

    def refusal(shape=(256, 384), block=(1, 128), x_dtype="bfloat16", **changes):
        cast = tile._replace(block=block, spec=dataclasses.replace(tile.spec, **changes))
        return api.refusal(jnp.zeros(shape, x_dtype), (cast,)) or ""

    assert refusal((2, 128, 4, 96), (1, 128, 1, 1)) == ""
    for shape, block in (
        ((1, 384), (1, 128)),
        ((256, 300), (1, 128)),
        ((256, 384), (1, 64)),
        ((2, 64, 128), (1, 64, 1)),
    ):
        assert f"whole tiles of 128×128, not {shape} in blocks of" in refusal(shape, block)
    assert "not float16" in refusal(x_dtype="float16")
    assert "not int8" in refusal(dtype="int8")
    assert "rounds to nearest" in refusal(rounding="stochastic")
    assert "powers of two that are rounded up" in refusal(scale_rounding="nearest")
    assert "as it is" in refusal(amax_bound=3.0)
    assert "as it is" in refusal(calibration=Calibration(factor=1.5))
    with jax.enable_x64(True):
        assert "jax_enable_x64 is on" in refusal()
