"""Coverage of any function: it reads the whole function, with the layers and decisions of ``jaxquant.quantize``."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxquant
from tests.models import NnxChain

FP8 = {"quantization": "fp8", "quant_backend": "native"}
CURRENT = {"quantization": "fp8_current", "quant_backend": "native"}
INT8 = {"quantization": "int8", "quant_backend": "native"}


def array(*shape, dtype=jnp.float32):
    """Return a shape: these tests only trace."""
    return jax.ShapeDtypeStruct(shape, dtype)


def square(y):
    return jnp.mean(jnp.square(y))


def first_class(y):
    return -jax.nn.log_softmax(y)[..., 0].mean()


def gradient(fn, config, params, *args, loss=square):
    """Return (step, arguments, report, config): loss and gradients of a quantized function."""
    quantized = jaxquant.quantize(fn, config)
    state = jax.eval_shape(quantized.init, params, *args)

    def step(params, state, *args):
        return jax.value_and_grad(lambda p, s: loss(quantized(p, s, *args)), argnums=(0, 1))(params, state)

    return step, (params, state, *args), quantized.report(params, *args), config


def mlp(params, x):
    return jax.nn.relu(x @ params["up"]["w"] + params["up"].get("b", 0)) @ params["down"]["w"]


def mlp_params():
    return {"up": {"w": array(32, 64), "b": array(64)}, "down": {"w": array(64, 32)}}


def tied_embedding():
    def fn(params, tokens):
        return params["table"][tokens] @ params["mlp"]["w"] @ params["table"].T

    params = {"table": array(50, 32), "mlp": {"w": array(32, 32)}}
    return gradient(fn, CURRENT, params, array(2, 5, dtype=jnp.int32), loss=first_class)


def experts():
    """Return a router, an einsum over experts, and a head without a telling name."""

    def fn(params, tokens):
        x = params["embedding"][tokens]
        weight, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["route"]), 2)
        weight = jnp.sum(jax.nn.one_hot(chosen, 4) * weight[..., None], -2)
        y = jnp.einsum("bsd,edf->ebsf", x, params["experts"]["wi"])
        y = jnp.einsum("ebsf,efd->ebsd", jax.nn.relu(y), params["experts"]["wo"])
        return jax.nn.log_softmax((x + jnp.einsum("ebsd,bse->bsd", y, weight)) @ params["last"]["kernel"])

    params = {
        "embedding": array(50, 32),
        "route": array(32, 4),
        "experts": {"wi": array(4, 32, 16), "wo": array(4, 16, 32)},
        "last": {"kernel": array(32, 50)},
    }
    return gradient(fn, CURRENT, params, array(2, 5, dtype=jnp.int32), loss=lambda y: -y[..., 0].mean())


def scan_and_remat():
    def fn(params, x):
        def block(x, layer):
            return x + jax.nn.relu(x @ layer["wi"]["kernel"]) @ layer["wo"]["kernel"], None

        return jax.lax.scan(jax.checkpoint(block), x, params["layers"])[0]

    params = {"layers": {"wi": {"kernel": array(3, 32, 64)}, "wo": {"kernel": array(3, 64, 32)}}}
    return gradient(fn, FP8, params, array(8, 32))


def shared_jits_and_remat():
    """Layers of equal shape share one jitted program, which the backward pass recomputes."""

    @jax.jit
    def block(layer, x):
        return x + jax.nn.relu(x @ layer["wi"]["kernel"]) @ layer["wo"]["kernel"]

    def fn(params, x):
        for layer in params["layers"]:
            x = jax.checkpoint(block)(layer, x)
        return x

    layers = [{"wi": {"kernel": array(32, 64)}, "wo": {"kernel": array(64, 32)}} for _ in range(2)]
    return gradient(fn, CURRENT, {"layers": layers}, array(8, 32))


def ragged_and_convolution():
    def fn(params, x, sizes):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, params["conv"], (1, 1), "SAME", dimension_numbers=dims))
        rows = x.mean((1, 2))
        return jax.lax.ragged_dot(jax.nn.relu(jax.lax.ragged_dot(rows, params["wi"], sizes)), params["wo"], sizes)

    params = {"conv": array(3, 3, 3, 32), "wi": array(4, 32, 16), "wo": array(4, 16, 32)}
    return gradient(fn, CURRENT, params, array(8, 4, 4, 3), array(4, dtype=jnp.int32))


def training_loop():
    """Return a loop of training steps whose carry has the parameters."""
    quantized, x = jaxquant.quantize(mlp, FP8), array(8, 32)
    state = jax.eval_shape(quantized.init, mlp_params(), x)

    def step(params, state, batches):
        def body(carry, x):
            params, state = carry
            grads, seen = jax.grad(lambda p, s: square(quantized(p, s, x)), argnums=(0, 1))(params, state)
            return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), jaxquant.state.update(state, seen)), None

        return jax.lax.scan(body, (params, state), batches)[0]

    return step, (mlp_params(), state, array(3, 8, 32)), quantized.report(mlp_params(), x), FP8


def train_state():
    """Parameters in a TrainState with MultiSteps, the batch in a dictionary."""
    x = array(8, 32)
    quantized = jaxquant.quantize(mlp, INT8)
    jax.eval_shape(quantized.init, mlp_params(), x)
    optimizer = optax.MultiSteps(optax.adamw(1e-3), 2)
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=optimizer), mlp_params())

    def step(state, batch):
        grads = jax.grad(lambda p: square(quantized(p, {}, batch["inputs"]) - batch["targets"]))(state.params)
        return state.apply_gradients(grads=grads)

    return step, (state, {"inputs": x, "targets": x}), quantized.report(mlp_params(), x), INT8


FUNCTIONS = (
    *(tied_embedding, experts, scan_and_remat, shared_jits_and_remat),
    *(ragged_and_convolution, training_loop, train_state),
)


@pytest.mark.parametrize("build", FUNCTIONS, ids=lambda build: build.__name__)
def test_layers_of_a_quantized_function_are_those_of_its_report(build):
    step, args, report, config = build()
    found = jaxquant.coverage(step, *args, config=config)
    found.check()
    layers = {row.path for row in report if row.weight is not None}
    assert {row.path for row in found.rows if row.has_parameter and row.matmul == "fwd"} >= layers
    assert {row.path for row in found.rows if row.is_low} == {row.path for row in report.quantized}
    assert all(row.name not in ("", "no path") for row in found.rows)
    # The same layers, without the config.
    plain = jaxquant.coverage(step, *args)
    assert [(row.path, row.matmul) for row in plain.rows] == [(row.path, row.matmul) for row in found.rows]
    # Every layer has one weight gradient per execution.
    times = Counter[tuple[str, str]]()
    for row in found.rows:
        times[row.path, row.matmul] += row.times * (not row.is_recomputed)
    for path in {row.path for row in report.quantized}:
        forward = sum(row.times for row in found.rows if row.path == path and row.matmul == "fwd" and row.is_low)
        recomputed = sum(row.times for row in found.rows if row.path == path and row.is_recomputed)
        assert times[path, "drhs"] == forward - recomputed
        assert not times[path, "bwd"]


def test_what_stays_float_by_structure_has_the_reason_of_the_report():
    found = {}
    for build in (experts, tied_embedding):
        step, args, report, config = build()
        rows = jaxquant.coverage(step, *args, config=config).rows
        found |= {row.path: row.reason for row in rows if row.matmul == "fwd"}
        assert all(row.reason == found[row.path] for row in report if row.recipe is None and row.weight)
    assert found["route"] == "router (its result is ranked), left in float by default"
    assert found["last"].startswith("output head (no layer follows")
    assert found["table"].startswith("tied embedding")


class Spectral(nn.Module):
    """A float layer, a flax layer with complex numbers, and a complex parameter."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(8, name="dense", param_dtype=jnp.complex64)(nn.Dense(8, name="up")(x))
        return nn.Dense(8, name="down")(jnp.abs(y @ self.param("own", nn.initializers.ones, (8, 8), jnp.complex64)))


