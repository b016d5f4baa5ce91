"""Arguments in the wrong place: each is one error that names the argument, before anything else fails."""

from __future__ import annotations

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxquant
from jaxquant import state

OPTIMIZED = False
X = jax.random.normal(jax.random.key(0), (4, 8))
FP8 = {"quantization": "fp8", "amax_history_length": 4}
INT8 = {"quantization": "int8", "quant_backend": "native"}
PLAIN = nn.Dense(8)
MODEL: Any = jaxquant.maybe_quantize_model(PLAIN, FP8, X)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return every argument of the mistakes below, by name."""
    variables = MODEL.init(jax.random.key(1), X)
    params, quant_state = state.split(variables)
    observation = jax.grad(loss, argnums=1)(params, quant_state)
    float_variables = {"params": params}
    served = jaxquant.convert(PLAIN, float_variables, INT8, X)
    served8 = jaxquant.convert(PLAIN, state.merge(params, state.update(quant_state, observation)), FP8, X)
    places = (tmp_path_factory.mktemp("served") / str(number) for number in itertools.count())
    spoiled = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.inf), float_variables)
    nnx_model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return {**globals(), **locals()}


def loss(params: Any, quant_state: Any) -> jax.Array:
    return (MODEL.apply(state.merge(params, quant_state), X) ** 2).mean()


def serve() -> Any:
    return jaxquant.maybe_quantize_model(PLAIN, FP8 | {"checkpoint_is_quantized": True})


def swapped_step(params: Any, quant_state: Any) -> Any:
    return state.update(jax.grad(loss, argnums=1)(params, quant_state), quant_state)


CONVERTED = r"a converted parameter \(int8 .*checkpoint_is_quantized true"
NO_STATE = r"must come from init, jaxquant\.state\.split or a gradient, got (NoneType|list|tuple|Dense); for an NNX"
SWAPPED = r"quant_state and observation are swapped; .*update\(quant_state, observation\)"
PARTS = r"merge\(params, quant_state\) needs the two parts that .*split returns, got params \[.*; convert quant"
WHOLE = r"params must be the parameters, got a dict with 'params'; pass variables"
FLAX = {"PLAIN": "Dense", "nn.Dense": "Dense", "nnx_model": "Linear"}
FIRST = r"{0} takes a Flax module first: jaxquant.{0}\(model, variables, config, .* for NNX; got \("
WRONG_ORDER = ("float_variables, INT8, X, model=PLAIN", "PLAIN, INT8, float_variables, X", "nn.Dense, nnx_model")
MISTAKES = {
    "state.update(observation, quant_state)": SWAPPED,
    "jax.jit(swapped_step)(params, quant_state)": SWAPPED,
    "state.update(quant_state, None)": NO_STATE,
    "state.update(params, params)": r"structure that init returns, got ArrayImpl at 'bias'; .*from_flax",
    "state.update([quant_state], observation)": NO_STATE,
    "state.accumulate(quant_state, (observation,))": NO_STATE,
    **{f"state.{each}": NO_STATE for each in ("accumulate(None, observation)", "warm(None)", "warm(MODEL)")},
    "state.from_flax({}, quant_state)": "the checkpoint has no quant state '.*'; use the model that was saved",
    "state.split(MODEL)": "variables must be the dict of collections that model.init returns, got Dense",
    **{f"state.merge({each}, quant_state)": PARTS for each in ("variables", "float_variables")},
    **{f"state.merge({each})": PARTS for each in ("quant_state, params", "params, variables", "params, params")},
    "state.merge(params, [quant_state])": NO_STATE,
    "jaxquant.serving.save(next(places), served, INT8)": WHOLE,
    "jaxquant.serving.save(next(places), served['params'], {'quantization': 'int4w'})": "int8, .*produces int4",
    "jaxquant.serving.save(next(places), served['params'], {'quantization': ''})": "produces no quantized kernels",
    "jaxquant.calibrate(PLAIN, float_variables, FP8, X)": r"got ArrayImpl; pass \[x\] for one input x",
    "jaxquant.calibrate(PLAIN, params, FP8, [X])": "the variables to calibrate have no collection 'params'",
    "jaxquant.calibrate(MODEL, float_variables, FP8, [X])": "already quantized with .*pass the float model",
    **{f"jaxquant.quantize({x}, FP8)": f"got the Flax module {FLAX[x]}; .*maybe_quantize_model" for x in FLAX},
    "jaxquant.maybe_quantize_model(PLAIN, FP8, float_variables, X)": "The float model Dense raised this error w",
    "PLAIN.apply(served, X)": CONVERTED,
    "X @ jaxquant.quantize(lambda p, x: x @ p, INT8).convert(X.T, {}, X)": CONVERTED,
    "jax.grad(lambda v: serve().apply(v, X).sum())(served8)": "the root layer has a converted kernel, which does not",
    "jaxquant.maybe_quantize_model(PLAIN, {'quantize_kvcache': True})": "true has no effect in maybe_quantize_mode",
    "jaxquant.maybe_quantize_model(PLAIN, {'save_quantized_params_path': 'here'})": "'here' has no effect in maybe_q",
    "jaxquant.maybe_quantize_model(loss, INT8)": r"got function; for a function use jaxquant\.quantize$",
    "jaxquant.describe_layers(nn.Dense, INT8, X)": "got the class Dense; pass an instance of the",
    "jaxquant.describe_layers(loss, '', X)": r"got function; for a function use jaxquant\.quantize\(...\)\.report",
    "jaxquant.maybe_quantize_model(MODEL, INT8)": "Dense is already quantized with 'fp8'; pass the float model",
    "jaxquant.maybe_quantize_model(jaxquant.maybe_quantize_model(nnx_model, INT8), FP8)": "Linear is already quantized",
    "jaxquant.maybe_quantize_model(nnx_model, FP8)": "needs inputs; pass .*, because recipe 'fp8' needs quant state",
    "jaxquant.maybe_quantize_model(nnx.List([nnx_model]), FP8, X)": "List has no __call__; quantize the module",
    "jaxquant.convert(PLAIN, spoiled, {'quantization': 'fp8_current'}, X)": "has NaN or infinity in its kernel '",
    **{f"jaxquant.{f}({each})": FIRST.format(f) for f in ("convert", "calibrate") for each in WRONG_ORDER},
    "jaxquant.convert(nnx_model, INT8)": "Linear.__call__ needs inputs; pass example inputs$",
    "jaxquant.describe_layers(nnx_model, '', X[:, :3])": "The float model Linear raised this error with the example",
    "jaxquant.calibrate(PLAIN, float_variables, FP8, [])": "calibrate got no batch",
    "jaxquant.calibrate(PLAIN, float_variables, FP8, [X] * 5)": "more than 4 batches for amax_history_length 4",
    "jaxquant.health(loss, loss, X)": r"needs a Linen module or a result of jaxquant\.quantize, got function",
    "jaxquant.health(nn.LayerNorm(), loss, X)": "LayerNorm has no linear layer to measure",
    "jaxquant.health(jaxquant.quantize(lambda p: p, {}), loss, params)": "quantization is off",
    "jaxquant.coverage(3)": "coverage needs a function and its arguments, got int",
    "jaxquant.coverage(PLAIN, float_variables, X)": "needs a function and .*got Dense; pass model.apply",
    "jaxquant.coverage(PLAIN.apply, float_variables, X).check()": "^no matmul of this function is quantized",
    "state.apply_gradients(None, nnx_model, None)": "needs \\(model, optimizer, grads\\), got optimizer Linear",
    "jaxquant.TrainState": "no attribute 'TrainState'; use jaxquant.state.TrainState",
    "jaxquant.save": "; use jaxquant.serving.save",
}


def test_a_mistake_is_an_error_that_names_the_argument(given):
    for mistake, told in MISTAKES.items():
        with pytest.raises((TypeError, ValueError, AttributeError, NotImplementedError), match=told):
            eval(mistake, dict(given))


def test_params_may_have_names_that_quant_state_has(given):
    params = {"uses": jnp.ones(3), "params": jnp.ones(3), "scale": jnp.ones(3), "token_uses": jnp.ones(3)}
    optax.apply_updates(params, params)
    assert state.merge(params, {}) == {"params": params}
    quant_state = jaxquant.quantize(lambda v, x: x @ v["params"]["w"], FP8).init({"params": {"w": X.T}}, X)
    of_function = {"params": {"params": params}, state.OVERWRITE_WITH_GRADIENT: quant_state}
    assert state.merge(*state.split(of_function)) == of_function
    assert state.merge(params, given["quant_state"])["params"] is params


@pytest.mark.parametrize(("way", "tx"), [("jit", optax.adamw(1e-3)), ("scan", optax.MultiSteps(optax.adam(1e-3), 2))])
def test_optax_over_everything_is_an_error_at_the_first_step(way, tx, given):
    variables = state.merge(given["params"], given["quant_state"])

    def step(carried: Any, _: Any = None) -> Any:
        value, grads = jax.value_and_grad(lambda v: (MODEL.apply(v, X) ** 2).mean())(carried[0])
        updates, opt_state = tx.update(grads, carried[1], carried[0])
        return (optax.apply_updates(carried[0], updates), opt_state), value

    run = {"jit": jax.jit(step), "scan": lambda carried: jax.lax.scan(step, carried, None, 3)}[way]
    with pytest.raises(ValueError, match=r"updates quant state, such as '.*', .*jaxquant\.state\.split.*TrainState"):
        jax.eval_shape(run, (variables, tx.init(variables)))


def test_calibration_with_inputs_of_another_size_warns_at_conversion(given, recwarn):
    for size, warned in ((1.0, 0), (100.0, 2)):
        recwarn.clear()
        calibrated = jaxquant.calibrate(PLAIN, given["float_variables"], FP8, [size * X])
        jaxquant.convert(PLAIN, calibrated, FP8, X)
        jaxquant.convert(jaxquant.calibrate(given["nnx_model"], FP8, [size * X]), FP8, X.reshape(2, 2, 8))
        for example in (jax.ShapeDtypeStruct(X.shape, X.dtype), jnp.zeros_like(X)):  # of no size
            jaxquant.convert(PLAIN, calibrated, FP8, example)
        found = [each for each in recwarn if "an example input of largest magnitude" in str(each.message)]
        assert len(found) == warned


@pytest.mark.parametrize(("string", "backend"), [("aqt_fp8", "auto"), ("int8", "qwix"), ("int8", "native")])
def test_float64_operands_run(string, backend):
    with jax.enable_x64(True):
        model: Any = jaxquant.maybe_quantize_model(
            nn.Dense(8, dtype="float64"), {"quantization": string, "quant_backend": backend}
        )
        x = np.asarray(X, np.float64)
        assert model.apply(model.init(jax.random.key(1), x), x).dtype == "float64"
