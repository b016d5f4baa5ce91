"""Models that many tests share: a sequence of layers, and a residual block, with or without scan."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from flax import nnx


class Chain(nn.Module):
    """Dense layers by name and width, with ReLU between them."""

    widths: tuple[tuple[str, int], ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for place, (name, width) in enumerate(self.widths):
            x = nn.Dense(width, name=name)(nn.relu(x) if place else x)
        return x


def chain(name: str | None = None, **widths: int) -> Chain:
    """Return dense layers by name and width; ``name`` is the name of the module in its parent."""
    return Chain(tuple(widths.items()), name=name)


class NnxChain(nnx.Module):
    """``Chain`` in NNX, for inputs of ``width`` features."""

    def __init__(self, width: int, **widths: int):
        rngs, self.names = nnx.Rngs(0), tuple(widths)
        for name, features in widths.items():
            setattr(self, name, nnx.Linear(width, features, rngs=rngs))
            width = features

    def __call__(self, x: jax.Array) -> jax.Array:
        for place, name in enumerate(self.names):
            x = getattr(self, name)(nnx.relu(x) if place else x)
        return x


class Block(nn.Module):
    """Two layers with a SiLU between them, and a residual connection; has the signature for ``nn.scan``."""

    inner: int

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return x + nn.Dense(x.shape[-1], name="wo")(nn.silu(nn.Dense(self.inner, name="wi")(x))), None


class Scanned(nn.Module):
    """Scan over blocks, with the name ``layers`` and parameters stacked along an axis; rematerialized or not."""

    inner: int
    length: int = 2
    axis: int = 0
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        axes = {"params": self.axis, "_overwrite_with_gradient": 0}
        rngs = {"params": True, "quant": True}
        scan = nn.scan(block, variable_axes=axes, split_rngs=rngs, length=self.length)
        return scan(self.inner, name="layers")(x, None)[0]
