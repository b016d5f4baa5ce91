"""The noise of a contraction depends only on its weight and the steps of its scans."""

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
from tests.trace.functions import normal

BACKENDS = ("native", "aqt")
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

    ways = WAYS if backend == "native" else {name: WAYS[name] for name in ("as it is", "jit in remat")}
    grads = jax.jit(lambda key: {name: gradient(way, key) for name, way in ways.items()})(KEY)
    assert_all_alike(grads)


def test_each_weight_and_each_step_of_a_scan_draws_its_own():
    """Equal weights with equal inputs and output gradients: their gradients differ only by the noise."""

    def fn(p, x):
        return x @ p["a"] + x @ p["b"] + jax.lax.scan(lambda y, w: (y + x @ w, None), 0 * x, p["layers"])[0]

    weight = PARAMS["a"]["kernel"]
    params = {"a": weight, "b": weight, "layers": jnp.stack([weight, weight])}
    q = jaxquant.quantize(fn, config("native"))
    found = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(q(p, {}, X, key=KEY)))))(params)
    drawn = {np.asarray(grad).tobytes() for grad in (found["a"], found["b"], *found["layers"])}
    assert len(drawn) == 4


def test_two_uses_of_a_weight_draw_their_own():
    """Equal inputs and output gradients: the gradients of the inputs differ only by the noise."""
    q = jaxquant.quantize(lambda p, x, z: (x @ p["a"]["kernel"], z @ p["a"]["kernel"]), config("native"))
    out, pull = jax.vjp(lambda x, z: q(PARAMS, {}, x, z, key=KEY), X, X)
    np.testing.assert_array_equal(*out)
    assert not np.array_equal(*pull((jnp.sin(out[0]), jnp.sin(out[0]))))
