"""Table of tensor formats: exact decoding, encoding error, hard blocks; packing of four-bit elements."""

from __future__ import annotations

import functools

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant.formats import CODECS, codec
from jaxquant.formats.minifloat import MINIFLOATS, decode_minifloat, encode_e8m0, encode_minifloat
from jaxquant.formats.packing import PACKED_DTYPES, pack, pack_codes, unpack, unpack_codes
from tests.numerics import CODEC_RMSE, CODEC_RMSE_RTOL, FLOAT32_EPS

GGML = [name for name, row in CODECS.items() if row.encoding]
MX = {name: row for name, row in CODECS.items() if name.startswith("mx")}
ELEMENT = {
    "mxfp8": "float8_e4m3fn",
    "mxfp8_e5m2": "float8_e5m2",
    "mxfp6_e2m3": "float6_e2m3fn",
    "mxfp6_e3m2": "float6_e3m2fn",
    "mxfp4": "float4_e2m1fn",
}
SCALED = [name for name in CODECS if name not in ("int4", "uint4", "float4_e2m1fn")]


def assert_same_bits(ours: np.ndarray, reference: np.ndarray) -> None:
    """Compare float32 arrays bit for bit; all NaNs count as equal."""
    nan = np.isnan(reference)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(
        np.ascontiguousarray(ours).view(np.uint32)[~nan], np.ascontiguousarray(reference).view(np.uint32)[~nan]
    )


def round_trip(name: str, x: np.ndarray) -> np.ndarray:
    return np.asarray(codec(name).decode(codec(name).encode(jnp.asarray(x, jnp.float32))))


@functools.cache
def sample(distribution: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    draw = {"normal": rng.standard_normal, "laplace": rng.laplace, "uniform": rng.uniform}[distribution]
    limits = (0.5, 1.5) if distribution == "uniform" else ()
    return draw(*limits, size=(512, 256)).astype(np.float32)


@pytest.mark.parametrize("name", GGML)
def test_ggml_decodes_every_byte_pattern_as_gguf_does(name):
    row = codec(name)
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (4096, row.bytes_per_block), np.uint8)
    # Each byte with each value at least once, in an otherwise random block.
    for place in range(row.bytes_per_block):
        blocks[(np.arange(256) * 16 + place) % 4096, place] = np.arange(256)
    # A sixteenth of the blocks has subnormal float16 scales (exponent field 0), if the format has float16 scales.
    high = {"q6_k": [209], "q4_k": [1, 3], "q5_k": [1, 3]}.get(name, [1])
    blocks[::16, high] &= 0x83
    data = blocks.reshape(256, -1)
    with np.errstate(all="ignore"):
        reference = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[row.encoding or ""])
    assert_same_bits(np.asarray(row.decode({"blocks": jnp.asarray(data)})), reference.astype(np.float32))


@pytest.mark.parametrize("name", ["f16", "bf16", "q8_0", "q4_0"])
def test_ggml_encodes_as_gguf_does(name):
    x = sample("laplace")
    reference = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name.upper()]).view(np.uint8)
    np.testing.assert_array_equal(codec(name).encode(jnp.asarray(x))["blocks"], reference)


@pytest.mark.parametrize("name", CODEC_RMSE)
def test_relative_rmse_is_the_published_one(name):
    for distribution, expected in CODEC_RMSE[name].items():
        x = sample(distribution).astype(np.float64)
        error = np.sqrt(np.mean((round_trip(name, x) - x) ** 2) / np.mean(x**2))
        assert error == pytest.approx(expected, rel=CODEC_RMSE_RTOL), distribution


