"""quantize compared with numpy, known scales, and the rounding of every element type."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.core.calibration import parse_calibration
from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.qtensor import dequantize
from jaxquant.core.quantize import outside_range, quantize
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.rounding import saturating_cast, stochastic_cast
from tests import numerics, reference


def normal(shape, seed=0):
    return np.asarray(jax.random.normal(jax.random.key(seed), shape, jnp.float32))


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_qvalues_and_scales_are_those_of_plain_numpy(dtype, granularity):
    x = normal((24, 40)) * np.logspace(-3, 3, 24, dtype=np.float32)[:, None]
    axis = None if granularity == "per_tensor" else 1
    expected, scale = reference.quantize(x, dtype, axis)
    tensor = jax.jit(lambda v: quantize(v, TensorSpec(dtype, granularity), (1,)))(x)
    np.testing.assert_array_equal(tensor.scale, scale)
    np.testing.assert_array_equal(tensor.qvalue.astype(jnp.float32), expected)


@pytest.mark.parametrize(("dtype", "text"), [("int8", "minmax"), ("int8", "rms,3"), ("float8_e4m3fn", "absmax")])
def test_a_nan_shows(dtype, text):
    """XLA:CPU can lose a NaN in the maximum of a long axis; a dequantized row must still not be finite."""
    spec = TensorSpec(dtype, calibration=parse_calibration(text))
    through = jax.jit(lambda v: dequantize(quantize(v, spec, (1,))))
    for column in (0, 500, 999):
        x = jnp.asarray(normal((16, 1000))).at[3, column].set(jnp.nan)
        assert not jnp.isfinite(through(x)[3, column])


def test_shards_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="quantization_local_shard_count 5 does not divide"):
        quantize(jnp.ones((6, 32)), TensorSpec("int8"), (1,), shards=5)


def test_minmax_represents_zero_exactly_and_uses_all_codes():
    x = jnp.asarray(normal((3, 200))) * 2 + 5
    x = x.at[:, 0].set(0.0)
    tensor = quantize(x, TensorSpec("int8", calibration=parse_calibration("minmax")), (1,))
    assert tensor.zero_point is not None
    np.testing.assert_array_equal(dequantize(tensor)[:, 0], 0.0)
    assert int(tensor.qvalue.min()) == -128
    assert int(tensor.qvalue.max()) == 127
    np.testing.assert_allclose(dequantize(tensor), x, atol=float(tensor.scale.max()))


def test_outside_an_asymmetric_range_is_what_lies_beyond_it():
    """``test_dot_general.py`` tests symmetric ranges. Rounding the zero point can shift the range by a step."""
    spec = TensorSpec("int8", calibration=parse_calibration("fixed,-0.5,1"))
    x = normal((4, 64), seed=3)
    tensor = quantize(jnp.asarray(x), spec, (1,))
    outside, step = outside_range(jnp.asarray(x), spec, tensor), float(tensor.scale.max())
    assert outside[(x < -0.5 - step) | (x > 1 + step)].all()
    assert not outside[(x > -0.5 + step) & (x < 1 - step)].any()
    assert 0 < int(outside.sum()) < outside.size


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_casts_saturate_and_keep_nan(dtype):
    kind = ELEMENTS[dtype]
    top = jnp.array([kind.max * 1.04, -kind.max * 1.04, jnp.inf, -jnp.inf], jnp.float32)
    expected = [kind.max, -kind.max, kind.max, -kind.max]
    np.testing.assert_array_equal(saturating_cast(top, kind).astype(jnp.float32), expected)
    if kind.kind == "float" and dtype != "float4_e2m1fn":  # e2m1 has no NaN
        assert jnp.isnan(saturating_cast(jnp.float32(jnp.nan), kind).astype(jnp.float32))


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_stochastic_rounding_is_unbiased_and_hits_only_neighbours(dtype):
    kind, n = ELEMENTS[dtype], 20_000
    for x in (0.3, -1.3, 2.6, 5.1):
        # The two neighbours of x, found by scanning the grid of the element.
        grid = np.unique(reference.cast(np.linspace(-6.0, 6.0, 4001), dtype))
        below, above = grid[grid <= x].max(), grid[grid > x].min()
        values = np.asarray(stochastic_cast(jnp.full(n, x), kind, jax.random.key(7)).astype(jnp.float32))
        assert set(np.unique(values)) == {below, above}
        assert values.mean() == pytest.approx(x, abs=numerics.stochastic_mean_bound(float(above - below), n))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_stochastic_rounding_of_subnormals(dtype):
    kind, n = ELEMENTS[dtype], 20_000
    ulp = 2.0 ** (kind.min_exponent - kind.mantissa_bits)
    values = np.asarray(stochastic_cast(jnp.full(n, 0.25 * ulp), kind, jax.random.key(1)).astype(jnp.float32))
    assert set(np.unique(values)) == {0.0, ulp}
    assert values.mean() == pytest.approx(0.25 * ulp, abs=numerics.stochastic_mean_bound(ulp, n))
