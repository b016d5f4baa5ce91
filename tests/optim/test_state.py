"""Moments in 8 bits around optax's optimizers: which moments are quantized, and how optimizers are wrapped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from optax import contrib

from jaxquant.optim import SCHEMES, describe_state, quantize_state, stochastic_round
from tests import numerics

OPTIMIZED = False

PARAMS = {
    "layer": {"kernel": jax.random.normal(jax.random.key(0), (64, 128)), "bias": jnp.zeros(128)},
    "flat": jax.random.normal(jax.random.key(1), (5120,)),
    "odd": jnp.ones((40, 127), jnp.bfloat16),
    "prime": jnp.ones((3, 4099)),
    "empty": jnp.zeros((0, 512)),
    "scalar": jnp.ones(()),
}


SMALL = {"layer": PARAMS["layer"], "odd": jax.random.normal(jax.random.key(2), (40, 127)).astype(jnp.bfloat16)}


def gradients(step: Any) -> Any:
    """Return gradients whose signs are the same in all steps, with magnitudes between 0.5 and 1.5."""

    def of_leaf(p: jax.Array) -> jax.Array:
        magnitude = jnp.cos(jnp.arange(p.size) * (step + 7.0)).reshape(p.shape) / 2 + 1
        return jnp.where(p < 0, -magnitude, magnitude).astype(p.dtype)

    return jax.tree.map(of_leaf, SMALL)


def scanned(tx: Any) -> Any:
    """Return a jitted function for two steps: (parameters, state), first step -> (parameters, state), updates."""

    def step(carry: Any, i: jax.Array) -> Any:
        params, state = carry
        updates, state = tx.update(gradients(i), state, params)
        return (optax.apply_updates(params, updates), state), updates

    return jax.jit(lambda carry, start: jax.lax.scan(step, carry, start + jnp.arange(2)))


def same_bits(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3, momentum=0.9),
    "muon": contrib.muon(1e-3),
}
PAIRS = [(name, "int8_linear" if name == "muon" else "fp8_coat") for name in OPTIMIZERS]


@pytest.mark.parametrize(("name", "scheme"), PAIRS)
def test_optimizers_go_on_as_they_do_in_float32(name: str, scheme: str):
    tx, exact = quantize_state(OPTIMIZERS[name], scheme), jax.tree.map(lambda p: p.astype(jnp.float32), SMALL)
    (_, state), updates = scanned(tx)((SMALL, tx.init(SMALL)), 0)
    _, wanted = scanned(OPTIMIZERS[name])((exact, OPTIMIZERS[name].init(exact)), 0)
    for found, right in zip(jax.tree.leaves(updates), jax.tree.leaves(wanted), strict=True):
        assert found.dtype == jnp.float32
        assert jnp.linalg.norm(found - right) <= numerics.MOMENT_RTOL * jnp.linalg.norm(right)
    for path, row in describe_state(state).items():
        coded = path.rpartition("/")[2] in ("kernel", "odd")
        assert ("groups of" in row) == coded, path


def inside(tx: Any) -> Any:
    return quantize_state(tx, "int8_dynamic")


def kernels(tree: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, tree)


WRAPPED = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), inside(tx), stochastic_round()),
    "MultiSteps": lambda tx: optax.MultiSteps(inside(tx), 2).gradient_transformation(),
    "multi_transform": lambda tx: optax.multi_transform({True: inside(tx), False: optax.sgd(1e-2)}, kernels),
    "of apply_if_finite": lambda tx: inside(optax.apply_if_finite(tx, 3)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_scanned_stored_and_resumed_to_the_bit(name: str):
    tx = WRAPPED[name](optax.adam(1e-3))
    run = scanned(tx)
    half, _ = run((SMALL, tx.init(SMALL)), 0)
    assert any("uint8, groups of" in row for row in describe_state(half[1]).values())
    restored = serialization.from_bytes(jax.tree.map(jnp.zeros_like, half), serialization.to_bytes(half))
    same_bits(restored, half)
    same_bits(run(jax.tree.map(jnp.asarray, restored), 2), run(half, 2))


BAD = {"nan": jnp.nan, "inf": jnp.inf, "its square": 1e30}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bad_gradient_spoils_its_element_once_and_its_group_never(scheme: str):
    params = {"w": jnp.zeros((64, 128))}
    tx = quantize_state(optax.adam(1e-3), scheme)
    update = jax.jit(tx.update)
    good = {"w": jnp.cos(jnp.arange(64 * 128.0)).reshape(64, 128) + 2}
    _, state = update(good, tx.init(params), params)
    for bad in BAD.values():
        _, spoilt = update({"w": good["w"].at[3, 7].set(bad)}, state, params)
        updates, spoilt = update(good, spoilt, params)
        wanted, _ = update(good, update(good, state, params)[1], params)
        assert jnp.isfinite(updates["w"]).all()
        others = jnp.ones((64, 128), bool).at[3, 7].set(False)
        error = jnp.where(others, updates["w"] - wanted["w"], 0)
        assert jnp.linalg.norm(error) <= numerics.MOMENT_RTOL * jnp.linalg.norm(wanted["w"])
        assert jnp.abs(updates["w"][3, 7]) < 4e-3  # at most (1 - b1) / sqrt(1 - b2) of the learning rate


REFUSED = {
    "has no scheme 'fp8_cot'; did you mean 'fp8_coat'": lambda adam: quantize_state(adam, "fp8_cot"),
    "float32 lists 'bios', which is in no path of the": lambda adam: quantize_state(adam, "fp8_coat", float32=["bios"]),
    "already contains a quantize_state": lambda adam: quantize_state(quantize_state(adam, "fp8_coat"), "fp8_coat"),
    "quantize_state does not know the array 'acc_grads/flat' of shape": lambda adam: quantize_state(
        optax.MultiSteps(adam, 2).gradient_transformation(), "fp8_coat"
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str):
    with pytest.raises(ValueError, match=message):
        REFUSED[message](optax.adam(1e-3)).init(PARAMS)


def test_a_state_of_another_scheme_is_refused():
    other = quantize_state(optax.adam(1e-3), "fp8_coat").init(PARAMS)
    with pytest.raises(ValueError, match="has dtype float8_e4m3fn, but scheme 'int8_dynamic' needs uint8; use"):
        quantize_state(optax.adam(1e-3), "int8_dynamic").update(PARAMS, other, PARAMS)
