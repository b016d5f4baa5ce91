"""``fp8_block`` and ``nvfp4w`` against the casts of DeepSeek-V3 and compressed-tensors, in numpy.

Each is written from its published equations: amax of a block, its scale, the elements, in float32.
"""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxquant.config.recipes import RECIPES
from jaxquant.core.qtensor import dequantize
from jaxquant.core.quantize import quantize
from tests.numerics import LAST_BITS

F32, E4M3 = np.float32, ml_dtypes.float8_e4m3fn
FLOOR, LARGEST = F32(1e-4), F32(448)
RECIPE = RECIPES["fp8_block"].recipe


def amaxes(x, block):
    """Return the amax of each block, x filled with zeros to whole ones."""
    rows, columns = (-(-size // step) * step for size, step in zip(x.shape, block, strict=True))
    padded = np.zeros((rows, columns), F32)
    padded[: x.shape[0], : x.shape[1]] = np.abs(x)
    return padded.reshape(rows // block[0], block[0], columns // block[1], block[1]).max((1, 3))


def spread(scale, block, shape):
    return np.kron(scale, np.ones(block, F32))[: shape[0], : shape[1]]


def by_logarithm(scale):
    """DeepSeek's power of two: ``2 ** ceil(log2(amax / 448))``."""
    return np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(F32)


def deepseek(x, block, is_power, floor=FLOOR):
    """``act_quant``, and the inverse of ``weight_dequant``: a division."""
    scale = np.maximum(amaxes(x, block), floor) / LARGEST
    scale = by_logarithm(scale) if is_power else scale
    return (x / spread(scale, block, x.shape)).astype(E4M3), scale


def data(shape):
    rng = np.random.default_rng(0)
    return (rng.normal(size=shape) * 10 ** rng.uniform(-2, 3, (shape[0], 1))).astype(F32)


def check_near(x, elements, scale, block, tensor):
    """Elements are equal, but for quotients within a last bit of half way, which a reciprocal or a scale turns."""
    mine = np.asarray(tensor.qvalue)
    differs = elements.view(np.uint8) != mine.view(np.uint8)
    middle = (elements.astype(F32) * spread(scale, block, x.shape) + np.asarray(dequantize(tensor))) / 2
    np.testing.assert_allclose(x[differs], middle[differs], rtol=2 * LAST_BITS)
    assert differs.mean() < 1e-3


@pytest.mark.parametrize("is_power", [False, True])
@pytest.mark.parametrize(("place", "block"), [("fwd_lhs", (1, 128)), ("fwd_rhs", (128, 128)), ("drhs_lhs", (1, 128))])
def test_blocks_of_fp8_are_deepseek_s(place, block, is_power):
    x = data((300, 320))  # neither axis is whole blocks
    spec = RECIPE.specs[place]
    if is_power:
        spec = dataclasses.replace(spec, scale_rounding="up")
    tensor = jax.jit(lambda x: quantize(x, spec, (1,)))(x)
    elements, scale = deepseek(x, block, is_power)
    if is_power:
        np.testing.assert_array_equal(tensor.scale, scale)
        np.testing.assert_array_equal(np.asarray(tensor.qvalue).view(np.uint8), elements.view(np.uint8))
    else:  # theirs is a quotient, ours a product with 1 / 448
        np.testing.assert_allclose(tensor.scale, scale, rtol=LAST_BITS)
        check_near(x, elements, scale, block, tensor)


def test_nvfp4_of_weights_is_compressed_tensors():
    """Global scale ``2688 / amax``, scales ``global · (amax / 6)``, elements ``x / (scale / global)``."""
    w = data((64, 256))
    largest = F32(2688) / np.abs(w).max()
    scale = (largest * (np.abs(w).reshape(64, 16, 16).max(-1) / F32(6))).clip(max=448).astype(E4M3)
    steps = np.where(scale.astype(F32) == 0, F32(0.125), scale.astype(F32)) / largest
    elements = (w / np.repeat(steps, 16, axis=1)).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    tensor = jax.jit(lambda x: quantize(x, RECIPES["nvfp4w"].recipe.fwd.rhs, (1,)))(w)
    np.testing.assert_array_equal(np.asarray(tensor.scale).view(np.uint8), scale.view(np.uint8))
    np.testing.assert_allclose(1 / np.asarray(tensor.outer_scale).item(), largest, rtol=LAST_BITS)
    is_read = np.repeat(scale.astype(F32), 16, axis=1) > 0
    differs = is_read & (np.asarray(tensor.qvalue).astype(F32) != elements.astype(F32))
    middle = (elements.astype(F32) * np.repeat(steps, 16, axis=1) + np.asarray(dequantize(tensor))) / 2
    np.testing.assert_allclose(w[differs], middle[differs], rtol=2 * LAST_BITS)
    assert is_read.mean() > 0.5
    assert differs.mean() < 1e-3
