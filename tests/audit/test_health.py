"""The health of a model's layers: the right tensors, scales and rows, whatever the model does with its layers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import maybe_quantize_model, state
from jaxquant.audit.health import HealthMonitor
from jaxquant.audit.statistics import STATISTICS
from tests.models import Block, chain
from tests.numerics import BIN_RTOL, REROUNDED_RTOL, SMALL_SUM_RTOL, SQNR_ATOL_DB
from tests.reference import quantize

INPUT, KERNEL, OUTPUT_GRAD = range(3)
X = jax.random.normal(jax.random.key(0), (6, 32))
# What the loss multiplies a layer's output with is that output's gradient.
GRAD = jax.random.normal(jax.random.key(1), (6, 16)) * jnp.exp2(jax.random.randint(jax.random.key(2), (6, 16), -9, 1))


def measure(model, config, loss, x, params=None, quant_state=None):
    """Quantize, initialize where no parameters are given, and measure; {row: {statistic: its three numbers}}."""
    quantized = maybe_quantize_model(model, config, x)
    if params is None:
        params, quant_state = state.split(jax.jit(quantized.init)(jax.random.key(3), x))

    def total(params, quant_state):
        key = {"quant": jax.random.key(4)}
        return loss(quantized.apply(state.merge(params, quant_state), x, rngs=key))

    monitor = HealthMonitor(quantized, config, total, x)
    table = jax.jit(monitor)(params, quant_state or {})
    assert set(table) == set(STATISTICS)
    names = [row.name for row in monitor.rows]
    return {name: {key: np.asarray(table[key][i]) for key in STATISTICS} for i, name in enumerate(names)}, params


def native(quantization, **fields):
    return {"quantization": quantization, "quant_backend": "native", **fields}


def expected(x, dtype, axis, keeps_grid=False):
    """Statistics in numpy; ``axis`` is the contraction, None for a scale per tensor."""
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


@pytest.mark.parametrize(
    ("string", "dtypes", "axes"),
    [
        ("fp8_current", ("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"), (None, None, None)),
        ("int4", ("int4",) * 3, (1, 0, 1)),
    ],
)
def test_a_dense_layer_in_numpy(string, dtypes, axes):
    found, params = measure(nn.Dense(16), native(string), by_grad, X)
    (row,) = found.values()
    kernel = np.asarray(params["kernel"])
    check(row, INPUT, expected(X, dtypes[0], axes[0]))
    keeps_grid = string == "int4"
    check(row, KERNEL, expected(kernel, dtypes[1], axes[1], keeps_grid))
    # Per channel, the kernel's scale goes into the gradient before that is quantized; the amax is the gradient's own.
    folded = GRAD if axes[1] is None else GRAD * quantize(kernel, dtypes[1], axes[1], keeps_grid=keeps_grid)[1]
    check(row, OUTPUT_GRAD, expected(folded, dtypes[2], axes[2]) | {"amax": np.abs(GRAD).max()})


def test_delayed_scaling_is_measured_with_the_scale_of_the_step():
    """History says 1 for each tensor: what is larger saturates, and the scale is 1 over the largest value."""
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
    """Two blocks, scanned with the parameters' layer axis anywhere, or one after another; remat or not."""

    axis: int | None = None
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        if self.axis is None:
            for index in range(2):
                x, _ = block(16, name=f"layers_{index}")(x)
        else:
            axes = {"params": self.axis, "_overwrite_with_gradient": 0}
            scan = nn.scan(block, variable_axes=axes, split_rngs={"params": True, "quant": True}, length=2)
            x, _ = scan(16, name="layers")(x, None)
        return nn.Dense(8, name="logits")(x)


def square(y):
    return (y**2).mean()


def test_scan_and_remat_give_the_rows_of_the_layers_one_after_another():
    string, axis, remat = "fp8", 1, True
    plain, params = measure(Stack(), native(string), square, X)
    layers = [f"layers_{index}/{name}" for index in range(2) for name in ("wi", "wo")]
    assert list(plain) == [*layers, "logits"]
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves, min(axis, leaves[0].ndim)), *(params[f"layers_{index}"] for index in range(2))
    )
    model = maybe_quantize_model(Stack(axis, remat), native(string), X)
    _, fresh = state.split(jax.jit(model.init)(jax.random.key(3), X))
    tree = {"layers": stacked, "logits": params["logits"]}
    scanned, _ = measure(Stack(axis, remat), native(string), square, X, tree, fresh)
    rows = [f"layers/{name}, layer {index}" for index in range(2) for name in ("wi", "wo")]
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
    # Both uses have the rounding of the one, as their scales follow them: together they have it too.
    assert row["sqnr"][INPUT] == pytest.approx(single["sqnr"][INPUT], abs=SQNR_ATOL_DB)
    assert row["flushed"][OUTPUT_GRAD] == pytest.approx(single["flushed"][OUTPUT_GRAD], rel=SMALL_SUM_RTOL)


PAIR = chain(dense=16, logits=8)


@pytest.mark.parametrize(("string", "backend"), [("int8", "aqt"), ("fp8_full", "qwix")])
def test_other_backends_are_measured_like_the_native_one(string, backend):
    model = PAIR
    ours, params = measure(model, native(string), square, X)
    theirs, _ = measure(model, {"quantization": string, "quant_backend": backend}, square, X, params, {})
    assert list(theirs) == list(ours) == ["dense", "logits"]
    for name in ("amax", "scale", "saturated", "flushed", "sqnr"):
        np.testing.assert_allclose(
            theirs["dense"][name][:2], ours["dense"][name][:2], rtol=SMALL_SUM_RTOL, err_msg=name
        )
    # The head stays float in both.
    assert np.isnan(theirs["logits"]["sqnr"]).all()
    assert theirs["logits"]["amax"][KERNEL] == ours["logits"]["amax"][KERNEL]


def test_a_float_model_has_magnitudes_alone():
    """Nothing quantizes it: the loss is read as a function of the parameters, and its layers are tapped there."""
    found, params = measure(Stack(axis=0), {"quantization": ""}, square, X)
    assert list(found) == [*(f"layers/{name}, layer {i}" for i in range(2) for name in ("wi", "wo")), "logits"]
    kernel = np.abs(params["layers"]["wo"]["kernel"]).max((1, 2))
    assert [found[f"layers/wo, layer {i}"]["amax"][KERNEL] for i in range(2)] == kernel.tolist()
    assert found["layers/wi, layer 0"]["amax"][INPUT] == float(jnp.abs(X).max())
    for row in found.values():
        assert np.isfinite(row["amax"]).all()
        assert np.isnan([row["scale"], row["sqnr"], row["saturated"], row["flushed"]]).all()


def test_what_has_no_linear_layer_is_refused():
    with pytest.raises(ValueError, match="LayerNorm has no linear layer, so there is no health to measure"):
        HealthMonitor(nn.LayerNorm(), {"quantization": ""}, square, X)
    with pytest.raises(TypeError, match="taps the layers of a Linen module, got function"):
        HealthMonitor(square, {"quantization": ""}, square, X)  # pyright: ignore


def test_a_loss_that_drops_the_quant_state_is_refused_as_the_model_refuses_it():
    model = maybe_quantize_model(PAIR, native("fp8"), X)
    params, _ = state.split(jax.jit(model.init)(jax.random.key(3), X))
    monitor = HealthMonitor(model, native("fp8"), lambda params: square(model.apply({"params": params}, X)), X)
    with pytest.raises(ValueError, match=r"recipe 'fp8' at 'dense' keeps state .* no 'input_\w+' there: pass"):
        monitor(params)
