"""Codes of moments, compared with COAT's formula and bitsandbytes' map in float64, and the ends of the code range."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from jaxquant.optim import SCHEMES, moment_health, quantize_state
from jaxquant.optim.codes import Coded
from tests import numerics

GROUPS = 512


@functools.cache
def moments(kind: str, group: int) -> np.ndarray:
    """Return groups of moments: rows and columns of gradients differ in magnitude, second moments are means of 20."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(size=(GROUPS, 1)) * 2) * np.exp(rng.normal(size=(1, group)) * 1.5) * 1e-6
    gradients = (rng.standard_normal((20, GROUPS, group)) * sizes).astype(np.float32)
    if kind == "first":
        return gradients[0]
    if kind == "wide":
        return (10.0 ** rng.uniform(-30, 0, (GROUPS, group))).astype(np.float32)
    second = (gradients**2 * np.float32(0.95) ** np.arange(20, dtype=np.float32)[:, None, None]).mean(0)
    second[:, ::17] = 0
    return second


def coat(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sign · (|x| / c)^k / s of COAT's kernel before the cast to e4m3, and 16 · k before the floor."""
    magnitude = np.abs(x.astype(np.float64))
    largest = magnitude.max(-1, keepdims=True) + 1e-30
    smallest = np.where(magnitude > 0, magnitude, np.inf).min(-1, keepdims=True) + 1e-30
    k16 = np.log2(448**2 / 2) / np.log2(largest / smallest) * 16
    k = np.floor(k16) / 16
    c = np.sqrt(largest * smallest)
    s = (largest / c) ** k / 448
    return np.sign(x) * (magnitude / c) ** k / s, k16[..., 0]


def bitsandbytes(signed: bool) -> np.ndarray:
    """Return the result of ``create_dynamic_map(signed, 7, 8)``."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += [*middles, *(-middles if signed else [])]
    return np.sort(values)


def run(scheme: str, x: np.ndarray, signed: bool) -> tuple[Coded, np.ndarray]:
    codec = SCHEMES[scheme].codec(signed)

    @jax.jit
    def both(x: jax.Array) -> tuple[Coded, jax.Array]:
        coded = codec.encode(x, signed, -1)
        return coded, codec.decode(coded, signed, -1)

    coded, decoded = both(x)
    return coded, np.asarray(decoded)


KINDS = [("first", True), ("second", False), ("wide", False)]


@pytest.mark.parametrize(("kind", "signed"), KINDS)
def test_codes_of_coat(kind: str, signed: bool):
    x = moments(kind, 128)
    coded, decoded = run("fp8_coat", x, signed)
    wanted, k16 = coat(x)
    codes, exponent = np.asarray(coded.codes).astype(np.float64), np.asarray(coded.exponent).astype(np.float64)
    here = (x == 0).all(-1) | (np.abs(x).max(-1) > 1e-24)  # COAT's 1e-30 is below a last bit here
    floors = np.clip(np.floor(k16), 1, 255)
    close = np.abs(k16 - np.round(k16)) < numerics.CODE_RTOL * k16
    assert here.mean() > 0.99
    assert (exponent == floors)[here & ~close].all()
    same = here & (exponent == floors)
    low, high = ((wanted * (1 + e)).astype(ml_dtypes.float8_e4m3fn) for e in (-numerics.CODE_RTOL, numerics.CODE_RTOL))
    right = (codes == low.astype(np.float64)) | (codes == high.astype(np.float64))
    tiny = np.abs(wanted) < 2.0**-9  # rounded up to the smallest code, not to 0
    assert right[same][~tiny[same]].all()
    share = (codes == wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float64))[here].mean()
    assert share > 1 - 2 * numerics.CODE_RTOL * 16  # a boundary is within this share of each of 16 steps per octave
    assert ((decoded == 0) == (x == 0)).all()
    assert (np.sign(decoded) == np.sign(x)).all()


@pytest.mark.parametrize(("kind", "signed"), KINDS)
def test_codes_of_bitsandbytes(kind: str, signed: bool):
    x = moments(kind, 256)
    coded, decoded = run("int8_dynamic", x, signed)
    table = bitsandbytes(signed)
    codes = np.asarray(coded.codes).astype(int)
    codes = np.where(codes > 128, codes - 256, codes) + 127 if signed else codes
    y = x.astype(np.float64) / np.abs(x).max(-1, keepdims=True)
    edges = (table[1:] + table[:-1]) / 2
    low, high = (np.searchsorted(edges, y * (1 + e)) for e in (-numerics.CODE_RTOL, numerics.CODE_RTOL))
    flushed = (table[np.searchsorted(edges, y)] == 0) & (x != 0)  # bitsandbytes maps them to 0
    assert ((codes == low) | (codes == high))[~flushed].all()
    assert (codes == np.searchsorted(edges, y))[~flushed].mean() > 1 - 256 * numerics.CODE_RTOL
    expected = table[codes] * np.abs(x).max(-1, keepdims=True)
    np.testing.assert_allclose(decoded, expected, rtol=numerics.CODE_RTOL, atol=1e-44)
    assert not signed or np.array_equal(decoded == 0, (x == 0) | flushed)
    if not signed:
        assert ((decoded == 0) == (x == 0)).all()
        assert flushed.mean() > {"second": 1e-4, "wide": 0.5}[kind]  # values that the clamp changes
        # The clamp changes only these values; it increases them by at most the smallest number of the map.
        assert (decoded[flushed] >= x[flushed]).all()


def test_int8_linear_is_within_half_a_step():
    x = moments("first", 2048)
    coded, decoded = run("int8_linear", x, True)
    largest = np.abs(x).max(-1, keepdims=True)
    assert (np.abs(decoded - x) <= largest / 254 * (1 + 4 * numerics.FLOAT32_EPS * 127)).all()
    assert np.abs(np.asarray(coded.codes).astype(int)).max() == 127


@pytest.mark.parametrize(("scheme", "signed"), [("fp8_coat", False), ("int8_dynamic", True), ("int8_linear", True)])
def test_equal_values_zeros_and_extremes(scheme: str, signed: bool):
    rows = np.zeros((7, 128), np.float32)
    rows[1], rows[2], rows[3, 5] = 3e-9, 3.4e38, 1e-20
    rows[4], rows[5] = np.float32(1e30), np.float32(2.0**-119)
    rows[6] = np.geomspace(1e-37, 3e38, 128)
    _, decoded = run(scheme, rows, signed)
    assert np.isfinite(decoded).all()
    assert (decoded[rows == 0] == 0).all()
    equal = rows[:6]
    np.testing.assert_allclose(decoded[:6], equal, rtol=numerics.CODE_RTOL)
    assert (decoded[6] > 0).all() or signed


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("signed", [True, False])
def test_shares_are_those_of_the_code(scheme: str, signed: bool):
    """Zeros, numbers far below the range of their group's code, and a few large numbers."""
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
    underflows = scheme != "fp8_coat"  # its exponent adapts the code to the range of a group
    assert shares["zero"] == (40 if underflows and signed else 10)
    assert shares["smallest"] == (30 if underflows and not signed else 0)
