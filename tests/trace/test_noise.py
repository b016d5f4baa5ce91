"""Which noise a contraction draws: that of its weight and the steps of its scans, whatever else is around it."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jaxquant
from jaxquant.trace import contract
from tests.trace.functions import normal

BACKENDS = ("native", "aqt", "qwix")
NAMED = jax.checkpoint_policies.save_only_these_names("hidden")
SPLIT = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
KEY = jax.random.key(3)
WAYS = {
    "as it is": lambda fn: fn,
    "jit": jax.jit,
    "names that are saved": functools.partial(jax.checkpoint, policy=NAMED),
    "jit in remat": lambda fn: jax.checkpoint(jax.jit(fn)),
    "shard_map": lambda fn: jax.shard_map(fn, mesh=SPLIT, in_specs=(P(), P()), out_specs=P()),
}
X = normal(0, 4, 8)
PARAMS = {name: {"kernel": normal(number, 8, 8)} for number, name in enumerate("abc", 1)}


def assert_all_alike(grads):
    first, *others = grads.items()
    for name, grad in others:
        same = jax.tree.map(np.array_equal, first[1], grad)
        assert all(jax.tree.leaves(same)), (first[0], name, same)


def config(backend):
    return {"quantization": "int8", "quant_backend": backend}


def block(p, x):
    hidden = checkpoint_name(nn.relu(x @ p["a"]["kernel"]), "hidden")
    return nn.relu(hidden @ p["b"]["kernel"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_around_a_layer_does_not_change_its_noise(backend):
    def gradient(way, key):
        def fn(p, x):
            x, _ = jax.lax.scan(lambda x, _: (way(block)(p, x), None), way(block)(p, x), None, length=2)
            return x @ p["c"]["kernel"]

        q = jaxquant.quantize(fn, config(backend))
        return jax.grad(lambda p: jnp.sum(q(p, {}, X, key=key) ** 2))(PARAMS)

    ways = dict(WAYS) if backend == "native" else {name: way for name, way in WAYS.items() if name != "shard_map"}
    grads = jax.jit(lambda key: {name: gradient(way, key) for name, way in ways.items()})(KEY)
    assert_all_alike(grads)


def test_each_use_of_a_weight_and_each_step_of_a_scan_draws_its_own(monkeypatch):
    seen = []

    def note(*args):
        jax.debug.callback(lambda key: seen.append(tuple(map(int, key))), args[5])
        return real(*args)

    real = contract.contract
    monkeypatch.setattr(contract, "contract", note)

    def fn(p, x):
        x, _ = jax.lax.scan(lambda x, _: (x @ p["a"]["kernel"] @ p["b"]["kernel"], None), x, None, length=2)
        same = jax.jit(lambda x, w: x @ w)
        return same(x, p["b"]["kernel"]) + same(x, p["b"]["kernel"]) + same(x, p["c"]["kernel"])

    jax.block_until_ready(jaxquant.quantize(fn, config("native"))(PARAMS, {}, X, key=KEY))
    jax.effects_barrier()
    assert len(seen) == len(set(seen)) == 7
