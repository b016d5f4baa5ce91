"""Statistics of one tensor, compared with a loop over its elements."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.audit.statistics import STATISTICS, WIDTH, read, record
from jaxquant.core.calibration import parse_calibration
from jaxquant.core.qtensor import dequantize
from jaxquant.core.quantize import quantize, quantize_with_scale
from jaxquant.core.recipe import TensorSpec
from tests.numerics import BIN_RTOL, SQNR_ATOL_DB
from tests.reference import BOUNDS

E4M3 = TensorSpec("float8_e4m3fn", "per_tensor")
SPECS = {
    "e4m3 per tensor": E4M3,
    "int8 per channel": TensorSpec("int8"),
    "e4m3 in tiles": TensorSpec("float8_e4m3fn", "per_tile", tile_size=8),
    "a fixed range that clips": TensorSpec("int8", "per_tensor", parse_calibration("fixed,1.5")),
    "an asymmetric range that clips": TensorSpec("int8", calibration=parse_calibration("minmax,0.5")),
}


def normal(seed: int = 0, shape: tuple[int, ...] = (24, 32)) -> jax.Array:
    x = jax.random.normal(jax.random.key(seed), shape) * jnp.exp2(jax.random.randint(jax.random.key(1), shape, -9, 2))
    return x.at[0, :5].set(0)


def one(x, spec, tensor) -> dict[str, float]:
    return {name: float(value) for name, value in read(record(x, spec, tensor)).items()}


def loop(x, spec: TensorSpec, tensor) -> dict[str, float]:
    """Compute the statistics element by element, in double precision."""
    scale = np.asarray(tensor.scale, np.float64)
    zero = np.zeros_like(scale) if tensor.zero_point is None else np.asarray(tensor.zero_point, np.float64)
    size = [n // m for n, m in zip(x.shape, scale.shape, strict=True)]
    bound, low = BOUNDS[spec.dtype], -BOUNDS[spec.dtype] - (tensor.zero_point is not None)
    amax = signal = noise = saturated = flushed = nonzero = largest = 0.0
    values, back = np.asarray(x, np.float64), np.asarray(dequantize(tensor), np.float64)
    for place in np.ndindex(*x.shape):
        at = tuple(i // n for i, n in zip(place, size, strict=True))
        v = values[place]
        amax, signal, noise = max(amax, abs(v)), signal + v**2, noise + (v - back[place]) ** 2
        saturated += not low * (1 + 1e-6) <= v / scale[at] + zero[at] <= bound * (1 + 1e-6)
        if v != 0:
            nonzero += 1
            flushed += back[place] == 0
            largest = max(largest, scale[at])
    return {
        "amax": amax,
        "scale": largest,
        "saturated": saturated / x.size,
        "flushed": flushed / nonzero,
        "sqnr": 10 * math.log10(signal / noise),
        "nonfinite": 0.0,
    }


@pytest.mark.parametrize("case", SPECS)
def test_a_loop_counts_the_same(case):
    x, spec = normal(), SPECS[case]
    tensor = quantize(x, spec, (1,))
    ours, theirs = one(x, spec, tensor), loop(x, spec, tensor)
    assert ours.pop("sqnr") == pytest.approx(theirs.pop("sqnr"), abs=SQNR_ATOL_DB)
    assert {name: np.float32(value) for name, value in theirs.items()} == ours
    assert (ours["saturated"] > 0) == ("clips" in case)


def test_what_is_not_finite_is_counted_and_a_float_tensor_has_an_amax_alone():
    for bad in (math.inf, math.nan):
        x = jnp.ones((2, 4)).at[1, 2].set(bad)
        for spec, tensor in ((None, None), (E4M3, quantize(x, E4M3, (1,)))):
            found = one(x, spec, tensor)
            assert (found["nonfinite"], found["amax"]) == (1 / 8, math.inf)
    found = one(normal(), None, None)
    assert found["amax"] == float(jnp.abs(normal()).max())
    assert [name for name in STATISTICS if math.isnan(found[name])] == ["scale", "saturated", "flushed", "sqnr"]
    assert all(math.isnan(float(value)) for value in read(jnp.zeros(WIDTH)).values())  # no backward pass reached it


def test_records_sum_to_those_of_all_uses_together():
    parts = [normal(0), 40 * normal(1)]
    tensors = [
        quantize_with_scale(x, E4M3, jnp.full((1, 1), scale)) for x, scale in zip(parts, (0.01, 0.05), strict=True)
    ]
    total = sum(record(x, E4M3, tensor) for x, tensor in zip(parts, tensors, strict=True))
    found = {name: float(value) for name, value in read(total).items()}
    each = [one(x, E4M3, tensor) for x, tensor in zip(parts, tensors, strict=True)]
    errors = [np.asarray(x) - np.asarray(dequantize(tensor)) for x, tensor in zip(parts, tensors, strict=True)]
    signal, noise = (sum(float(np.square(v, dtype=np.float64).sum()) for v in values) for values in (parts, errors))
    assert found["sqnr"] == pytest.approx(10 * math.log10(signal / noise), abs=SQNR_ATOL_DB)
    assert found["saturated"] == pytest.approx(np.mean([part["saturated"] for part in each]), rel=1e-6)
    assert found["saturated"] > 0
    for name in ("amax", "scale"):
        largest = max(part[name] for part in each)
        assert largest <= found[name] <= largest * (1 + BIN_RTOL)
