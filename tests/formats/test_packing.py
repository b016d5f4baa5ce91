"""Packing of four-bit elements: every bit pattern, low nibble first, odd sizes, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.formats.packing import PACKED_DTYPES, pack, unpack

CASES = [
    ((3, 7), -1),
    ((5, 3), 0),
    ((2, 1, 4), 1),
    ((2, 3, 6), -2),
    ((4, 0), 1),
]


def _random_nibbles(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 16, shape, np.uint8)


def _as(nibbles: np.ndarray, dtype: str) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.asarray(nibbles).astype(jnp.uint4), dtype)


def _packed_by_hand(nibbles: np.ndarray, axis: int) -> np.ndarray:
    moved = np.moveaxis(nibbles, axis, -1)
    out = np.zeros((*moved.shape[:-1], -(-moved.shape[-1] // 2)), np.uint8)
    for index in np.ndindex(moved.shape):
        out[(*index[:-1], index[-1] // 2)] |= moved[index] << (4 * (index[-1] % 2))
    return np.moveaxis(out, -1, axis)


@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_bytes_are_those_of_the_nibbles_and_come_back(dtype, shape, axis):
    nibbles = _random_nibbles(shape)
    packed = jax.jit(lambda x: pack(x, axis))(_as(nibbles, dtype))
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packed, _packed_by_hand(nibbles, axis))
    back = jax.jit(lambda p: unpack(p, dtype, shape[axis], axis))(packed)
    assert back.dtype.name == dtype
    np.testing.assert_array_equal(jax.lax.bitcast_convert_type(back, "uint4").astype(np.uint8), nibbles)


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_random_bytes_unpack_and_pack_to_themselves(dtype):
    data = np.random.default_rng(1).integers(0, 256, (4, 300), np.uint8)
    np.testing.assert_array_equal(pack(unpack(jnp.asarray(data), dtype, 600)), data)


def test_the_first_element_is_the_low_nibble():
    np.testing.assert_array_equal(pack(jnp.asarray([1, -1, 7], jnp.int4)), [0xF1, 0x07])


def test_what_is_not_packed_is_refused():
    with pytest.raises(TypeError, match="int8 is no four-bit element type"):
        pack(jnp.zeros(4, jnp.int8))
    with pytest.raises(ValueError, match="4 bytes hold 7 or 8 elements"):
        unpack(jnp.zeros((2, 4), jnp.uint8), "int4", 6)
