"""The health of functions of ``jaxquant.quantize``: the statistics that the Linen monitor has of the same model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxquant
from jaxquant.audit.health import FunctionHealth, HealthMonitor
from jaxquant.audit.statistics import STATISTICS
from tests.models import Scanned
from tests.numerics import REROUNDED_RTOL

X = jax.random.normal(jax.random.key(0), (6, 32))
OUTPUT_GRAD = 2
SCANNED = Scanned(16)


def square(y, *_):
    return jnp.sum(jnp.square(y))


@pytest.mark.parametrize("string", ["fp8", "int8"])
def test_a_scanned_model_has_the_statistics_of_the_linen_monitor(string):
    config = {"quantization": string, "quant_backend": "native"}
    model = jaxquant.maybe_quantize_model(SCANNED, config, X)
    params, quant_state = jaxquant.state.split(jax.jit(model.init)(jax.random.key(3), X))
    linen = HealthMonitor(
        model, config, lambda params, state: square(model.apply(jaxquant.state.merge(params, state), X)), X
    )
    theirs = jax.jit(linen)(params, quant_state)
    function = jaxquant.quantize(lambda p, x: SCANNED.apply({"params": p}, x), config)
    ours = FunctionHealth(function, square, params, X)
    found = jax.jit(ours)(params, function.init(params, X), X)
    order = [[row.name for row in linen.rows].index(row.name) for row in ours.rows]
    assert sorted(order) == list(range(4))
    for name in STATISTICS:
        np.testing.assert_allclose(found[name], theirs[name][np.array(order)], rtol=REROUNDED_RTOL, err_msg=name)


def test_experts_have_a_row_each_and_weights_may_stand_first():
    """Each expert by itself is measured as a layer of its own, with the weight on either side."""
    config = {"quantization": "fp8_e4m3", "quant_backend": "native"}
    weights = jax.random.normal(jax.random.key(1), (2, 32, 8))
    x = jnp.stack([X, 5 * X[::-1]])
    numbers = (((2,), (1,)), ((0,), (0,)))

    def measure(fn, params, x):
        monitor = FunctionHealth(jaxquant.quantize(fn, config), square, params, x)
        return [row.name for row in monitor.rows], jax.jit(monitor)(params, {}, x)

    names, second = measure(lambda p, x: jax.lax.dot_general(x, p["wi"], numbers), {"wi": weights}, x)
    swapped = tuple(each[::-1] for each in numbers)
    _, first = measure(lambda p, x: jax.lax.dot_general(p["wi"], x, swapped), {"wi": weights}, x)
    assert names == ["wi, layer 0", "wi, layer 1"]
    for index in range(2):
        _, alone = measure(lambda p, x: x @ p["w"], {"w": weights[index]}, x[index])
        for name in STATISTICS:
            for found in (first, second):
                np.testing.assert_allclose(found[name][index], alone[name][0], rtol=REROUNDED_RTOL, err_msg=name)


def test_an_nnx_model_by_its_parameters():
    graph, params, rest = nnx.split(nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0)), nnx.Param, ...)
    function = jaxquant.quantize(
        lambda params, rest, x: nnx.merge(graph, params, rest)(x), {"quantization": "fp8_current"}
    )
    monitor = FunctionHealth(function, lambda y, rest, x: (3 * y).sum(), params, rest, X)
    found = jax.jit(monitor)(params, {}, rest, X)
    [row] = monitor.rows
    assert row.dtypes == {"input": "float8_e4m3fn", "kernel": "float8_e4m3fn", "output_grad": "float8_e5m2"}
    [kernel] = jax.tree.leaves(params)
    assert found["amax"][0].tolist() == [float(jnp.abs(X).max()), float(jnp.abs(kernel).max()), 3]
    assert (found["sqnr"][0, :OUTPUT_GRAD] > 25).all()


def test_what_is_no_quantized_function_is_refused():
    with pytest.raises(TypeError, match=r"measures a function of jaxquant\.quantize, got function; HealthMonitor"):
        FunctionHealth(square, square, {})  # pyright: ignore
    with pytest.raises(ValueError, match="quantization is off"):
        FunctionHealth(jaxquant.quantize(lambda p, x: x @ p["w"], {}), square, {"w": jnp.ones((32, 8))}, X)


def test_groups_of_a_ragged_matmul_have_the_magnitudes_of_all():
    config = {"quantization": "fp8_current", "quant_backend": "native"}
    params, sizes = {"wi": jax.random.normal(jax.random.key(1), (2, 32, 8))}, jnp.array([4, 2], jnp.int32)
    function = jaxquant.quantize(lambda p, x, sizes: jax.lax.ragged_dot(x, p["wi"], sizes), config)
    monitor = FunctionHealth(function, lambda y, *_: (3 * y).sum(), params, X, sizes)
    found = jax.jit(monitor)(params, {}, X, sizes)
    assert [row.name for row in monitor.rows] == ["wi, layer 0", "wi, layer 1"]
    amaxes = [float(jnp.abs(X).max()), float(jnp.abs(params["wi"]).max()), 3]
    assert found["amax"].tolist() == [amaxes, amaxes]
    assert np.isnan(found["sqnr"]).all()
