"""What an NNX method sets on its modules beside variables: counters, caches, lists, what it deletes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxquant import maybe_quantize_model

X = jax.random.normal(jax.random.key(0), (2, 8))


class Inner(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)
        self.count, self.before = 0, "unused"
        self.total = jnp.zeros(())
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))
        self.kept, self.table = nnx.List([]), nnx.Dict({})

    def __call__(self, x):
        y = self.layer(x)
        self.count = self.count + 1
        self.total = self.total + y.sum()
        self.steps[...] += 1
        self.last = nnx.Cache(y)
        self.kept.append(nnx.Cache(y.mean()))
        self.table["mean"] = y.mean()
        self.pair = nnx.data([y.sum(), self.count])
        self.norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
        self.same = self.layer
        if self.count == 1:
            del self.before
        return y


class Outer(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner, self.head = Inner(rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.inner(x))


@pytest.mark.parametrize("call", [lambda m: m(X), nnx.jit(lambda m: m(X)), nnx.remat(lambda m: m.inner(X))])
def test_attributes_that_a_quantized_call_sets(call):
    model = maybe_quantize_model(Outer(), {"quantization": "fp8"}, X)
    call(model)
    call(model)
    inner = model.inner
    y = inner.last[...]
    assert (inner.count, int(inner.steps[...]), len(inner.kept)) == (2, 2, 2)
    assert jnp.allclose(inner.total, 2 * y.sum())
    assert jnp.allclose(inner.kept[1][...], y.mean())
    assert jnp.allclose(inner.table["mean"], y.mean())
    assert jnp.allclose(inner.pair[0], y.sum())
    assert inner.pair[1] == 2
    assert isinstance(inner.norm, nnx.LayerNorm)
    assert inner.same is inner.layer
    assert not hasattr(inner, "before")
