"""Weights in bfloat16: rounding that is right on average, and rounding with a stored error."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxquant.optim import compensated_round, stochastic_round
from jaxquant.optim.weights import round_randomly
from tests import numerics

ULP = 2.0**-7  # ulp of bfloat16, from 1 to 2
N = 1_000_000


@pytest.mark.parametrize("share", [0, 2.0**-16, 0.5])
def test_the_mean_of_a_million_roundings_is_the_number(share: float):
    x = np.float32(-1 - share * ULP)
    rounded = np.asarray(round_randomly(jnp.full(N, x), jax.random.key(3)), np.float64)
    assert set(np.unique(rounded)) <= {-1.0, -1.0 - ULP}
    assert abs(rounded.mean() - x) <= numerics.stochastic_mean_bound(ULP, N)
    assert share or (rounded == x).all()  # bfloat16 values do not change


def test_what_is_not_finite_stays_and_nothing_becomes_infinite():
    x = jnp.array([jnp.nan, -jnp.nan, jnp.inf, -jnp.inf, jnp.finfo(jnp.float32).max, -3.4e38], jnp.float32)
    for seed in range(20):
        found = np.asarray(round_randomly(x, jax.random.key(seed)))
        np.testing.assert_array_equal(found[:4], x[:4])
        assert np.isfinite(found[4:]).all()


def steps(tx: Any, p: Any, u: Any, count: int) -> tuple[Any, Any]:
    def step(carry: Any, _: None) -> tuple[Any, Any]:
        p, state = carry
        updates, state = tx.update(u, state, p)
        p = optax.apply_updates(p, updates)
        return (p, state), p

    return jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), None, count))(p)


def test_small_updates_are_lost_to_nearest_and_arrive_otherwise():
    """600 updates of 2^-14 on 1, whose ulp is 2^-7: 0.0366 in all, below 5 ulp, so each rounding keeps its ulp."""
    p, u = {"w": jnp.ones(4096, jnp.bfloat16)}, {"w": jnp.full(4096, 2.0**-14)}
    end = {name: np.asarray(steps(tx, p, u, 600)[0][0]["w"], np.float64) for name, tx in TXS.items()}
    assert (end["nearest"] == 1).all()
    assert abs(end["stochastic"].mean() - 1 - 600 * 2.0**-14) <= numerics.stochastic_mean_bound(ULP, 4096) * 600**0.5
    assert len(np.unique(end["stochastic"])) > 3
    assert np.abs(end["compensated"] - 1 - 600 * 2.0**-14).max() <= ULP  # half an ulp of the weight and of the error


TXS = {"nearest": optax.identity(), "stochastic": stochastic_round(), "compensated": compensated_round()}


@pytest.mark.parametrize("name", ["stochastic", "compensated"])
def test_the_update_leads_to_a_neighbour_of_the_sum(name: str):
    """This holds for all magnitudes of weight and update, including cancellation; float32 weights are not rounded."""
    a, b = (jax.random.normal(jax.random.key(i), (20_000,)) for i in range(2))
    p = {"w": (a * 2.0 ** jnp.round(10 * b)).astype(jnp.bfloat16), "full": a}
    u = {"w": jnp.concatenate([b[:10_000], -p["w"][10_000:].astype(jnp.float32) * (1 + 1e-3 * b[10_000:])]), "full": b}
    updates, _ = TXS[name].update(u, TXS[name].init(p), p)
    found = optax.apply_updates(p, updates)["w"].astype(jnp.float32)
    exact = np.asarray(p["w"].astype(jnp.float32) + u["w"])
    truncated = (exact.view(np.int32) & -(2**16)).view(np.float32)
    away = (truncated.view(np.int32) + np.where(truncated == exact, 0, 2**16).astype(np.int32)).view(np.float32)
    assert ((np.asarray(found) == truncated) | (np.asarray(found) == away)).all()
    np.testing.assert_array_equal(updates["full"], u["full"])


def test_noise_depends_on_seed_step_and_path_and_on_nothing_else():
    p = {name: jnp.ones((64, 64), jnp.bfloat16) for name in "ab"}
    u = jax.tree.map(lambda x: jnp.full(x.shape, ULP / 2), p)
    first = steps(stochastic_round(1), p, u, 2)[1]
    alone = steps(stochastic_round(1), {"b": p["b"]}, {"b": u["b"]}, 2)[1]
    np.testing.assert_array_equal(alone["b"], first["b"])
    drawn = [
        first["a"][0],
        first["b"][0],
        first["b"][1] - first["b"][0],
        steps(stochastic_round(2), p, u, 1)[1]["b"][0],
    ]
    bits = {np.asarray(x, np.float32).tobytes() for x in drawn}
    assert len(bits) == len(drawn)


@pytest.mark.parametrize("tx", [stochastic_round(), compensated_round()])
def test_weights_of_which_none_is_bfloat16_are_refused(tx: Any):
    wide, mixed = ({"w": jnp.ones(3), "b": jnp.ones(3, dtype)} for dtype in ("float16", "bfloat16"))
    with pytest.raises(ValueError, match=r"but no weight is bfloat16 .*: float16, float32"):
        tx.update(wide, tx.init(wide), wide)
    tx.update(mixed, tx.init(mixed), mixed)
