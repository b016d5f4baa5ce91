"""Quantizing a quantized tensor changes nothing, for every string, granularity and format, with listed exceptions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.config.recipes import RECIPES
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.tensor_spec import TensorSpec, keep_grid
from jaxquant.formats import CODECS, codec
from jaxquant.ops import initial_state
from jaxquant.ops.operand import quantize_kernel
from tests import numerics

STRINGS = ("int8", "int4w", "fp8", "fp8_current", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "aqt_fp8", "int8_delayed")
"""One string for each kind of element and scale."""
# llama.cpp's encoders search a grid by least squares; another grid may match the decoded values equally well.
E2M1 = "float4_e2m1fn"
SEARCHED = ("q4_k", "q5_k", "q6_k")


def weights(shape=(256, 40), dtype="float32"):
    """Return columns of normal numbers, of zeros, of integers that reach the lower end, and with one outlier."""
    x = jax.random.normal(jax.random.key(0), shape) * jnp.exp(2 * jax.random.normal(jax.random.key(1), (1, shape[1])))
    x = x.at[:, 0].set(0.0).at[:, 1].set(jnp.arange(shape[0]) % 16 - 8.0).at[:, 2].multiply(1e-6).at[3, 3].set(900.0)
    return x.at[:, 4].set(-jnp.abs(x[:, 4])).astype(dtype)


def twice(quantized, x):
    """Return the decoded values of an array after one and after two quantizations, in the dtype of the array."""
    first = dequantize(quantized(x))
    return first, dequantize(quantized(first.astype(x.dtype)))


@pytest.mark.parametrize(
    ("string", "dtype"), [*((each, "float32") for each in STRINGS), ("int8", "bfloat16"), ("mxfp4", "bfloat16")]
)
def test_every_string(string, dtype):
    recipe, x = RECIPES[string].recipe, weights(dtype=dtype)
    state = initial_state(recipe)
    for tensor in state.values():
        tensor["amax_history"] = tensor["amax_history"].at[0].set(jnp.max(jnp.abs(x)).astype(jnp.float32))
    first, second = twice(jax.jit(functools.partial(quantize_kernel, axes=(0,), recipe=recipe, state=state)), x)
    if element(recipe.fwd.rhs.dtype).kind == "int":
        np.testing.assert_array_equal(second, first)
    else:  # float32 scales of float elements may change in the last bit
        assert np.linalg.norm(second - first) < numerics.SCALE_AGAIN * np.linalg.norm(first)


@pytest.mark.parametrize(("dtype_name", "dtype"), [("int8", "float32"), ("int4", "bfloat16"), (E2M1, "float32")])
@pytest.mark.parametrize(
    "sharing",
    [{"granularity": "per_tile", "tile_size": 96}, {"granularity": "per_block", "tile_size": 64, "free_size": 16}],
    ids=lambda sharing: sharing["granularity"],
)
def test_every_granularity(dtype_name, sharing, dtype):
    """Elements and scales are also unchanged. Without the rule for weights, integers become smaller."""
    spec, x = keep_grid(TensorSpec(dtype_name, **sharing)), weights(dtype=dtype)
    once = jax.jit(lambda x: quantize(x, spec, (0,)))
    first = once(x)
    second = once(dequantize(first).astype(dtype))
    rtol = 0 if spec.has_grid_scale else numerics.SCALE_AGAIN
    np.testing.assert_allclose(second.scale, first.scale, rtol=rtol)
    np.testing.assert_array_equal(second.qvalue.astype("float32"), first.qvalue.astype("float32"))
    step = jnp.abs(dequantize(dataclasses.replace(first, qvalue=jnp.ones_like(first.qvalue))))
    clipped = jnp.abs(x.astype("float32") - dequantize(first)) > step
    assert spec.has_grid_scale == dtype_name.startswith("int")
    assert not (spec.has_grid_scale and clipped.any())
    plain = dataclasses.replace(spec, keeps_grid=False)
    if spec.has_grid_scale:
        old, again = twice(jax.jit(lambda x: quantize(x, plain, (0,))), x)
        assert np.linalg.norm(again - old) > 0.003 * np.linalg.norm(old)


@pytest.mark.parametrize(("element", "top", "scale_dtype"), [("int8", 127, "bfloat16"), ("int4", 7, "float16")])
def test_a_grid_of_others_that_reaches_an_end_is_kept(element, top, scale_dtype):
    """Checkpoints of other tools also use -max - 1, with scales in the dtype of the model."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-top - 1, top + 1, (64, 500))
    codes[0] = np.where(np.arange(500) % 2, top, -top - 1)
    scale = rng.lognormal(size=(1, 500)).astype(jnp.dtype(scale_dtype)).astype(np.float32)
    tensor = quantize(jnp.asarray(codes * scale, jnp.float32), keep_grid(TensorSpec(element)), (0,))
    np.testing.assert_array_equal(tensor.scale, scale)
    np.testing.assert_array_equal(tensor.qvalue.astype("int32"), codes)


@pytest.mark.parametrize("name", [name for name, row in CODECS.items() if name not in SEARCHED])
def test_every_tensor_format(name):
    x = weights().T
    x = x if "int4" not in name else jnp.round(x)
    row = codec(name)
    first = row.decode(row.encode(x))
    np.testing.assert_array_equal(row.decode(row.encode(first)), first)
