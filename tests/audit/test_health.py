"""Health of layers: tensors, scales and rows, for Linen models and for functions of ``quantize``."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxquant
from jaxquant import maybe_quantize_model, state
from jaxquant.audit.health import health
from jaxquant.audit.statistics import STATISTICS
from tests.models import Block, Scanned, chain
from tests.numerics import BIN_RTOL, REROUNDED_RTOL, SMALL_SUM_RTOL, SQNR_ATOL_DB
from tests.reference import quantize

INPUT, KERNEL, OUTPUT_GRAD = range(3)
X = jax.random.normal(jax.random.key(0), (6, 32))
# The loss is linear in the layer's output, so the factor of the output is the output's gradient.
GRAD = jax.random.normal(jax.random.key(1), (6, 16)) * jnp.exp2(jax.random.randint(jax.random.key(2), (6, 16), -9, 1))


def measure(model, config, loss, x, params=None, quant_state=None):
    """Quantize a model, initialize missing parameters, and measure; return {row: {statistic: three numbers}}."""
    quantized = maybe_quantize_model(model, config, x)
    if params is None:
        params, quant_state = state.split(jax.jit(quantized.init)(jax.random.key(3), x))

    def total(params, quant_state):
        key = {"quant": jax.random.key(4)}
        return loss(quantized.apply(state.merge(params, quant_state), x, rngs=key))

    monitor = health(quantized, total, x)
    table = jax.jit(monitor)(params, quant_state or {})
    assert set(table) == set(STATISTICS)
    names = [row.name for row in monitor.rows]
    assert all(name in str(table) for name in names)
    return {name: {key: np.asarray(table[key][i]) for key in STATISTICS} for i, name in enumerate(names)}, params


def native(quantization, **fields):
    return {"quantization": quantization, "quant_backend": "native", **fields}


def expected(x, dtype, axis, keeps_grid=False):
    """Compute statistics in numpy; ``axis`` is the contraction axis, or None for per-tensor scales."""
    x = np.asarray(x, np.float32)
    qvalue, own = quantize(x, dtype, axis, keeps_grid=keeps_grid)
    back = qvalue * own
    return {
        "amax": np.abs(x).max(),
        "scale": own.max(),
        "saturated": 0.0,
        "flushed": np.mean(back[x != 0] == 0),
        "sqnr": 10 * np.log10(np.square(x, dtype=np.float64).sum() / np.square(x - back, dtype=np.float64).sum()),
    }


def check(row, tensor, wanted):
    for name, value in wanted.items():
        tolerance = {"abs": SQNR_ATOL_DB} if name == "sqnr" else {"rel": SMALL_SUM_RTOL}
        assert row[name][tensor] == pytest.approx(value, **tolerance), name


def by_grad(y):
    return (y * GRAD).sum()


CURRENT = ("fp8_current", ("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"), (None, None, None))


@pytest.mark.parametrize(("string", "dtypes", "axes"), [CURRENT, ("int4", ("int4",) * 3, (1, 0, 1))])
def test_a_dense_layer_in_numpy(string, dtypes, axes):
    found, params = measure(nn.Dense(16), native(string), by_grad, X)
    (row,) = found.values()
    kernel = np.asarray(params["kernel"])
    check(row, INPUT, expected(X, dtypes[0], axes[0]))
    keeps_grid = string == "int4"
    check(row, KERNEL, expected(kernel, dtypes[1], axes[1], keeps_grid))
    # A per-channel kernel scale multiplies the gradient before it is quantized; the amax is that of the gradient alone.
    folded = GRAD if axes[1] is None else GRAD * quantize(kernel, dtypes[1], axes[1], keeps_grid=keeps_grid)[1]
    check(row, OUTPUT_GRAD, expected(folded, dtypes[2], axes[2]) | {"amax": np.abs(GRAD).max()})


def test_delayed_scaling_is_measured_with_the_scale_of_the_step():
    """The history contains 1 for each tensor: larger values saturate, and the scale is 1 over the largest value."""
    quantized = maybe_quantize_model(nn.Dense(16), native("fp8"), X)
    params, quant_state = state.split(jax.jit(quantized.init)(jax.random.key(3), X))
    seen = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.at[..., 7].set(1.0) if "amax_history" in str(path[-1]) else leaf, quant_state
    )
    found, _ = measure(nn.Dense(16), native("fp8"), by_grad, X, params, seen)
    (row,) = found.values()
    tensors = {INPUT: (X, 448), KERNEL: (params["kernel"], 448), OUTPUT_GRAD: (GRAD, 57344)}
    for place, (x, largest) in tensors.items():
        assert row["scale"][place] == pytest.approx(1 / largest, rel=SMALL_SUM_RTOL)
        assert row["saturated"][place] == pytest.approx(float((jnp.abs(x) > 1).mean()), rel=SMALL_SUM_RTOL)
        assert row["amax"][place] == float(jnp.abs(x).max())
    assert row["saturated"][INPUT] > 0.2
    assert row["sqnr"][INPUT] < 15


class Stack(nn.Module):
    """Two blocks, scanned and rematerialized with the parameters' layer axis last, or one after another."""

    is_scanned: bool = False

    @nn.compact
    def __call__(self, x):
        if self.is_scanned:
            x = Scanned(16, axis=1, remat=True)(x)
        else:
            for index in range(2):
                x, _ = Block(16, name=f"layers_{index}")(x)
        return nn.Dense(8, name="logits")(x)