def test_complex_operands_stay_float_in_every_report():
    x, wanted = array(4, 8), {"up": "fp8_current", "dense": None, "own": None, "down": "fp8_current"}
    model = jaxquant.maybe_quantize_model(Spectral(), CURRENT, x)
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    assert {layer.path: layer.recipe for layer in jaxquant.describe_layers(Spectral(), CURRENT, x)} == wanted
    plain = jaxquant.quantize(lambda params, x: Spectral().apply({"params": params}, x), CURRENT)
    assert {row.path: row.recipe for row in plain.report(params, x)} == wanted
    step = jax.value_and_grad(lambda params, x: square(model.apply({"params": params}, x)))
    found = jaxquant.coverage(step, params, x, config=CURRENT)
    found.check()
    assert {row.reason for row in found.rows if row.path in ("dense", "own")} == {"its inputs are not float"}
    with pytest.raises(NotImplementedError, match=r"selects 'int8w' for layer 'own', but the layer stays in float .it"):
        jaxquant.maybe_quantize_model(Spectral(), CURRENT | {"rules": [{"path": "own", "recipe": "int8w"}]}, x)


def test_float_blocks_are_left_out_as_the_config_says():
    def fn(params, x):
        for name in ("layers_0", "layers_1", "layers_2"):
            x = jnp.tanh(x @ params[name]["mlp"]["w"])
        return x

    params = {f"layers_{i}": {"mlp": {"w": array(32, 32)}} for i in range(3)}
    config = CURRENT | {"float_first_blocks": 1}
    step, args, report, _ = gradient(fn, config, params, array(8, 32))
    found = jaxquant.coverage(step, *args, config=config)
    found.check()
    assert {row.reason for row in found.rows if row.path == "layers_0/mlp"} == {next(iter(report)).reason}
    with pytest.raises(ValueError, match=r"layers_0/mlp fwd: float is expected \(block layers_0, left in float"):
        jaxquant.coverage(gradient(fn, CURRENT, params, array(8, 32))[0], *args, config=config).check()
    with pytest.raises(ValueError, match=r"strict: layers_0/mlp fwd: float8_e4m3fn × float8_e4m3fn is expected"):
        jaxquant.coverage(step, *args, config=CURRENT).check()


