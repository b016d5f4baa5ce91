"""Kernels with any axes in a tensor format, compared with llama.cpp's decoder, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.core.qtensor import QTensor, check, dequantize, mark_stacked_axes
from jaxquant.formats import encode_tensor
from tests.reference import through_gguf

CASES = [
    ((256, 5), (0,), (144, 5)),
    ((4, 80, 6), (0, 1), (1, 180, 6)),  # two axes, the last block not full
    ((8, 2, 64), (0, 2), (1, 2, 288)),  # a free axis between contracting axes
    ((6, 1, 64), (0,), (18, 1, 64)),
]


@pytest.mark.parametrize(("shape", "axes", "stored"), CASES)
def test_the_contraction_is_one_row_of_blocks(shape, axes, stored):
    x = jax.random.normal(jax.random.key(0), shape)
    tensor = encode_tensor(x, "q4_0", axes) if shape[0] != 256 else encode_tensor(x, "q4_k", axes)
    check(tensor)
    assert (tensor.qvalue.shape, tensor.qvalue.dtype, tensor.shape) == (stored, jnp.uint8, shape)
    free = [axis for axis in range(len(shape)) if axis not in axes]
    rows = np.asarray(x).transpose(*free, *axes).reshape(*[shape[axis] for axis in free], -1)
    expected = through_gguf(rows, tensor.codec, -1).reshape([shape[axis] for axis in (*free, *axes)])
    np.testing.assert_array_equal(np.asarray(dequantize(tensor)).transpose(*free, *axes), expected)


def test_stacked_layers_are_those_of_each():
    x = jax.random.normal(jax.random.key(0), (64, 3, 5))  # the axis of layers is in the middle
    stacked = jax.vmap(lambda x: encode_tensor(x, "q8_0", (0,)), in_axes=1, out_axes=1)(x)
    stacked = mark_stacked_axes(stacked, (1,))
    check(stacked)
    assert stacked.shape == x.shape
    for layer in range(3):
        alone = jax.tree.map(lambda part, layer=layer: part[:, layer], stacked)
        assert alone.shape == (64, 5)
        np.testing.assert_array_equal(dequantize(alone), dequantize(encode_tensor(x[:, layer], "q8_0", (0,))))


def test_what_is_none_is_refused():
    with pytest.raises(ValueError, match="'mxfp4' stores its scales in separate arrays"):
        encode_tensor(jnp.ones((64, 2)), "mxfp4", (0,))
    good = encode_tensor(jnp.ones((64, 2)), "q4_0", (0,))
    for block, codec, message in (((64, 1), "q4_9", "'q4_9'; use one of"), ((96, 1), "q4_0", "q4_0 need 54 bytes")):
        with pytest.raises(ValueError, match=message):
            check(QTensor(good.qvalue, block=block, codec=codec))
