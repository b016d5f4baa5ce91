"""Compositions in whole models: Linen, NNX and plain functions train, report, convert and serve them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant
from jaxquant import convert, coverage, maybe_quantize_model
from jaxquant.config.quant_config import QuantConfig
from jaxquant.serving import load, save
from tests.serving.models import D, Linen, filled

WITH_STATE = {"fwd": "fp8", "dlhs": "fp8", "drhs": "fp8_block"}
X = jax.random.normal(jax.random.key(0), (2, 5, D))
RNGS = {"params": jax.random.key(1), "quant": jax.random.key(2)}
SERVES = {"checkpoint_is_quantized": True}


def test_linen_serves_its_training_forward_from_disk(tmp_path):
    model, config = Linen(jnp.bfloat16), {"quantization": WITH_STATE}
    x = X.astype(jnp.bfloat16)
    quantized = maybe_quantize_model(model, config, x)
    variables = filled(jax.eval_shape(quantized.init, RNGS, x))
    expected = jax.jit(lambda v: quantized.apply(v, x, rngs={"quant": jax.random.key(3)}))(variables)
    by_row = maybe_quantize_model(model, WITH_STATE["fwd"], x)
    np.testing.assert_array_equal(expected, jax.jit(by_row.apply)(variables, x))
    converted = convert(variables, config, x, model=model)
    save(tmp_path / "served", converted["params"], config)
    loaded = load(tmp_path / "served")
    assert QuantConfig.from_any(loaded.config) == QuantConfig.from_any(config)
    served = jax.jit(maybe_quantize_model(model, dict(loaded.config) | SERVES, x).apply)({"params": loaded.params}, x)
    np.testing.assert_array_equal(expected, served)


def apply(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def test_coverage_and_report_name_the_composition_and_its_dtypes():
    params = {"up": jnp.ones((64, 128)), "down": jnp.ones((128, 32))}
    composition, text = {"fwd": "fp8_current", "dlhs": "int8"}, "{fwd: fp8_current, dlhs: int8, drhs: null}"
    config = {"quantization": composition, "rules": [{"path": "down", "recipe": composition}]}
    quantized = jaxquant.quantize(apply, config)
    x = jnp.ones((128, 64))
    assert {row.path: row.recipe for row in quantized.report(params, x)} == {"up": text, "down": text}
    step = jax.grad(lambda p, x: jnp.sum(quantized(p, {}, x).astype(jnp.float32) ** 2), (0, 1))
    found = coverage(step, params, x, config=config)
    found.check()
    assert {row.matmul: (str(row.dtypes.lhs), str(row.dtypes.rhs)) for row in found.rows if row.path == "up"} == {
        "fwd": ("float8_e4m3fn", "float8_e4m3fn"),
        "dlhs": ("int8", "int8"),
        "drhs": ("float32", "float32"),
    }
    assert text in found.text()
