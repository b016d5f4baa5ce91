"""native compared with AQT and Qwix: the same qvalues and scales bit for bit, outputs within a last-bit tolerance.

Known differences:
- The last bit of an output, in the product with the scales: AQT and Qwix multiply the matmul's result by one scale and
  then by the other. We do the same for per-channel scales, but multiply two per-tensor scales with each other first.
- Qwix's integers at the largest magnitude, if it is negative: −bound rounds to −128 (int8) or −8 (int4) in Qwix, and to
  -127 or -7 in AQT and jaxquant, where the grid is symmetric.
- Weights: native weights keep their grid (``TensorSpec.keeps_grid``), so they are compared without this option.
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from jaxquant import QuantConfig, maybe_quantize_model
from jaxquant.backends.aqt_config import to_aqt
from jaxquant.config.recipes import RECIPES
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec
from tests import numerics

X = jax.random.normal(jax.random.key(0), (24, 48)) * jnp.logspace(-2, 2, 24)[:, None]
W = jax.random.normal(jax.random.key(1), (48, 16)) * jnp.logspace(-2, 2, 16)


@pytest.mark.parametrize(("side", "x", "axis"), [("lhs", X, 1), ("rhs", W, 0)])
def test_int8_has_aqts_qvalues_and_scales(side, x, axis):
    recipe = QuantConfig(quantization="int8").recipe()
    spec = dataclasses.replace(getattr(recipe.fwd, side), keeps_grid=False)
    quantizer = getattr(to_aqt(recipe).fwd.dg_quantizer, side)

    @jax.jit
    def theirs(x):
        quantizer.init_calibration()
        tensor, _ = quantizer.quant(x, calibration_axes=[axis])
        return tensor.qvalue, tensor.scale[0]

    ours = jax.jit(lambda v: quantize(v, spec, (axis,)))(x)
    qvalue, scale = theirs(x)
    np.testing.assert_array_equal(ours.qvalue, qvalue)
    np.testing.assert_array_equal(ours.scale, scale)


@pytest.mark.parametrize("bound", ["fixed,224", "fixed,3"])
@pytest.mark.parametrize("x", [X, W])
def test_fp8_full_has_qwixs_qvalues_and_scales(bound, x):
    options = {f"{name}_quantization_calibration_method": bound for name in ("weight", "act")}
    spec = QuantConfig(quantization="fp8_full", quant_backend="native", **options).recipe().fwd.lhs
    assert isinstance(spec, TensorSpec)
    theirs = jax.jit(lambda v: qwix.quantize(v, jnp.float8_e4m3fn, calibration_method=bound))(x)
    ours = jax.jit(lambda v: quantize(v, spec, (1,)))(x)
    np.testing.assert_array_equal(ours.qvalue.astype(jnp.float32), theirs.qvalue.astype(jnp.float32))
    np.testing.assert_array_equal(ours.scale, theirs.scale)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_are_qwixs_but_at_a_negative_extreme(dtype):
    theirs = jax.jit(lambda v: qwix.quantize(v, getattr(jnp, dtype), channelwise_axes=(0,)))(X)
    ours = jax.jit(lambda v: quantize(v, TensorSpec(dtype), (1,)))(X)
    np.testing.assert_array_equal(ours.scale, theirs.scale)
    differs = ours.qvalue != theirs.qvalue
    top = 2 ** (8 if dtype == "int8" else 4) // 2
    assert differs.any()
    assert (theirs.qvalue[differs] == -top).all()
    assert (ours.qvalue[differs] == 1 - top).all()


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.DenseGeneral(16, name="second")(nn.silu(nn.Dense(32, name="first")(x)))


FIXED = {f"{name}_quantization_calibration_method": "fixed,224" for name in ("weight", "act")}


@pytest.mark.parametrize(
    ("string", "backend", "options"),
    [("int8", "aqt", {}), ("aqt_fp8", "aqt", {}), ("fp8_full", "qwix", FIXED), ("fp8_e4m3", "qwix", {})],
)
def test_outputs_and_gradients_of_a_model(string, backend, options, monkeypatch):
    row = RECIPES[string]
    weight = dataclasses.replace(row.recipe.fwd.rhs, keeps_grid=False)
    recipe = dataclasses.replace(row.recipe, fwd=dataclasses.replace(row.recipe.fwd, rhs=weight))
    monkeypatch.setitem(RECIPES, string, dataclasses.replace(row, recipe=recipe))
    x = jax.random.normal(jax.random.key(2), (3, 8, 24))
    variables = jax.jit(Model().init)(jax.random.key(3), x)
    results = []
    for each in (backend, "native"):
        model = maybe_quantize_model(Model(), {"quantization": string, "quant_backend": each, **options}, x)

        def run(variables, model=model):
            return model.apply(variables, x, rngs={"quant": jax.random.key(4)})

        out, pull = jax.vjp(jax.jit(run), variables)
        results.append((out, *pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape) / 8)))
    theirs, ours = results
    scale = float(jnp.abs(theirs[0]).max())
    assert float(jnp.abs(theirs[0] - ours[0]).max()) <= numerics.TWIN_OUTPUT[string] * scale
    for (path, a), b in zip(jax.tree.leaves_with_path(theirs[1]), jax.tree.leaves(ours[1]), strict=True):
        difference = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a))
        assert difference <= numerics.TWIN_GRADIENT[string], jax.tree_util.keystr(path)
