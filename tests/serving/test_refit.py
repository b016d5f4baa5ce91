"""Refit: a compiled conversion, and the named tensors of an engine, have the bits of ``convert`` and of the file."""

import logging
import subprocess
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxquant
from jaxquant import convert, maybe_quantize_model
from jaxquant.config.recipes import RECIPES
from tests.serving import refit_worker
from tests.serving.models import filled
from tests.serving.trees import assert_same, raw_bytes

OPTIMIZED = True
D, RNGS = 16, {"params": jax.random.key(1), "quant": jax.random.key(2)}
X = jax.random.normal(jax.random.key(0), (2, D))
SLOW = ("ggml_q4_k", "ggml_q5_k", "ggml_q6_k")  # their encoders compile for 10 seconds
SERVED = [name for name in RECIPES if name not in ("", "intmp")]


@pytest.mark.parametrize(
    "string", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SERVED]
)
def test_a_compiled_conversion_of_linen_has_the_same_bits(string):
    model, config = nn.Dense(D), {"quantization": string}
    variables = filled(jax.eval_shape(maybe_quantize_model(model, config, X).init, RNGS, X))
    refit = jax.jit(lambda variables: convert(model, variables, config, X))
    assert_same(refit(variables), convert(model, variables, config, X))


@pytest.mark.parametrize("string", ["int8", "fp8", "nvfp4w"])
def test_a_compiled_conversion_of_nnx_and_of_a_function_has_the_same_bits(string):
    config = {"quantization": string}
    model = nnx.Linear(D, D, rngs=nnx.Rngs(0))
    model = jaxquant.calibrate(model, config, [X]) if string == "fp8" else maybe_quantize_model(model, config, X)
    convert_model = lambda model: convert(model, config, X)  # noqa: E731
    states = (nnx.state(run(model)) for run in (nnx.jit(convert_model), convert_model))
    found, expected = (jax.tree.map(raw_bytes, state) for state in states)
    assert found == expected
    quantized = jaxquant.quantize(lambda p, x: x @ p["w"], config)
    params = {"w": jax.random.normal(RNGS["params"], (D, D))}
    state = filled(jax.eval_shape(quantized.init, params, X))
    assert_same(jax.jit(quantized.convert)(params, state, X), quantized.convert(params, state, X))


def test_new_weights_compile_nothing_and_other_parameters_are_refused(caplog):
    variables, compiled = refit_worker.MODEL.init(RNGS, refit_worker.X), []
    refit = jax.jit(refit_worker.tensors)
    for factor in (1, 2):
        given = jax.tree.map(lambda x, factor=factor: factor * x, variables)
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            found = jax.block_until_ready(refit(given))
        compiled.append(len(caplog.records))
        assert (found["blk.0.bias"] == given["params"]["layers_0"]["bias"]).all()
    assert compiled[0] > 0 == compiled[1]
    params: Any = variables["params"]
    for name, leaf, message in (
        ("bias", None, "the variables have no parameter 'layers_0/bias'; pass all"),
        ("kernel", jnp.ones((D, D)), r"'layers_0/kernel' has shape \(16, 16\), but the model needs \(256, 128\)"),
    ):
        layer = {key: value for key, value in (params["layers_0"] | {name: leaf}).items() if value is not None}
        with pytest.raises(ValueError, match=message):
            refit({"params": params | {"layers_0": layer}})


@pytest.mark.slow
def test_tensors_stay_on_eight_devices_and_move_to_others():
    subprocess.run([sys.executable, "-m", "tests.serving.refit_worker"], check=True)
