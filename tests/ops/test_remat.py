"""Remat policies: which matmuls and attentions a gradient's program holds, and that its bits stay the same."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.audit.cost import saved_for_backward
from jaxquant.audit.coverage import coverage
from tests.lowering import equations
from train.attention import attend, visibility

OPTIMIZED = False

WIDTH, LAYERS = 128, 2
X = jax.random.normal(jax.random.key(0), (4, WIDTH), jnp.float32)
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
            axes: Any = {"params": 0, "_overwrite_with_gradient": 0}
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
        y: Any = model.apply(jaxquant.state.merge(params, quant), x)
        return (y**2).sum()

    return loss, (params, quant, X)


def gradient(loss, args):
    return jax.grad(loss, argnums=tuple(range(len(args))))


def counted(loss, args) -> tuple[int, int]:
    """Return how many matmuls the program of a loss's gradient runs, and how many of them for a second time."""
    rows = coverage(gradient(loss, args), *args).rows
    return sum(row.times for row in rows), sum(row.times for row in rows if row.is_recomputed)


@pytest.mark.parametrize(("string", "scans"), [("", False), ("fp8", True), ("fp8_block", False), ("int8", True)])
def test_no_matmul_runs_twice_and_the_bits_are_the_same(string, scans):
    loss, args = linen(string, "matmuls", scans)
    assert counted(loss, args) == (9 * LAYERS, 0)
    found, plain = (jax.jit(gradient(each, args))(*args) for each in (loss, linen(string, "none", scans)[0]))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        if string == "fp8_block":  # XLA fuses the dequantized operands otherwise: the last bit of a float32 sum
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2**-20 * np.max(np.abs(theirs)))
        else:
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("policy", ["full", "quantized"])
def test_other_policies_run_again_what_the_gate_needs(policy):
    assert counted(*linen("fp8", policy, True)) == (11 * LAYERS, 2 * LAYERS)  # of wo no more is needed


def test_what_is_kept_is_the_results_that_something_needs_and_no_sums():
    loss, args = linen("int8", "matmuls", False)
    kept = saved_for_backward(loss, *args)
    assert kept == {"float32": 3 * LAYERS * 4 * X.size}  # of wi_0, of wi_1, and what a layer returns


def test_a_splash_attention_runs_once_forward():
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 128, n, 128)) for i, n in enumerate((2, 1, 1)))
    visible = visibility("splash", jnp.zeros((1, 128), jnp.int32), None)

    def kernels(policy):
        mix = functools.partial(attend, visible=visible, kind="splash", interpret=True)
        loss = lambda *arrays: (jax.checkpoint(mix, policy=policy)(*arrays) ** 2).sum()  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(query, key, value)
        return Counter(eqn.primitive.name for eqn in equations(jaxpr.jaxpr))["pallas_call"]

    assert kernels(None) == kernels(jaxquant.save_matmuls) + 1
