"""Blocks, their scales and the invariants of a QTensor, compared with numpy; fp8_block with DeepSeek-V3's casts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant.config.recipes import RECIPES
from jaxquant.core import blocks
from jaxquant.core.blocks import block_shape, scale_shape
from jaxquant.core.calibration import parse_calibration
from jaxquant.core.qtensor import dequantize, make_qtensor
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec
from tests import reference
from tests.numerics import LAST_BITS

E4, E2 = "float8_e4m3fn", "float4_e2m1fn"
MX = {
    dtype: TensorSpec(dtype, "per_tile", tile_size=32, scale_dtype="float8_e8m0fnu", scale_rounding="up")
    for dtype in (E4, E2)
}
NVFP4 = TensorSpec(E2, "per_tile", tile_size=16, scale_dtype="float8_e4m3fn", scale_rounding="nearest")
BLOCK = TensorSpec(E4, "per_block", tile_size=128, free_size=128)


def normal(shape, seed=0):
    return np.array(jax.random.normal(jax.random.key(seed), shape, jnp.float32))


@pytest.mark.parametrize(
    ("shape", "axes", "batch", "block"),
    [
        ((256, 384), (0,), (), (128, 128)),
        ((300, 100), (0,), (), (128, 100)),  # the last block of 300 has 44 rows
        ((8, 300, 256), (1,), (0,), (1, 128, 128)),  # experts never share a block
        ((32, 64, 512), (0, 1), (), (2, 64, 128)),  # heads of 64: a block has two of them
        ((32, 80, 512), (0, 1), (), (1, 80, 128)),  # 80 does not divide 128
        ((512, 4, 64), (0,), (), (128, 2, 64)),
    ],
)
def test_blocks_nest_in_the_flattened_order(shape, axes, batch, block):
    assert block_shape(shape, BLOCK, axes, batch=batch) == block
    counts = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    assert scale_shape(shape, block) == counts
    tensor = jax.eval_shape(lambda x: quantize(x, BLOCK, axes, batch=batch), jax.ShapeDtypeStruct(shape, jnp.float32))
    assert tensor.scale.shape == counts
    assert tensor.blocks == block


@pytest.mark.parametrize("spec", [MX[E4], MX[E2], BLOCK], ids=["mxfp8", "mxfp4", "fp8_block"])
@pytest.mark.parametrize("shape", [(256, 384), (150, 200)])
def test_blocks_are_those_of_a_plain_loop(spec, shape):
    x = normal(shape) * np.logspace(-4, 4, shape[1], dtype=np.float32)
    block = (spec.tile_size, spec.free_size or 1)
    qvalue, scale = reference.quantize_blocks(x, spec.dtype, block, spec.scale_dtype == "float8_e8m0fnu")
    tensor = jax.jit(lambda v: quantize(v, spec, (0,)))(x)
    np.testing.assert_array_equal(tensor.qvalue.astype(jnp.float32), qvalue)
    np.testing.assert_array_equal(dequantize(tensor), qvalue * scale)
    assert tensor.scale.dtype == spec.scale_dtype


def test_scales_of_zeros_and_of_what_is_not_finite():
    x = jnp.stack(
        [jnp.zeros(32), jnp.full(32, 1e-30), jnp.ones(32), jnp.ones(32).at[3].set(jnp.nan), jnp.full(32, 1e30)]
    )
    for spec in (MX[E4], MX[E2], NVFP4):
        back = np.asarray(dequantize(quantize(x, spec, (1,))))
        assert np.all(back[:2] == 0)
        assert np.all(np.isfinite(back[2]))
        assert np.abs(back[2] - 1).max() < 0.1
        if spec.scale_dtype == "float8_e8m0fnu":
            assert not np.isfinite(back[3, 3])
            assert np.all(np.isfinite(back[4]))


def test_the_root_mean_square_does_not_overflow():
    spec = TensorSpec("int8", "per_tile", parse_calibration("rms,4"), tile_size=32)
    x = normal((3, 80)) * np.array([[1e-25], [1.0], [1e25]], np.float32)
    scale = np.asarray(quantize(jnp.asarray(x), spec, (1,)).scale)
    parts = [x[:, i : i + 32].astype(np.float64) for i in (0, 32, 64)]  # the last tile has 16 elements
    expected = 4 * np.stack([np.sqrt((part**2).mean(1)) for part in parts], 1) / 127.5
    np.testing.assert_allclose(scale[1:], expected[1:], rtol=1e-5)
    assert np.all(np.isfinite(scale))


GOOD = jnp.zeros((256, 200), jnp.int8)


@pytest.mark.parametrize(
    ("scale", "rest", "message"),
    [
        ((2,), {}, "make both ranks equal"),
        ((2, 3), {}, "which does not split every axis into equal blocks"),
        ((2, 2), {"block": (128, 64)}, r"in blocks of \(128, 64\) needs scale of shape \(2, 4\), got \(2, 2\)"),
        ((1, 200), {"zero_point": jnp.zeros((1, 1), jnp.int8)}, r"zero_point int8\(1, 1\), but needs int8\(1, 200\)"),
        ((1, 200), {"outer_scale": jnp.ones((1, 2))}, r"needs outer_scale of shape \(1, 1\), got \(1, 2\)"),
    ],
)
def test_a_qtensor_made_by_hand_is_checked(scale, rest, message):
    with pytest.raises(ValueError, match=message):
        make_qtensor(GOOD, jnp.ones(scale), **rest)


def test_a_qtensor_keeps_its_layout_through_transformations():
    x = jnp.asarray(normal((3, 300, 200)))
    one = quantize(x[0], BLOCK, (0,))
    assert one.block == (128, 128)
    stacked = jax.vmap(lambda v: quantize(v, BLOCK, (0,)))(x)
    assert stacked.blocks == (1, 128, 128)
    np.testing.assert_array_equal(dequantize(stacked)[1], dequantize(quantize(x[1], BLOCK, (0,))))
    sliced = jax.lax.scan(lambda _, t: (None, dequantize(t)), None, stacked)[1]
    np.testing.assert_array_equal(sliced, dequantize(stacked))
    made = make_qtensor(**one.parts, block=(128, 128))
    np.testing.assert_array_equal(dequantize(made), dequantize(one))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((4, 16, 384), TensorSpec(E4, "per_block", tile_size=128, free_size=8)),
        ((24, 100), TensorSpec("int8", "per_tile", tile_size=32)),
    ],
)
def test_blocks_cut_for_tpus_have_the_bits_of_any_other(monkeypatch, spec, shape):
    x = jax.random.normal(jax.random.key(0), shape) * jnp.logspace(-3, 3, shape[-1])
    for axis in range(len(shape)):
        found = []
        for platform in ("cpu", "tpu"):
            monkeypatch.setattr(blocks, "platform_of", lambda x, platform=platform: platform)
            tensor = quantize(x, spec, (axis,))
            found.append([*tensor.parts.values(), dequantize(tensor, "bfloat16")])
        jax.tree.map(np.testing.assert_array_equal, *found)


F32, E4M3 = np.float32, ml_dtypes.float8_e4m3fn
FLOOR, LARGEST = F32(1e-4), F32(448)
RECIPE = RECIPES["fp8_block"].recipe


def amaxes(x, block):
    """Return the amax of each block; x is padded with zeros to full blocks."""
    rows, columns = (-(-size // step) * step for size, step in zip(x.shape, block, strict=True))
    padded = np.zeros((rows, columns), F32)
    padded[: x.shape[0], : x.shape[1]] = np.abs(x)
    return padded.reshape(rows // block[0], block[0], columns // block[1], block[1]).max((1, 3))


def spread(scale, block, shape):
    return np.kron(scale, np.ones(block, F32))[: shape[0], : shape[1]]


def by_logarithm(scale):
    """Return DeepSeek's power of two: ``2 ** ceil(log2(amax / 448))``."""
    return np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(F32)