def square(y):
    return (y**2).mean()


def test_scan_and_remat_give_the_rows_of_the_layers_one_after_another():
    plain, params = measure(Stack(), native("fp8"), square, X)
    both = [params[f"layers_{index}"] for index in range(2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves, min(1, leaves[0].ndim)), *both)
    scanned = maybe_quantize_model(Stack(True), native("fp8"), X)
    _, fresh = state.split(jax.jit(scanned.init)(jax.random.key(3), X))
    tree = {"Scanned_0": {"layers": stacked}, "logits": params["logits"]}
    scanned, _ = measure(Stack(True), native("fp8"), square, X, tree, fresh)
    assert list(plain) == [*(f"layers_{i}/{name}" for i in range(2) for name in ("wi", "wo")), "logits"]
    rows = [f"Scanned_0/layers/{name}, layer {i}" for i in range(2) for name in ("wi", "wo")]
    assert list(scanned) == [*rows, "logits"]
    for ours, theirs in zip(scanned.values(), plain.values(), strict=True):
        for name in STATISTICS:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=REROUNDED_RTOL, equal_nan=True, err_msg=name)


class Reuse(nn.Module):
    """One layer called twice, the second time on inputs eight times as large."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(16, use_bias=False, name="shared")
        return dense(x) + 3 * dense(8 * x)


def test_a_layer_that_is_used_twice_counts_both_uses():
    config = native("fp8_current")
    found, _ = measure(Reuse(), config, by_grad, X)
    once, _ = measure(nn.Sequential([nn.Dense(16, use_bias=False)]), config, by_grad, X)
    (row,), (single,) = found.values(), once.values()
    for place, factor in ((INPUT, 8), (OUTPUT_GRAD, 3)):
        for name in ("amax", "scale"):
            largest = factor * single[name][place] * (1 - SMALL_SUM_RTOL)
            assert largest <= row[name][place] <= factor * single[name][place] * (1 + BIN_RTOL)
    # Both uses have the same relative rounding error, because their scales follow their magnitudes.
    assert row["sqnr"][INPUT] == pytest.approx(single["sqnr"][INPUT], abs=SQNR_ATOL_DB)
    assert row["flushed"][OUTPUT_GRAD] == pytest.approx(single["flushed"][OUTPUT_GRAD], rel=SMALL_SUM_RTOL)


PAIR = chain(dense=16, logits=8)


@pytest.mark.parametrize(("string", "backend"), [("int8", "aqt"), ("fp8_full", "qwix")])
def test_other_backends_are_measured_like_the_native_one(string, backend):
    ours, params = measure(PAIR, native(string), square, X)
    theirs, _ = measure(PAIR, {"quantization": string, "quant_backend": backend}, square, X, params, {})
    assert list(theirs) == list(ours) == ["dense", "logits"]
    for name in ("amax", "scale", "saturated", "flushed", "sqnr"):
        found, wanted = (each["dense"][name][:2] for each in (theirs, ours))
        np.testing.assert_allclose(found, wanted, rtol=SMALL_SUM_RTOL, err_msg=name)
    # The head stays in float in both models.
    assert np.isnan(theirs["logits"]["sqnr"]).all()
    assert theirs["logits"]["amax"][KERNEL] == ours["logits"]["amax"][KERNEL]


def test_a_float_model_has_magnitudes_alone():
    """The model is not quantized: the loss is traced as a function of the parameters, and its layers are tapped."""
    found, params = measure(Scanned(16), {"quantization": ""}, square, X)
    assert list(found) == [f"layers/{name}, layer {i}" for i in range(2) for name in ("wi", "wo")]
    kernel = np.abs(params["layers"]["wo"]["kernel"]).max((1, 2))
    assert [found[f"layers/wo, layer {i}"]["amax"][KERNEL] for i in range(2)] == kernel.tolist()
    assert found["layers/wi, layer 0"]["amax"][INPUT] == float(jnp.abs(X).max())
    for row in found.values():
        assert np.isfinite(row["amax"]).all()
        assert np.isnan([row["scale"], row["sqnr"], row["saturated"], row["flushed"]]).all()


def test_quant_state_that_is_missing_is_named():
    model = maybe_quantize_model(PAIR, native("fp8"), X)
    params = jax.eval_shape(model.init, jax.random.key(3), X)["params"]
    monitor = health(model, lambda params: square(model.apply({"params": params}, X)), X)
    with pytest.raises(ValueError, match=r"recipe 'fp8' at 'dense' .* no 'input_\w+' in that collection; pass"):
        jax.eval_shape(monitor, params)


# -- functions of jaxquant.quantize ------------------------------------------------------------------------------------


def of_function(fn, config, loss, params, *args):
    """Measure a quantized function; return its rows and statistics."""
    function = jaxquant.quantize(fn, config)
    monitor = health(function, loss, params, *args)
    return monitor.rows, jax.jit(monitor)(params, function.init(params, *args), *args)


def test_a_function_has_the_statistics_of_the_linen_monitor():
    model, config = Scanned(16), native("fp8")
    linen, params = measure(model, config, square, X)
    rows, found = of_function(lambda p, x: model.apply({"params": p}, x), config, lambda y, *_: square(y), params, X)
    assert sorted(row.name for row in rows) == sorted(linen)
    for number, row in enumerate(rows):
        for name in STATISTICS:
            np.testing.assert_allclose(found[name][number], linen[row.name][name], rtol=REROUNDED_RTOL, err_msg=name)


def test_experts_have_a_row_each_and_weights_may_stand_first():
    """Each expert is measured like a separate layer, with the weight on either side."""
    weights = jax.random.normal(jax.random.key(1), (2, 32, 8))
    x, numbers = jnp.stack([X, 5 * X[::-1]]), (((2,), (1,)), ((0,), (0,)))
    swapped = tuple(each[::-1] for each in numbers)

    def measure(fn, params, x):
        rows, found = of_function(fn, native("fp8_e4m3"), lambda y, *_: jnp.sum(jnp.square(y)), params, x)
        return [row.name for row in rows], found

    names, second = measure(lambda p, x: jax.lax.dot_general(x, p["wi"], numbers), {"wi": weights}, x)
    _, first = measure(lambda p, x: jax.lax.dot_general(p["wi"], x, swapped), {"wi": weights}, x)
    assert names == ["wi, layer 0", "wi, layer 1"]
    for index in range(2):
        _, alone = measure(lambda p, x: x @ p["w"], {"w": weights[index]}, x[index])
        for name in STATISTICS:
            for found in (first, second):
                np.testing.assert_allclose(found[name][index], alone[name][0], rtol=REROUNDED_RTOL, err_msg=name)


def test_an_nnx_model_by_its_parameters():
    graph, params, rest = nnx.split(nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0)), nnx.Param, ...)
    function = lambda params, rest, x: nnx.merge(graph, params, rest)(x)  # noqa: E731
    [row], found = of_function(function, native("fp8_current"), lambda y, rest, x: (3 * y).sum(), params, rest, X)
    assert row.dtypes == {"input": "float8_e4m3fn", "kernel": "float8_e4m3fn", "output_grad": "float8_e5m2"}
    [kernel] = jax.tree.leaves(params)
    assert found["amax"][0].tolist() == [float(jnp.abs(X).max()), float(jnp.abs(kernel).max()), 3]
    assert (found["sqnr"][0, :OUTPUT_GRAD] > 25).all()