def _as_int8(x):
    scale = jnp.max(jnp.abs(x)) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def _int8_dot(x, y):
    (x, x_scale), (y, y_scale) = _as_int8(x), _as_int8(y)
    return jnp.dot(x, y, preferred_element_type=jnp.int32) * (x_scale * y_scale)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.checkpoint], ids=["plain", "remat"])
def test_an_op_of_ones_own_is_no_fault_though_no_name_tells_its_gradients(wrap):
    op = jax.custom_vjp(_int8_dot)
    op.defvjp(
        lambda x, w: (_int8_dot(x, w), (x, w)), lambda kept, g: (_int8_dot(g, kept[1].T), _int8_dot(kept[0].T, g))
    )
    fn = wrap(lambda params, x: op(jnp.tanh(op(x, params["a"]["w"])), params["b"]["w"]))
    params = {name: {"w": array(32, 32)} for name in "ab"}
    found = jaxquant.coverage(jax.grad(lambda params, x: square(fn(params, x))), params, array(8, 32), config=INT8)
    found.check()
    assert all(row.is_low for row in found.rows)


# -- a whole step ------------------------------------------------------------------------------------------------------


class Pair(NnxChain):
    def __init__(self):
        super().__init__(32, up=64, down=1)

    def total(self, x):
        return self(x).sum()


X = array(8, 32)
ALL = {("up", "fwd"), ("up", "drhs"), ("down", "fwd"), ("down", "dlhs"), ("down", "drhs")}


@functools.cache
def pair():
    """Return a quantized model and its optimizer, both without arrays."""

    def make():
        model = jaxquant.maybe_quantize_model(Pair(), FP8, X)
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    return nnx.eval_shape(make)


def update(model, optimizer, x):
    """A step that returns only its loss."""
    value, grads = jaxquant.state.value_and_grad(lambda model: square(model(x)))(model)
    jaxquant.state.apply_gradients(model, optimizer, grads)
    return value


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: nnx.jit(nnx.remat(f))], ids=["plain", "remat"])
def test_an_nnx_step_that_returns_its_loss_is_read_whole(wrap):
    found = jaxquant.coverage(wrap(update), *pair(), X, config=FP8)
    found.check()
    assert {(row.path, row.matmul) for row in found.rows} == ALL
    assert isinstance(pair()[0].up.kernel.get_value(), jax.ShapeDtypeStruct)  # the model itself is unchanged


def test_an_nnx_step_without_quantization_that_only_updates():
    model = nnx.eval_shape(lambda: Pair())
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(Pair(), optax.sgd(1e-2), wrt=nnx.Param))

    @nnx.jit
    def step(both, *, x, is_training):
        model, optimizer = both
        optimizer.update(model, nnx.grad(lambda model: square(model(x)))(model))

    found = jaxquant.coverage(step, (model, optimizer), x=X, is_training=True)
    assert {(row.path, row.matmul) for row in found.rows} == ALL
    with pytest.raises(ValueError, match=r"strict: up fwd: float8_e4m3fn × float8_e4m3fn is expected"):
        jaxquant.coverage(step, (model, optimizer), x=X, is_training=True, config=FP8).check()


def test_a_model_a_method_and_a_partial_function_are_read():
    model, optimizer = pair()
    for found in (
        jaxquant.coverage(model, X, config=FP8),
        jaxquant.coverage(model.total, X, config=FP8),
        jaxquant.coverage(functools.partial(update, model, optimizer), X, config=FP8),
    ):
        found.check()
        assert {row.path for row in found.rows} == {"up", "down"}


def test_a_function_of_which_nothing_is_quantized_is_never_all_right():
    for function in (lambda p, x: x.sum(), lambda p, x: (x @ x.T).sum()):
        found = jaxquant.coverage(function, mlp_params(), array(8, 32), config=FP8)
        with pytest.raises(ValueError, match="the config quantizes nothing of this function"):
            found.check()
        jaxquant.coverage(function, mlp_params(), array(8, 32), config={}).check()


def test_the_table_has_shapes_and_says_where_what_has_no_path_was_asked_for():
    def scores(params, x):
        y = mlp(params, x)
        return y @ y.T

    text = str(jaxquant.coverage(scores, mlp_params(), array(8, 32)))
    assert re.search(r"\nup +8x32 · 32x64 +float", text)
    assert f"{Path(__file__).name}:" in text
    assert "scores)" in text
