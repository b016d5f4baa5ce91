"""Remat policies: the matmuls and attentions in the gradient's program, and unchanged bits."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.audit.coverage import coverage
from jaxquant.training.attention import attend, make_mask
from tests.lowering import equations

OPTIMIZED = False

WIDTH, LAYERS = 128, 2
X = jax.random.normal(jax.random.key(0), (4, WIDTH), jnp.float32)
POLICIES = {"full": None, "quantized": jaxquant.save_quantized, "matmuls": jaxquant.save_matmuls}
NAMES = ("wi_0", "wi_1", "wo")


def gated(x, p):
    """Compute a norm, a gate of two layers, a third layer and the residual sum."""
    normal = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True))
    return x + (jax.nn.silu(normal @ p["wi_0"]) * (normal @ p["wi_1"])) @ p["wo"]


def stack(string: str, policy: str, scans: bool):
    """Return the loss of such layers, one after another or scanned, and its arguments; "none" is no remat."""
    layer = gated
    if policy != "none":
        layer = jax.checkpoint(gated, policy=POLICIES[policy], prevent_cse=not scans)

    def fn(params, x):
        if scans:
            return jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0]
        for index in range(LAYERS):
            x = layer(x, params[index])
        return x

    keys = jax.random.split(jax.random.key(1), len(NAMES))
    each = {n: jax.random.normal(k, (LAYERS, WIDTH, WIDTH)) / 9 for n, k in zip(NAMES, keys, strict=True)}
    params = each if scans else [{name: w[index] for name, w in each.items()} for index in range(LAYERS)]
    run = jaxquant.quantize(fn, {"quantization": string, "quant_backend": "native"})
    return lambda p, s, x: (run(p, s, x) ** 2).sum(), (params, run.init(params, X), X)


def gradient(loss, args):
    return jax.grad(loss, argnums=tuple(range(len(args))))


def counted(loss, args) -> tuple[int, int]:
    """Return the number of matmuls in the program of a loss's gradient, and the number of recomputed ones."""
    rows = coverage(gradient(loss, args), *args).rows
    return sum(row.times for row in rows), sum(row.times for row in rows if row.is_recomputed)


@pytest.mark.parametrize(("string", "scans"), [("fp8", True), ("fp8_block", False)])
def test_no_matmul_runs_twice_and_the_bits_are_the_same(string, scans):
    loss, args = stack(string, "matmuls", scans)
    assert counted(loss, args) == (9 * LAYERS, 0)
    found, plain = (jax.jit(gradient(each, args))(*args) for each in (loss, stack(string, "none", scans)[0]))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        if string == "fp8_block":  # XLA fuses dequantized operands differently: the last bit of a float32 sum
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2**-20 * np.max(np.abs(theirs)))
        else:
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("policy", ["full", "quantized"])
def test_other_policies_run_again_what_the_gate_needs(policy):
    assert counted(*stack("fp8", policy, True)) == (11 * LAYERS, 2 * LAYERS)  # wo needs no further residuals


def test_a_splash_attention_runs_once_forward():
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 128, n, 128)) for i, n in enumerate((2, 1, 1)))
    visible = make_mask("splash", jnp.zeros((1, 128), jnp.int32), None)

    def kernels(policy):
        mix = functools.partial(attend, visible=visible, kind="splash", interpret=True)
        loss = lambda *arrays: (jax.checkpoint(mix, policy=policy)(*arrays) ** 2).sum()  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(query, key, value)
        return Counter(eqn.primitive.name for eqn in equations(jaxpr.jaxpr))["pallas_call"]

    assert kernels(None) == kernels(jaxquant.save_matmuls) + 1
