<<<<<<< HEAD
"""Models with every kind of linear layer, and quant state that has seen something, for tests of conversion."""
=======
"""Small trees of quantized parameters, of every element type and every odd shape."""
>>>>>>> ckpt

from __future__ import annotations

from typing import Any

<<<<<<< HEAD
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxquant.config.recipes import RECIPES

D = 16


class Block(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x, _):
        y = nn.DenseGeneral((2, 8), dtype=self.dtype, name="query")(x)
        y = nn.Einsum((2, 8, D), "bshd,hde->bse", use_bias=True, dtype=self.dtype, name="mix")(nn.silu(y))
        return x + nn.Dense(D, dtype=self.dtype, name="wo")(y), None


class Linen(nn.Module):
    """Layers under nn.scan along an axis of the parameters, a layer that is used twice, and a head in float."""

    dtype: Any = jnp.float32
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        axes = {"params": self.axis, "_overwrite_with_gradient": 0, "aqt": 0}
        scan = nn.scan(Block, variable_axes=axes, split_rngs={"params": True, "quant": True}, length=3)
        x, _ = scan(self.dtype, name="layers")(x, None)
        twice = nn.Dense(D, dtype=self.dtype, use_bias=False, name="twice")
        return nn.Dense(4, dtype=self.dtype, name="logits")(twice(twice(x)))


class NnxBlock(nnx.Module):
    def __init__(self, dtype, rngs):
        self.query = nnx.LinearGeneral(D, (2, 8), dtype=dtype, rngs=rngs)
        self.mix = nnx.Einsum("bshd,hde->bse", (2, 8, D), (D,), dtype=dtype, rngs=rngs)
        self.wo = nnx.Linear(D, D, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.wo(self.mix(nnx.silu(self.query(x))))


class Nnx(nnx.Module):
    """The same in NNX, the layers stacked by nnx.vmap."""

    def __init__(self, dtype=jnp.float32, rngs=None):
        rngs = rngs or nnx.Rngs(1)
        self.layers = nnx.vmap(lambda rngs: NnxBlock(dtype, rngs), in_axes=0, out_axes=0)(rngs.split(3))
        self.twice = nnx.Linear(D, D, dtype=dtype, use_bias=False, rngs=rngs)
        self.logits = nnx.Linear(D, 4, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        graph, state = nnx.split(self.layers)
        x, _ = jax.lax.scan(lambda x, state: (nnx.merge(graph, state)(x), None), x, state)
        return self.logits(self.twice(self.twice(x)))


def schemes():
    """List (string, backend) of the table of recipes, strings of one row once, without the file of intmp."""
    seen, found = set(), []
    for string, row in RECIPES.items():
        if string and string != "intmp" and row.backends and id(row) not in seen:
            seen.add(id(row))
            found += [(string, backend) for backend in row.backends]
    return found


def filled(shapes: Any) -> Any:
    """Make variables of these shapes without running a model: normal parameters, and quant state that has seen some.

    Every leaf has its own numbers. Amaxes are around those of normal numbers; two of four weights are masked.
    """

    def fill(path: Any, leaf: Any) -> Any:
        name = path[-1].key
        rng = np.random.default_rng(sum(map(ord, jax.tree_util.keystr(path))))
        if name.endswith("amax_history"):
            values = rng.uniform(1.0, 2.5, leaf.shape)
        elif name.endswith("_mask"):
            values = (np.arange(leaf.size).reshape(leaf.shape) // leaf.shape[-1]) % 2
        elif name.endswith(("_scale", "_bins", "_step", "_uses")):
            values = np.full(leaf.shape, name.endswith("_scale"))
        else:
            values = rng.normal(size=leaf.shape) * 0.25
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)
=======
import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.qtensor import QTensor


def quantized(
    dtype: str, shape: tuple[int, ...], scale: tuple[int, ...], zero_point: bool = False, seed: int = 0
) -> QTensor:
    """Make a QTensor of random elements: random bits in a byte's worth, NaN and -0 among them."""
    rng = np.random.default_rng(seed)
    bits = jax.dtypes.itemsize_bits(jnp.dtype(dtype))

    def elements(shape: tuple[int, ...]) -> jax.Array:
        raw = jnp.asarray(rng.integers(0, 2**bits, shape, dtype=np.uint8))
        return jax.lax.bitcast_convert_type(raw if bits == 8 else raw.astype(jnp.uint4), dtype)

    scales = jnp.asarray(rng.uniform(0.1, 2, scale), jnp.float32)
    return QTensor(elements(shape), scales, elements(scale) if zero_point else None)


def every_kind() -> dict[str, Any]:
    """Give a tree with every element type: odd sizes, tiles, zero points, floats, and keys of any text."""
    return {
        "elements": {dtype: {"kernel": quantized(dtype, (3, 6, 5), (3, 1, 5))} for dtype in ELEMENTS},
        "layers": {
            "mlp": {
                "wi_0": {"kernel": quantized("int4", (4, 8, 6), (4, 2, 6)), "input_scale": jnp.float32(0.5)},
                "wo": {"kernel": quantized("int8", (4, 6, 8), (4, 1, 8), zero_point=True)},
                "odd": {"kernel": quantized("int4", (7,), (1,), zero_point=True)},
            },
            "a.b c%2Fü": {"layers.mlp": jnp.arange(3, dtype=jnp.int32)},
        },
        "token_embedder": {"embedding": np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)},
        "_sharding": jnp.ones((1,)),
        "array_metadatas": jnp.ones((2,)),
        "long": {"x" * 150: {"y" * 100: {name: jnp.full((1,), ord(name)) for name in "ab"}}},
        "norm": {"scale": jnp.ones((5,), jnp.bfloat16), "on": np.array([True, False])},
    }


def abstract(tree: Any) -> Any:
    """Give the shapes of a tree, QTensors of shapes among them."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def raw_bytes(array: Any) -> bytes:
    """Give the bits of an array, so that NaN equals itself and -0 does not equal 0."""
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
>>>>>>> ckpt
