"""Blocks, the dtypes and rounding of scales, and the invariants of a QTensor, against plain numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.core import blocks
from jaxquant.core.blocks import block_shape, scale_shape
from jaxquant.core.calibration import parse_calibration
from jaxquant.core.qtensor import QTensor, dequantize, make_qtensor
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec
from tests import reference

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
        ((32, 64, 512), (0, 1), (), (2, 64, 128)),  # heads of 64: two of them fill a block
        ((32, 80, 512), (0, 1), (), (1, 80, 128)),  # 80 does not nest in 128
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


def test_intmp_tiles_are_of_each_axis_and_must_divide():
    spec = TensorSpec("int8", "per_tile", tile_size=8, tiling="each_axis")
    assert block_shape((16, 32, 5), spec, (0, 1)) == (8, 8, 1)
    with pytest.raises(ValueError, match="tile_size 8 does not divide contraction axis 0 of size 4"):
        block_shape((4, 32, 5), spec, (0, 1))


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
    parts = [x[:, i : i + 32].astype(np.float64) for i in (0, 32, 64)]  # the last tile has 16
    expected = 4 * np.stack([np.sqrt((part**2).mean(1)) for part in parts], 1) / 127.5
    np.testing.assert_allclose(scale[1:], expected[1:], rtol=1e-5)
    assert np.all(np.isfinite(scale))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"granularity": "per_block", "tile_size": 8}, "a free_size belongs to per_block, which needs one"),
        ({"granularity": "per_tile", "tile_size": 0}, "tile_size must be at least 1, got 0"),
        ({"scale_dtype": "float8_e8m0fnu"}, "scale_rounding 'exact' does not give a float8_e8m0fnu"),
        ({"amax_bound": 0.0}, "amax_bound must be above 0, got 0.0"),
        ({"granularity": "per_tensor", "scaling": "delayed", "scale_rounding": "up"}, "need dynamic scaling"),
    ],
)
def test_specs_that_make_no_sense(values, message):
    with pytest.raises(ValueError, match=message):
        TensorSpec(E4, **values)


GOOD = jnp.zeros((256, 200), jnp.int8)


@pytest.mark.parametrize(
    ("scale", "rest", "message"),
    [
        ((2,), {}, "give both the same rank"),
        ((2, 3), {}, "which cut no axis into equal blocks"),
        ((2, 2), {"block": (128, 64)}, r"in blocks of \(128, 64\) has scales of shape \(2, 2\), not \(2, 4\)"),
        ((1, 200), {"zero_point": jnp.zeros((1, 1), jnp.int8)}, r"a zero_point of int8\(1, 1\)"),
        ((1, 200), {"outer_scale": jnp.ones((1, 2))}, r"an outer_scale of shape \(1, 2\), not \(1, 1\)"),
    ],
)
def test_a_qtensor_made_by_hand_is_checked(scale, rest, message):
    with pytest.raises(ValueError, match=message):
        make_qtensor(GOOD, jnp.ones(scale), **rest)


def test_what_is_no_part_of_a_qtensor_is_refused():
    with pytest.raises(TypeError, match="qvalue of a QTensor must be an array, got list"):
        make_qtensor([[1, 2]], jnp.ones((2, 2)))


def test_a_qtensor_keeps_its_layout_through_transformations():
    x = jnp.asarray(normal((3, 300, 200)))
    one = quantize(x[0], BLOCK, (0,))
    assert one.block == (128, 128)
    stacked = jax.vmap(lambda v: quantize(v, BLOCK, (0,)))(x)
    assert isinstance(stacked, QTensor)
    assert stacked.blocks == (1, 128, 128)
    np.testing.assert_array_equal(dequantize(stacked)[1], dequantize(quantize(x[1], BLOCK, (0,))))
    sliced = jax.lax.scan(lambda _, t: (None, dequantize(t)), None, stacked)[1]
    np.testing.assert_array_equal(sliced, dequantize(stacked))
    again = QTensor(**one.parts, block=one.block)
    assert jax.tree.structure(again) == jax.tree.structure(one)
    made = make_qtensor(**one.parts, block=(128, 128))
    np.testing.assert_array_equal(dequantize(made), dequantize(one))


@pytest.mark.parametrize("shape", [(4, 16, 384), (24, 100)], ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("float8_e4m3fn", "per_block", tile_size=128, free_size=8),
        TensorSpec("int8", "per_tile", tile_size=32),
    ],
    ids=["blocks", "1x32"],
)
def test_blocks_cut_for_tpus_have_the_bits_of_any_other(monkeypatch, spec, shape):
    x = jax.random.normal(jax.random.key(0), shape) * jnp.logspace(-3, 3, shape[-1])
    for axis in range(len(shape)):
        found = []
        for platform in ("cpu", "tpu"):
            monkeypatch.setattr(blocks, "platform_of", lambda x, platform=platform: platform)
            tensor = quantize(x, spec, (axis,))
            found.append([*tensor.parts.values(), dequantize(tensor, "bfloat16")])
        for left, right in zip(*found, strict=True):
            np.testing.assert_array_equal(np.asarray(left, np.float32), np.asarray(right, np.float32))
