"""What ``jaxquant.quantize`` computes, beside ``maybe_quantize_model``: the same bits, loss, gradients and state."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxquant
from jaxquant import state as quant_state

CONFIG = {
    "quantization": "fp8",
    "quant_backend": "native",
    "rules": [{"path": ".*wo", "recipe": "int8"}, {"path": "heads", "recipe": "fp8_current"}],
}
"""Every kind of native recipe in one model: delayed, dynamic per tensor, integers with stochastic rounding."""
OPERATION = "Fp8DirectDotGeneralOp_0", "Fp8Einsum_0"


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        dense = functools.partial(nn.Dense, dtype=jnp.bfloat16)
        hidden = nn.silu(dense(12, name="wi")(x))
        mixed = nn.Einsum((2, 6, 8), "bhd,hdf->bf", dtype=jnp.bfloat16, name="mix")(hidden.reshape(-1, 2, 6))
        return x + dense(8, use_bias=False, name="wo")(hidden) + mixed, None


class Model(nn.Module):
    """Embedding, two scanned and rematerialized blocks, a projection to heads, and a head."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8, dtype=jnp.bfloat16, name="embed")(tokens)
        axes = {"params": 0, "_overwrite_with_gradient": 0}
        block = nn.scan(nn.remat(Block), variable_axes=axes, split_rngs={"params": True}, length=2)
        x, _ = block(name="layers")(x, None)
        x = nn.DenseGeneral((2, 4), use_bias=False, name="heads")(x)
        return nn.DenseGeneral(16, axis=(-2, -1), use_bias=False, name="logits_dense")(x)


def without_operation(tree):
    """The quant state of a Linen model without the names of its op modules, as the trace route has it."""
    return {
        name: value if not isinstance(value, dict) else without_operation(next(iter(value.values())))
        if set(value) <= set(OPERATION) else without_operation(value)
        for name, value in tree.items()
    }  # fmt: skip


def assert_same_bits(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for (path, a), b in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64), jax.tree_util.keystr(path))


def test_linen():
    tokens = jnp.arange(6) % 5
    model = Model()
    injected = jaxquant.maybe_quantize_model(model, CONFIG, tokens)
    params, state = quant_state.split(jax.jit(injected.init)(jax.random.key(0), tokens))
    traced = jaxquant.quantize(lambda params, tokens: model.apply({"params": params}, tokens), CONFIG)
    own = traced.init(params, tokens)
    assert_same_bits(without_operation(state), own)

    @jax.jit
    def both(params, states):
        losses = (
            lambda params, state: jnp.mean(injected.apply(quant_state.merge(params, state), tokens) ** 2),
            lambda params, state: jnp.mean(traced(params, state, tokens) ** 2),
        )
        steps = [
            jax.value_and_grad(loss, argnums=(0, 1))(params, state) for loss, state in zip(losses, states, strict=True)
        ]
        states = [quant_state.update(state, seen) for state, (_, (_, seen)) in zip(states, steps, strict=True)]
        return [(value, grads) for value, (grads, _) in steps], states

    states = [state, own]
    for _ in range(2):
        (injected_step, traced_step), states = both(params, states)
        assert_same_bits(injected_step, traced_step)
        assert_same_bits(without_operation(states[0]), states[1])
        params = jax.tree.map(lambda weight, grad: weight - 0.5 * grad, params, traced_step[1])
    assert {name: set(value) for name, value in own.items()} == {"layers": {"wi", "mix"}}
    history = states[1]["layers"]["wi"]["output_grad_amax_history"]
    assert history.shape == (2, 1024)
    assert np.all(np.count_nonzero(history, axis=-1) == 2)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.wi = nnx.Linear(8, 12, rngs=rngs)
        self.mix = nnx.Einsum("bhd,hdf->bf", (2, 6, 8), rngs=rngs)
        self.wo = nnx.Linear(8, 8, rngs=rngs)
        self.heads = nnx.LinearGeneral(8, (2, 3), rngs=rngs)

    def __call__(self, x):
        x = self.mix(nnx.relu(self.wi(x)).reshape(-1, 2, 6))
        return self.heads(nnx.relu(self.wo(x)))


def test_nnx():
    x = jax.random.normal(jax.random.key(1), (4, 8))
    model = NnxModel(nnx.Rngs(0))
    graph, params = nnx.split(model)
    traced = jaxquant.quantize(lambda params, x: nnx.merge(graph, params)(x), CONFIG)
    state = traced.init(params, x)
    injected = nnx.split(jaxquant.maybe_quantize_model(model, CONFIG, x), nnx.Param, quant_state.QuantState)

    @jax.jit
    def both(params, state, quantized):
        def loss(params, state):
            return jnp.mean(nnx.merge(injected[0], params, state)(x) ** 2)

        first = jax.value_and_grad(lambda p, s: jnp.mean(traced(p, s, x) ** 2), argnums=(0, 1))(params, state)
        with quant_state.by_hand():
            return first, jax.value_and_grad(loss, argnums=(0, 1))(*quantized)

    (value, (grads, seen)), (value_2, (grads_2, seen_2)) = both(params, state, injected[1:])
    assert value == value_2
    assert_same_bits(jax.tree.leaves(grads), jax.tree.leaves(grads_2))
    assert_same_bits(jax.tree.leaves(seen), jax.tree.leaves(seen_2))
    assert set(seen) == {"wi", "mix"}