def deepseek(x, block, is_power, floor=FLOOR):
    """Quantize with ``act_quant``, or with a division, the inverse of ``weight_dequant``."""
    scale = np.maximum(amaxes(x, block), floor) / LARGEST
    scale = by_logarithm(scale) if is_power else scale
    return (x / spread(scale, block, x.shape)).astype(E4M3), scale


def data(shape):
    rng = np.random.default_rng(0)
    return (rng.normal(size=shape) * 10 ** rng.uniform(-2, 3, (shape[0], 1))).astype(F32)


def check_near(x, elements, scale, block, tensor):
    """Check that elements are equal, except for quotients within a last bit of a rounding boundary."""
    mine = np.asarray(tensor.qvalue)
    differs = elements.view(np.uint8) != mine.view(np.uint8)
    middle = (elements.astype(F32) * spread(scale, block, x.shape) + np.asarray(dequantize(tensor))) / 2
    np.testing.assert_allclose(x[differs], middle[differs], rtol=2 * LAST_BITS)
    assert differs.mean() < 1e-3


@pytest.mark.parametrize("is_power", [False, True])
@pytest.mark.parametrize(("place", "block"), [("fwd_lhs", (1, 128)), ("fwd_rhs", (128, 128)), ("drhs_lhs", (1, 128))])
def test_blocks_of_fp8_are_deepseek_s(place, block, is_power):
    x = data((300, 320))  # no axis is a multiple of the block
    spec = RECIPE.specs[place]
    if is_power:
        spec = dataclasses.replace(spec, scale_rounding="up")
    tensor = jax.jit(lambda x: quantize(x, spec, (1,)))(x)
    elements, scale = deepseek(x, block, is_power)
    if is_power:
        np.testing.assert_array_equal(tensor.scale, scale)
        np.testing.assert_array_equal(np.asarray(tensor.qvalue).view(np.uint8), elements.view(np.uint8))
    else:  # theirs is a quotient by 448, ours a product with 1 / 448
        np.testing.assert_allclose(tensor.scale, scale, rtol=LAST_BITS)
        check_near(x, elements, scale, block, tensor)
