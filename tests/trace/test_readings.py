"""An activation that several layers read is quantized once, and bits, state and noise do not change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

import jaxquant
from jaxquant import state as quant_state
from jaxquant.audit.cost import saved_for_backward
from jaxquant.backends.native import NativeBackend
from tests.lowering import equations
from tests.states import edited, nested, recorded
from tests.trace.functions import FP8, assert_same_bits, normal, shape

STRINGS = "fp8", "fp8_current", "fp8_full", "int8", "int8_delayed"
EACH = {"quantization": "fp8", "quant_backend": "native"} | {
    "rules": [{"path": f"(.*/)?{string}_.*", "recipe": string} for string in sorted(STRINGS, key=len, reverse=True)]
}
"""One block of layers for each recipe, with the recipe in the names of the layers."""
WIDTH, TOKENS = 16, 24
NAMES = [f"{string}_{name}" for string in STRINGS for name in ("gate", "up")]


def mix(projections):
    """Return the sum of gate · up over all recipes."""
    return jnp.sum(jnp.stack(projections[::2]) * jnp.stack(projections[1::2]), axis=0)


def attend(params, x):
    y = jnp.tanh(x)
    return y + mix([y @ params[name].astype(y.dtype) for name in NAMES])


def casts(jaxpr) -> int:
    """Return the number of tensors that a program, including nested programs, casts to int8 or float8."""
    made = [eqn.outvars[0].aval for eqn in equations(jaxpr) if eqn.primitive.name == "convert_element_type"]
    return sum(str(aval.dtype).startswith(("int8", "float8")) for aval in made)


def share_nothing(monkeypatch):
    monkeypatch.setattr(NativeBackend, "can_share", lambda self, recipe: False)


def test_bits_are_those_of_a_cast_for_each_layer(monkeypatch):
    params = {name: normal(n, WIDTH, WIDTH) / 4 for n, name in enumerate(NAMES)}
    x = normal(99, TOKENS, WIDTH).astype("bfloat16")

    def gradients():
        """Return the loss, the gradients of parameters and state, and the number of casts in the forward pass."""
        fn = jaxquant.quantize(attend, EACH)
        state = fn.init(params, x)
        call = lambda p, s: fn(p, s, x, key=jax.random.key(3))  # noqa: E731
        loss = lambda p, s: jnp.mean(call(p, s).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, state), casts(
            jax.make_jaxpr(call)(params, state).jaxpr
        )

    shared, count = gradients()
    share_nothing(monkeypatch)
    alone, other = gradients()
    assert_same_bits(shared, alone)
    assert (count, other) == (3 * len(STRINGS), 4 * len(STRINGS))


def three(p, x):
    return x @ p["q"]["kernel"] * (x @ p["k"]["kernel"]) + x @ p["v"]["kernel"]


THREE = {name: {"kernel": shape(WIDTH, WIDTH)} for name in "qkv"}
X = shape(TOKENS, WIDTH)


@pytest.mark.parametrize(("platform", "expected"), [("gpu", 5), ("tpu", 6)])
def test_on_tpus_each_layer_has_a_cast_of_its_own(platform, expected):
    chip = AbstractDevice(device_kind=platform, num_cores=1, platform=platform)
    mesh = AbstractMesh((2,), ("x",), abstract_device=chip)
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
    params = {name: jnp.ones((WIDTH, 8)) for name in ("q", "k")}
    run = jaxquant.quantize(lambda params, x: (x @ params["q"]) * (x @ params["k"]), FP8)
    state = run.init(params, x)
    step = jax.grad(lambda params, state, x: run(params, state, x).sum(), argnums=(0, 1))
    assert casts(jax.make_jaxpr(step)(params, state, x).jaxpr) == expected  # two weights, two gradients, and x


def values():
    return {name: {"kernel": normal(n, WIDTH, WIDTH) / 4} for n, name in enumerate("qkv")}, normal(9, TOKENS, WIDTH)


def test_one_cast_and_one_copy_for_backward(monkeypatch):
    def measured():
        fn = jaxquant.quantize(three, FP8)
        state = jax.eval_shape(fn.init, THREE, X)
        kept = saved_for_backward(lambda p, s, x: fn(p, s, x), THREE, state, X)
        return casts(jax.make_jaxpr(fn)(THREE, state, X).jaxpr), kept["float8_e4m3fn"]

    assert measured() == (4, (3 * WIDTH + TOKENS) * WIDTH)
    share_nothing(monkeypatch)
    assert measured() == (6, (3 * WIDTH + 3 * TOKENS) * WIDTH)


def test_states_that_differ_are_scaled_by_the_widest_and_observe_for_themselves():
    fn = jaxquant.quantize(three, FP8)
    params, x = values()
    state = fn.init(params, x)
    step = jax.jit(jax.value_and_grad(lambda p, s, x: jnp.mean(fn(p, s, x) ** 2), argnums=(0, 1)))
    state = quant_state.update(state, step(params, state, x)[1][1])
    amax = recorded(jnp.max(jnp.abs(x)))
    factors = {"q/input": 0, "k/input": 2}  # scale 0, as for a frozen layer
    scaled = lambda name, row: row | {"amax_history": row["amax_history"] * factors.get(name, 1)}  # noqa: E731
    changed = edited(state, scaled)
    for warm in (False, True):
        given = quant_state.warm(changed) if warm else changed
        new = nested(quant_state.update(given, step(params, given, x)[1][1]))
        for name, past in (("q", 0), ("k", 2 * amax), ("v", amax)):
            history = new[name]["input_amax_history"]
            np.testing.assert_array_equal(history[0], amax)
            np.testing.assert_array_equal(history[-1], np.float32(past))
        for name in "kv":
            np.testing.assert_allclose(new[name]["input_scale"], 2 * amax / 448, rtol=1e-6)
    served = fn.convert(params, changed, x)
    np.testing.assert_array_equal(jax.jit(fn)(served, {}, x), jax.jit(fn)(params, changed, x))


def test_scans_and_remat_share_inside_and_a_layer_that_reads_another_tensor_stays_apart():
    def fn(params, x):
        body = jax.checkpoint(lambda y, p: (y + three(p, jnp.tanh(y)), None))
        x, _ = jax.lax.scan(body, x, params)
        return x

    stacked = {name: {"kernel": shape(2, WIDTH, WIDTH)} for name in "qkv"}
    both = lambda p, x: three(p, x) + jnp.tanh(x) @ p["k"]["kernel"]  # noqa: E731
    for each, params, count in ((fn, stacked, 4), (both, THREE, 7)):
        quantized = jaxquant.quantize(each, FP8)
        state = jax.eval_shape(quantized.init, params, X)
        assert casts(jax.make_jaxpr(quantized)(params, state, X).jaxpr) == count