HARD = {
    "zeros": lambda rng: np.zeros((4, 256)),
    "constant": lambda rng: np.full((4, 256), 3.0),
    "one of many": lambda rng: np.where(np.arange(256) == 17, -5.0, 0.0) * np.ones((4, 1)),
    "zero sub-blocks": lambda rng: rng.standard_normal((4, 256)) * (np.arange(256) // 64 % 2),
    "huge": lambda rng: rng.standard_normal((4, 256)) * 1e38,
    "largest": lambda rng: np.full((4, 256), 3.38e38) * np.sign(rng.standard_normal((4, 256))),
    "tiny": lambda rng: rng.standard_normal((4, 256)) * 1e-37,
    "subnormal": lambda rng: rng.standard_normal((4, 256)) * 1e-40,
    "wide": lambda rng: 10.0 ** rng.uniform(-37, 37, (4, 256)),
}


@pytest.mark.parametrize("name", [name for name in SCALED if name not in ("f16", "bf16")])
def test_hard_blocks_stay_finite_and_what_is_not_finite_decodes_to_nan(name):
    rng = np.random.default_rng(2)
    # All cases of an array would share the tensor scale, so each case is a separate array.
    found = {
        kind: (x := make(rng).clip(-3.38e38, 3.38e38).astype(np.float32), round_trip(name, x))
        for kind, make in HARD.items()
    }
    assert all(np.isfinite(back).all() for _, back in found.values())
    assert not found["zeros"][1].any()
    np.testing.assert_allclose(found["constant"][1], found["constant"][0], rtol=0.1)
    assert all((np.sign(found[kind][0]) * np.sign(found[kind][1]) >= 0).all() for kind in ("huge", "largest"))
    x = np.ones((64, 256), np.float32)  # XLA's maximum on CPU can lose a NaN, but not with few rows
    x[1, 5], x[2, 7] = -np.inf, np.nan
    back = round_trip(name, x)
    assert np.isnan(back[[1, 2], [5, 7]]).all()
    assert name == "nvfp4" or np.isfinite(back[0]).all()  # its scale of the scales is computed from the whole tensor


@pytest.mark.parametrize("name", MX)
def test_mx_decodes_every_byte_pattern_as_ml_dtypes_does(name):
    row, kind = codec(name), MINIFLOATS[ELEMENT[name]]
    rng = np.random.default_rng(3)
    scale = np.repeat(np.arange(256, dtype=np.uint8), 8).reshape(256, 8)
    codes = rng.integers(0, 2**kind.bits, (256, 256), np.uint8)
    codes[:, : 2**kind.bits] = np.arange(2**kind.bits)
    elements = codes.view(getattr(ml_dtypes, kind.name)).astype(np.float64)
    with np.errstate(all="ignore"):
        factor = np.where(scale == 255, np.nan, 2.0 ** (scale.astype(np.float64) - 127))
        reference = (elements * np.repeat(factor, 32, axis=1)).astype(np.float32)
    parts = {"qvalue": pack_codes(jnp.asarray(codes), kind.bits), "scale": jnp.asarray(scale)}
    assert_same_bits(np.asarray(row.decode(parts)), reference)


@pytest.mark.parametrize("kind", MINIFLOATS.values(), ids=MINIFLOATS)
def test_minifloats_are_rounded_as_ml_dtypes_does(kind):
    dtype = getattr(ml_dtypes, kind.name)
    codes = np.arange(2**kind.bits, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float32)
    assert_same_bits(np.asarray(decode_minifloat(jnp.asarray(codes), kind)), values)
    finite = np.unique(values[np.isfinite(values)])
    halves = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([finite, halves, np.nextafter(halves, np.float32(9e9)), np.nextafter(halves, np.float32(-9e9))])
    x = np.concatenate([x, np.random.default_rng(4).standard_normal(4096).astype(np.float32) * kind.max / 3])
    expected = np.clip(x, -kind.max, kind.max).astype(dtype).view(np.uint8)
    np.testing.assert_array_equal(encode_minifloat(jnp.asarray(x), kind), expected)


def test_six_bit_codes_are_a_stream_of_bits():
    codes = np.random.default_rng(5).integers(0, 64, (3, 32), np.uint8)
    bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :6]
    expected = np.packbits(bits.reshape(3, -1), axis=-1, bitorder="little")
    packed = pack_codes(jnp.asarray(codes), 6)
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(unpack_codes(packed, 6), codes)


def test_e8m0_bytes():
    above, kind = np.nextafter(np.float32(448), np.float32(449)), MINIFLOATS["float8_e4m3fn"]
    amaxes = [0.0, 448.0, above, 2.0**-126, 3.6, 3.0e38, np.inf, np.nan]
    assert encode_e8m0(jnp.float32(amaxes), kind).tolist() == [0, 127, 128, 0, 121, 246, 255, 255]
    assert encode_e8m0(jnp.float32(amaxes), kind, "floor").tolist() == [0, 127, 127, 0, 120, 246, 255, 255]


