"""Small trees of quantized parameters, with every element type and every unusual shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.qtensor import QTensor


def quantized(
    dtype: str, shape: tuple[int, ...], scale: tuple[int, ...], zero_point: bool = False, seed: int = 0
) -> QTensor:
    """Return a QTensor with random bits as elements, including NaN and -0."""
    rng = np.random.default_rng(seed)
    bits = jax.dtypes.itemsize_bits(jnp.dtype(dtype))

    def elements(shape: tuple[int, ...]) -> jax.Array:
        raw = jnp.asarray(rng.integers(0, 2**bits, shape, dtype=np.uint8))
        return jax.lax.bitcast_convert_type(raw if bits == 8 else raw.astype(jnp.uint4), dtype)

    scales = jnp.asarray(rng.uniform(0.1, 2, scale), jnp.float32)
    return QTensor(elements(shape), scales, elements(scale) if zero_point else None)


def converted(tensor: QTensor) -> QTensor:
    """Return the tensor as a parameter with a static input scale."""
    return dataclasses.replace(tensor, input_scale=jnp.full((4, 1, 1), 0.5), dtype="float32", read_as="bfloat16")


def every_kind() -> dict[str, Any]:
    """Return a tree with every element type: odd sizes, tiles, zero points, floats, and keys with any characters."""
    return {
        "elements": {dtype: {"kernel": quantized(dtype, (3, 6, 5), (3, 1, 5))} for dtype in ELEMENTS},
        "layers": {
            "mlp": {
                "wi_0": {"kernel": converted(quantized("int4", (4, 8, 6), (4, 2, 6)))},
                "wo": {"kernel": quantized("int8", (4, 6, 8), (4, 1, 8), zero_point=True)},
                "odd": {"kernel": quantized("int4", (7,), (1,), zero_point=True)},
            },
            "a.b c%2Fü": {"layers.mlp": jnp.arange(3, dtype=jnp.int32)},
        },
        "token_embedder": {"embedding": np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)},
        "scalar": jnp.float32(3),
        "long": {"x" * 150: {"y" * 100: {name: jnp.full((1,), ord(name)) for name in "ab"}}},
        "norm": {"scale": jnp.ones((5,), jnp.bfloat16), "on": np.array([True, False])},
    }


def abstract(tree: Any) -> Any:
    """Return the shapes of a tree, with QTensors of shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def raw_bytes(array: Any) -> bytes:
    """Return the bits of an array, so that NaN equals NaN and -0 differs from 0."""
    array = jnp.asarray(array)
    if jax.dtypes.itemsize_bits(array.dtype) < 8:
        return np.asarray(jax.lax.bitcast_convert_type(array, "uint4").astype(jnp.uint8)).tobytes()
    return np.asarray(array).tobytes()


def assert_same(found: Any, expected: Any) -> None:
    """Check structure, dtypes, shapes and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        assert isinstance(one, jax.Array), where
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert raw_bytes(one) == raw_bytes(other), where
