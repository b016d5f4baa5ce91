"""An NNX model with ``jaxquant.exact`` and int8 layers: a text has the same bits alone, in a batch and with padding."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxquant
from jaxquant import exact

HEADS, SIZE, WIDTH, LENGTH = 2, 16, 64, 29


def attend(query, key, value, visible):
    scores = jnp.einsum("bshd,bthd->bhst", query, key) * SIZE**-0.5
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(jnp.where(visible, scores, -1e30)), value)


STANDARD = SimpleNamespace(
    norm=lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale,
    attend=attend,
    gate=lambda a, b: jax.nn.silu(a) * b,
)
EXACT = SimpleNamespace(
    norm=exact.rms_norm, attend=exact.attend, gate=lambda a, b: exact.hold(exact.hold(a * exact.sigmoid(a)) * b)
)


class Block(nnx.Module):
    """A decoder layer without quantization code."""

    def __init__(self, math: SimpleNamespace):
        rngs, self.math = nnx.Rngs(0), math
        layer = lambda size_in, size_out: nnx.Linear(size_in, size_out, rngs=rngs)  # noqa: E731
        self.scales = nnx.Param(1 + 0.3 * jax.random.normal(rngs.params(), (2, WIDTH)))
        self.qkv, self.out = layer(WIDTH, 3 * HEADS * SIZE), layer(HEADS * SIZE, WIDTH)
        self.wi_0, self.wi_1, self.wo = layer(WIDTH, 96), layer(WIDTH, 96), layer(96, WIDTH)

    def __call__(self, x, valid):
        positions = jnp.arange(x.shape[1])
        visible = (positions[:, None] >= positions) & valid[:, None, None, :]
        projected = self.qkv(self.math.norm(x, self.scales[0])).reshape(*x.shape[:2], 3, HEADS, SIZE)
        mixed = self.math.attend(*jnp.moveaxis(projected, 2, 0), visible)
        x = x + self.out(mixed.reshape(*x.shape[:2], -1))
        normal = self.math.norm(x, self.scales[1])
        return x + self.wo(self.math.gate(self.wi_0(normal), self.wi_1(normal)))


def count_differences(math: SimpleNamespace) -> tuple[int, int]:
    """Return the different elements of texts alone and with padding, compared with a batch of 8 texts."""
    batch, valid = jnp.zeros((8, LENGTH, WIDTH)), jnp.ones((8, LENGTH), bool)
    model = jaxquant.maybe_quantize_model(Block(math), {"quantization": "int8"}, batch, valid)
    run, found = nnx.jit(lambda model, *inputs: model(*inputs)), np.zeros(2, int)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        texts = rng.standard_normal(batch.shape, np.float32) * np.exp(rng.normal(0, 2, (8, LENGTH, 1))).astype("f")
        whole = np.asarray(run(model, texts, valid))
        padded = np.pad(texts[2:5], [(0, 0), (0, 9), (0, 0)], constant_values=7.0)
        is_text = np.broadcast_to(np.arange(LENGTH + 9) < LENGTH, (3, LENGTH + 9))
        assert np.isfinite(whole).all()
        found[0] += (np.asarray(run(model, texts[seed : seed + 1], valid[:1])) != whole[seed]).sum()
        found[1] += (np.asarray(run(model, padded, is_text))[:, :LENGTH] != whole[2:5]).sum()
    return tuple(found)


@pytest.mark.slow
def test_an_nnx_model_has_the_same_bits_alone_in_a_batch_and_with_padding():
    assert count_differences(EXACT) == (0, 0)
    assert min(count_differences(STANDARD)) > 0