def test_nvfp4_is_the_published_arithmetic():
    x = sample("normal")
    parts = {name: np.asarray(part) for name, part in codec("nvfp4").encode(jnp.asarray(x)).items()}
    tensor_scale = np.float32(np.abs(x).max() / np.float32(2688))
    assert parts["tensor_scale"] == pytest.approx(tensor_scale, rel=2 * FLOAT32_EPS)
    blocks = x.reshape(512, 16, 16)
    scale = (np.abs(blocks).max(-1) / np.float32(6) / parts["tensor_scale"]).astype(ml_dtypes.float8_e4m3fn)
    assert (parts["scale"] == scale).mean() > 0.999  # a quotient on a rounding boundary may fall either way
    product = parts["scale"].astype(np.float32) * parts["tensor_scale"]
    elements = np.clip(blocks / product[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    nibbles = parts["qvalue"][..., None] >> np.array([0, 4], np.uint8) & 0xF
    assert (nibbles.reshape(blocks.shape) == elements.view(np.uint8)).mean() > 0.999
    decoded = nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(blocks.shape)
    assert_same_bits(round_trip("nvfp4", x), (decoded * product[..., None]).reshape(x.shape))


@pytest.mark.parametrize("name", CODECS)
def test_sizes_are_those_of_the_row(name):
    row = codec(name)
    x = jax.ShapeDtypeStruct((3, 2, 512), jnp.float32)
    parts = jax.eval_shape(row.encode, x)
    size = sum(part.size * part.dtype.itemsize for part in parts.values() if part.ndim)
    assert size == row.nbytes(x.shape) == 3 * 2 * 512 * row.bytes_per_block // row.elements_per_block
    back = jax.eval_shape(row.decode, parts)
    assert (back.shape, back.dtype) == (x.shape, jnp.float32)
    moved = jax.eval_shape(lambda x: row.encode(x, 1), jax.ShapeDtypeStruct((3, 512, 2), jnp.bfloat16))
    assert {key: part.shape for key, part in moved.items()} == {key: part.shape for key, part in parts.items()}


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="'Q4_x' is not a tensor format; did you mean 'q4_"):
        codec("Q4_x")
    with pytest.raises(ValueError, match=r"axis -1 of shape \(2, 128\) cannot be split"):
        codec("q4_k").encode(jnp.ones((2, 128)))
    with pytest.raises(TypeError, match="q4_0 encodes float arrays, got int32"):
        codec("q4_0").encode(jnp.ones((2, 32), jnp.int32))


PACKED = [((3, 7), -1), ((5, 3), 0), ((2, 3, 6), -2), ((4, 0), 1)]


def _packed_by_hand(nibbles: np.ndarray, axis: int) -> np.ndarray:
    moved = np.moveaxis(nibbles, axis, -1)
    out = np.zeros((*moved.shape[:-1], -(-moved.shape[-1] // 2)), np.uint8)
    for index in np.ndindex(moved.shape):
        out[(*index[:-1], index[-1] // 2)] |= moved[index] << (4 * (index[-1] % 2))
    return np.moveaxis(out, -1, axis)


@pytest.mark.parametrize(("shape", "axis"), PACKED)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_bytes_are_those_of_the_nibbles_and_come_back(dtype, shape, axis):
    nibbles = np.random.default_rng(0).integers(0, 16, shape, np.uint8)
    packed = jax.jit(lambda x: pack(x, axis))(jax.lax.bitcast_convert_type(jnp.asarray(nibbles, jnp.uint4), dtype))
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packed, _packed_by_hand(nibbles, axis))
    back = jax.jit(lambda p: unpack(p, dtype, shape[axis], axis))(packed)
    assert back.dtype.name == dtype
    np.testing.assert_array_equal(jax.lax.bitcast_convert_type(back, "uint4").astype(np.uint8), nibbles)


def test_the_first_element_is_the_low_nibble():
    np.testing.assert_array_equal(pack(jnp.asarray([1, -1, 7], jnp.int4)), [0xF1, 0x07])


def test_what_is_not_packed_is_refused():
    with pytest.raises(TypeError, match="int8 is not a four-bit element type"):
        pack(jnp.zeros(4, jnp.int8))
    with pytest.raises(ValueError, match="4 bytes hold 7 or 8 elements"):
        unpack(jnp.zeros((2, 4), jnp.uint8), "int4", 6)
