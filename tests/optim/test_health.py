"""moment_health: codes at the ends of their range, counted in numpy from the moments before they are encoded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxquant.optim import SCHEMES, moment_health, quantize_state
from jaxquant.optim.codes import Coded


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("signed", [True, False])
def test_shares_are_those_of_the_code(scheme: str, signed: bool):
    """Zeros, numbers that are far too small for their group's code, and a few large ones."""
    codec = SCHEMES[scheme].codec(signed)
    x = np.full((1, codec.group), 0.5, np.float32)
    x[0, :10], x[0, 10:40], x[0, 40:43] = 0, 1e-30, 1 if not signed else -1
    coded = codec.encode(jnp.asarray(x), signed, -1)
    assert isinstance(coded, Coded)
    state = quantize_state(optax.adam(1e-3), scheme).init({"w": jnp.zeros((1, 4096))})
    moments = state.inner[0]._replace(**{"mu" if signed else "nu": {"w": coded.codes}})
    name = "inner/0/mu/w" if signed else "inner/0/nu/w"
    found = jax.jit(moment_health)({"inner": [state._replace(inner=moments)]})
    shares = {end: round(float(share) * codec.group) for end, share in found[name].items()}
    underflows = scheme != "fp8_coat"  # whose exponent spreads any group over its code
    assert shares["zero"] == (40 if underflows and signed else 10)
    assert shares["smallest"] == (30 if underflows and not signed else 0)


def test_float32_moments_and_other_states_have_no_shares():
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), quantize_state(optax.adamw(1e-3), "fp8_coat"))
    assert set(moment_health(tx.init(params))) == {"1/0/mu/w", "1/0/nu/w"}
    assert moment_health(optax.adamw(1e-3).init(params)) == {}
