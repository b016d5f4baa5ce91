"""Remat policies: which matmuls and attentions a gradient's program holds, and that its bits stay the same."""

from __future__ import annotations

import functools
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxquant
from jaxquant.audit.cost import saved_for_backward
from jaxquant.audit.coverage import coverage
from tests.lowering import equations
from train.attention import attend, visibility

WIDTH, LAYERS = 128, 2
X = jax.random.normal(jax.random.key(0), (4, WIDTH), jnp.float32)
STRINGS = ("", "fp8", "fp8_current", "fp8_block", "mxfp8", "int8", "int8_delayed", "nvfp4")
POLICIES = {"full": None, "quantized": jaxquant.save_quantized, "matmuls": jaxquant.save_matmuls}


class Gated(nn.Module):
    """A norm, a gate of two layers and a third one, added to the input."""

    @nn.compact
    def __call__(self, x, _=None):
        normal = nn.RMSNorm()(x)
        gated = nn.silu(nn.Dense(WIDTH, name="wi_0")(normal)) * nn.Dense(WIDTH, name="wi_1")(normal)
        return x + nn.Dense(WIDTH, name="wo")(gated), None


class Stack(nn.Module):
    """Such layers, one after another or scanned; ``policy`` "none" is no remat."""

    policy: str
    scans: bool

    @nn.compact
    def __call__(self, x):
        layer = Gated
        if self.policy != "none":
            layer = nn.remat(Gated, policy=POLICIES[self.policy], prevent_cse=not self.scans)
        if self.scans:
            axes = {"params": 0, "_overwrite_with_gradient": 0}
            scan = nn.scan(layer, variable_axes=axes, split_rngs={"params": True, "quant": True}, length=LAYERS)
            return scan(name="layers")(x, None)[0]
        for index in range(LAYERS):
            x = layer(name=f"layers_{index}")(x)[0]
        return x


def linen(string: str, policy: str, scans: bool):
    """Return a stack's loss, and its arguments."""
    config = {"quantization": string, "quant_backend": "native"} if string else {}
    model = jaxquant.maybe_quantize_model(Stack(policy, scans), config, X)
    params, quant = jaxquant.state.split(jax.jit(model.init)(jax.random.key(1), X))

    def loss(params, quant, x):
        return (model.apply(jaxquant.state.merge(params, quant), x) ** 2).sum()

    return loss, (params, quant, X)


def gradient(loss, args):
    return jax.grad(loss, argnums=tuple(range(len(args))))


def counted(loss, args) -> tuple[int, int]:
    """Return how many matmuls the program of a loss's gradient runs, and how many of them for a second time."""
    rows = coverage(gradient(loss, args), *args).rows
    return sum(row.times for row in rows), sum(row.times for row in rows if row.is_recomputed)


@pytest.mark.parametrize("scans", [False, True], ids=["layers", "scan"])
@pytest.mark.parametrize("string", STRINGS)
def test_no_matmul_runs_twice_and_the_bits_are_the_same(string, scans):
    loss, args = linen(string, "matmuls", scans)
    assert counted(loss, args) == (9 * LAYERS, 0)
    assert counted(*linen(string, "full", scans)) == (11 * LAYERS, 2 * LAYERS)  # wo's result is not needed
    found, plain = (jax.jit(gradient(each, args))(*args) for each in (loss, linen(string, "none", scans)[0]))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), found, plain)))


def test_the_policy_of_residuals_alone_runs_them_again():
    assert counted(*linen("fp8", "quantized", True)) == (11 * LAYERS, 2 * LAYERS)


@pytest.mark.parametrize("string", ["fp8", "int8"])
def test_what_is_kept_is_the_results_that_something_needs_and_no_sums(string):
    loss, args = linen(string, "matmuls", False)
    kept = saved_for_backward(loss, *args)
    results, inputs = 2 * LAYERS, LAYERS - 1  # of wi_0 and wi_1; x of the second layer, the first one's is an argument
    assert kept == {"float32": (results + inputs) * 4 * X.size}


@pytest.mark.parametrize("string", ["", "fp8"])
def test_a_function_under_checkpoint(string):
    weights = {name: jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) for i, name in enumerate(("a", "b", "c"))}

    def block(weights, x):
        return (jax.nn.silu(x @ weights["a"]) * (x @ weights["b"])) @ weights["c"]

    twice = []
    for policy in (None, jaxquant.save_matmuls):

        def loss(weights, x, policy=policy):
            return (jax.checkpoint(block, policy=policy)(weights, x) ** 2).sum()

        args = weights, X
        if string:
            loss = jaxquant.quantize(loss, {"quantization": string, "quant_backend": "native"})
            with jaxquant.state.by_hand():
                args = weights, loss.init(weights, X), X
        with jaxquant.state.by_hand():
            twice.append(counted(loss, args)[1])
    assert twice == [2, 0]


def test_nnx_remat():
    class Layer(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.wi, self.wo = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            return self.wo(nnx.silu(self.wi(x)))

    counts = []
    for policy in (None, jaxquant.save_matmuls):
        model = jaxquant.maybe_quantize_model(Layer(), {"quantization": "fp8", "quant_backend": "native"}, X)
        graph, state = nnx.split(model)

        def loss(state, x, graph=graph, policy=policy):
            run = nnx.remat(lambda model, x: model(x), policy=policy)
            return (run(nnx.merge(graph, state), x) ** 2).sum()

        with jaxquant.state.by_hand():
            counts.append(counted(loss, (state, X)))
    assert counts == [(7, 1), (6, 0)]


def test_a_splash_attention_runs_once_forward():
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 128, n, 128)) for i, n in enumerate((2, 1, 1)))
    visible = visibility("splash", jnp.zeros((1, 128), jnp.int32), None)

    def kernels(policy):
        mix = functools.partial(attend, visible=visible, kind="splash", interpret=True)
        loss = lambda *arrays: (jax.checkpoint(mix, policy=policy)(*arrays) ** 2).sum()  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(query, key, value)
        return Counter(eqn.primitive.name for eqn in equations(jaxpr.jaxpr))["pallas_call"]

    assert kernels(None) == kernels(jaxquant.save_matmuls) + 1
