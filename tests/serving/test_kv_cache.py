"""The KV cache: errors of each format, zero rows, signs, bytes, and the same bits for every way of writing tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import QuantConfig
from jaxquant.serving import kv_cache
from jaxquant.serving.kv_cache import append, empty, nbytes, read

B, S, H, D = 2, 12, 3, 8
QUANTIZED = [(dtype, axis) for dtype in ("int8", "int4", "fp8") for axis in ("dkv", "heads_and_dkv")]
FOUR = [("", "dkv"), ("int8", "dkv"), ("int4", "heads_and_dkv"), ("fp8", "dkv")]


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def make(quantization, length: int = S, width: int = D, heads: int = H, **options):
    dtype, axis = quantization
    return empty(B, length, heads, width, kv_quant_dtype=dtype, kv_quant_axis=axis, **options)


def assert_same_bits(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), ours, theirs)


@pytest.mark.parametrize("inputs", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_what_is_held_is_worked_out_by_hand_zero_rows_are_zeros_and_signs_are_symmetric(quantization, inputs):
    dtype, axis = quantization
    x = normal(B, S, H, D, dtype=inputs).at[:, 3].set(0)
    cache = append(make(quantization), x, -x, 0)
    x = np.asarray(x, np.float32)
    amax = np.abs(x).max((2, 3) if axis == "heads_and_dkv" else (3,), keepdims=True)
    bound, largest = {"int8": (127.5, 127), "int4": (7.5, 7), "fp8": (448, 448)}[dtype]
    scale = np.where(amax, amax * np.float32(1 / np.float64(bound)), 1)
    np.testing.assert_array_equal(cache.key_scale, scale)
    codes = x / scale
    expected = codes.astype(jnp.float8_e4m3fn) if dtype == "fp8" else np.clip(np.rint(codes), -largest, largest)
    key, value = read(cache, "float32")
    np.testing.assert_array_equal(key, expected.astype(np.float32) * scale)
    np.testing.assert_array_equal(key, -value)
    assert not key[:, 3].any()


@pytest.mark.parametrize(("layer", "inputs"), [(None, "float32"), (1, "bfloat16")], ids=["one layer", "layers"])
@pytest.mark.parametrize("quantization", FOUR)
def test_once_in_chunks_and_one_at_a_time_are_the_same_bits(quantization, inputs, layer):
    options = {} if layer is None else {"layers": 2}
    key, value = normal(B, S, H, D, dtype=inputs), normal(B, S, H, D, seed=1, dtype=inputs)
    start = make(quantization, **options)
    write = jax.jit(lambda cache, key, value, at: append(cache, key, value, at, layer=layer))
    once, chunked, decoded = append(start, key, value, 0, layer=layer), start, start
    for at in range(0, S, 4):
        chunked = write(chunked, key[:, at : at + 4], value[:, at : at + 4], at)
    for at in range(S):
        decoded = write(decoded, key[:, at : at + 1], value[:, at : at + 1], jnp.full((B,), at))
    assert_same_bits(chunked, once)
    assert_same_bits(decoded, once)
    assert_same_bits(read(decoded, inputs, layer=layer), read(once, inputs, layer=layer))
    assert nbytes(once) == sum(leaf.nbytes for leaf in jax.tree.leaves(once))
    if layer is not None:
        for leaf in jax.tree.leaves(jax.tree.map(lambda leaf: jnp.delete(leaf, layer, axis=1), once)):
            assert len(np.unique(np.asarray(leaf).astype(np.float32))) == 1, "another layer was written"


@pytest.mark.parametrize("quantization", FOUR)
def test_rows_go_on_at_their_own_positions_and_padding_is_not_written(quantization):
    x = normal(B, S, H, D)
    lengths = jnp.asarray([8, 3])
    valid = jnp.arange(8) < lengths[:, None]
    cache = append(make(quantization), x[:, :8], x[:, :8], 0, valid=valid)
    cache = append(cache, x[:, 8:9], x[:, 8:9], lengths)
    expected = make(quantization)
    for row, length in enumerate([8, 3]):
        places = [*range(length), 8]
        alone = append(make(quantization), x[:, places, :], x[:, places, :], 0)
        expected = jax.tree.map(lambda all, one, row=row: all.at[row].set(one[row]), expected, alone)
    assert_same_bits(cache, expected)


@pytest.mark.parametrize("quantization", FOUR)
def test_under_vmap_rows_are_those_of_the_batch(quantization):
    x, at = normal(B, 1, H, D), jnp.asarray([5, 2])
    one = lambda cache, x, at: append(jax.tree.map(lambda leaf: leaf[None], cache), x[None], x[None], at[None])  # noqa: E731
    mapped = jax.vmap(one)(make(quantization), x, at)
    assert_same_bits(jax.tree.map(lambda leaf: leaf[:, 0], mapped), append(make(quantization), x, x, at))


def test_an_odd_head_dim_packs():
    x = normal(B, S, H, 5)
    back, _ = read(append(make(("int4", "dkv"), width=5), x, x, 0), "float32")
    wide, _ = read(append(make(("int4", "dkv"), width=6), *[jnp.pad(x, [(0, 0)] * 3 + [(0, 1)])] * 2, 0), "float32")
    np.testing.assert_array_equal(back, wide[..., :5])


def test_the_config_names_the_quantization():
    assert kv_cache.quantization_of(QuantConfig()) == {"kv_quant_dtype": ""}
    config = QuantConfig(quantize_kvcache=True, kv_quant_dtype="int4", kv_quant_axis="dkv")
    assert kv_cache.quantization_of(config) == {"kv_quant_dtype": "int4", "kv_quant_axis": "dkv"}


def _append(tokens: int, positions, width: int = D, layers=None, layer=None, valid=None):
    x = jnp.zeros((B, tokens, H, width))
    return append(make(("int8", "dkv"), layers=layers), x, x, positions, layer=layer, valid=valid)


REFUSED = [
    (lambda: _append(S + 1, 0), "13 tokens do not fit in a KV cache of length 12"),
    (lambda: _append(1, jnp.asarray([3, -1])), "position -1 is outside"),
    (lambda: jax.jit(lambda at: _append(S + 1, at))(0), "13 tokens do not fit in a KV cache of length 12"),
    (lambda: _append(2, jnp.zeros((B, 3), jnp.int32)), r"must have shape \(rows, tokens\), \(2, 2\), got \(2, 3\)"),
    (lambda: _append(2, 0, width=7), r"must have shape \(2, tokens, 3, 8\) for this KV cache, got"),
    (lambda: _append(2, 0, layers=2), "a KV cache with 2 layers got layer None; pass a number"),
    (lambda: _append(2, 0, layers=2, layer=2), "layer of this KV cache must be from 0 to 1, got 2"),
    (lambda: make(("fp4", "dkv")), "kv_quant_dtype 'fp4' is not known; use 'int8' or 'int4' or 'fp8' or 'digits'"),
    (lambda: make(("int8", "heads")), "kv_quant_axis 'heads' is not known; use 'dkv' or 'heads_and_dkv'"),
    (lambda: make(("int8", "dkv"), length=0), "length of a KV cache must be at least 1, got 0"),
]


def test_what_does_not_fit_is_an_error():
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_traced_position_outside_and_padding_outside_write_nothing():
    full = jax.jit(lambda at: _append(2, at))(S)
    assert_same_bits(full, make(("int8", "dkv")))
    assert_same_bits(jax.jit(lambda at: _append(1, at))(-1), make(("int8", "dkv")))
    tail = _append(4, S - 2, valid=np.asarray([[True, True, False, False]] * B))
    assert_same_bits(tail, append(make(("int8", "dkv")), jnp.zeros((B, 2, H, D)), jnp.zeros((B, 2, H, D)), S - 2))
