"""dot_general: the three matmuls of every recipe compared with numpy, and further properties of a call."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from jaxquant.config.recipes import RECIPES
from jaxquant.core.calibration import parse_calibration
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, TensorSpec
from jaxquant.ops import dot_general, initial_state
from jaxquant.ops.contract import contract
from jaxquant.ops.dimensions import Dimensions
from tests import numerics, reference
from tests.lowering import dot_operand_types, equations
from tests.ops.recipes import nearest

M, K, N = 24, 32, 16
NUMBERS = (((1,), (0,)), ((), ()))
DISTINCT = {row.recipe.name: row.recipe for row in RECIPES.values() if row.recipe is not None}


def operands(seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (M, K)) * jnp.logspace(-1, 1, M)[:, None]
    w = jax.random.normal(keys[1], (K, N)) * jnp.logspace(-1, 1, N)
    return x.astype(dtype), w.astype(dtype), jax.random.normal(keys[2], (M, N)).astype(dtype)


def run(recipe, x, w, grad, **kwargs):
    state = initial_state(recipe)
    out, pull = jax.vjp(lambda a, b, s: dot_general(a, b, NUMBERS, recipe=recipe, state=s, **kwargs), x, w, state)
    return (out, *pull(grad.astype(out.dtype)))


def quantized(x, spec: TensorSpec | None, axis: int):
    """Return qvalues and scale in numpy; float operands have scale 1."""
    if spec is None:
        return np.asarray(x, np.float64), np.ones((1, 1))
    if spec.codec is not None:
        return reference.through_gguf(x, spec.codec, axis), np.ones((1, 1))
    if spec.tile_size is not None:
        block = tuple(spec.tile_size if i == axis else spec.free_size or 1 for i in range(2))
        is_power = spec.scale_dtype == "float8_e8m0fnu"
        return reference.quantize_blocks(x, spec.dtype, block, is_power)
    if spec.scaling == "delayed":  # divided by the element's largest number; dynamic scales of integers use the bound
        scale = np.abs(x).max(keepdims=True).astype(np.float32) * np.float32(1 / element(spec.dtype).max)
        return reference.cast(np.asarray(x, np.float32) / scale, spec.dtype), scale
    axis = None if spec.granularity == "per_tensor" else axis
    return reference.quantize(x, spec.dtype, axis, spec.reciprocal, spec.has_grid_scale)


def gradient(matmul_grad, matmul_kept, grad, kept, kept_forward, axis):
    """Contract ``grad`` with an operand over their common axis ``axis``; return both factors, [rows, axis]."""
    if matmul_kept == FORWARD:
        qvalue, scale = kept_forward
        if matmul_grad is None:
            return np.asarray(grad, np.float64), qvalue * scale
        if scale.shape[axis] > 1 and 1 in scale.shape:  # a per-channel forward scale multiplies the gradient
            grad, scale = (grad * np.moveaxis(scale, axis, 1 if axis == 1 else 0).astype(np.float32)), np.ones((1, 1))
    else:
        qvalue, scale = quantized(kept, matmul_kept, axis)
    q_grad, grad_scale = quantized(grad, matmul_grad, axis)
    return q_grad * grad_scale.astype(np.float64), qvalue * scale.astype(np.float64)


# core/test_micro.py and trace/test_converted.py test NVFP4.
SIMPLE = [name for name, each in DISTINCT.items() if not getattr(each.fwd.rhs, "outer_scale", 0)]


@pytest.mark.parametrize("name", [name for name in SIMPLE if name not in ("ggml_q8_0", "ggml_q5_k", "ggml_q6_k")])
def test_three_matmuls_are_those_of_plain_numpy(name):
    recipe = nearest(DISTINCT[name])
    check_three_matmuls(recipe, *(np.asarray(a) for a in operands()))


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "mxfp4"])
def test_blocks_that_do_not_divide_are_those_of_plain_numpy(name):
    """Tokens, contraction and outputs end in a smaller block, which has a separate scale."""
    m, k, n = (300, 200, 150) if name == "fp8_block" else (70, 80, 50)
    # With this seed, no quotient is within a last bit of a rounding boundary; XLA's division may differ in that bit.
    keys = jax.random.split(jax.random.key(7), 3)
    x = jax.random.normal(keys[0], (m, k)) * jnp.logspace(-2, 2, k)
    w = jax.random.normal(keys[1], (k, n)) * jnp.logspace(-2, 2, n)
    check_three_matmuls(DISTINCT[name], *(np.asarray(a) for a in (x, w, jax.random.normal(keys[2], (m, n)))))


def check_three_matmuls(recipe, x, w, grad):
    out, dx, dw, _ = run(recipe, *map(jnp.asarray, (x, w, grad)))
    q_x, q_w = quantized(x, recipe.fwd.lhs, 1), quantized(w, recipe.fwd.rhs, 0)
    left, right = q_x[0] * q_x[1].astype(np.float64), q_w[0] * q_w[1].astype(np.float64)
    g_x, kept_w = gradient(recipe.dlhs.lhs, recipe.dlhs.rhs, grad, w, q_w, 1)
    g_w, kept_x = gradient(recipe.drhs.rhs, recipe.drhs.lhs, grad, x, q_x, 0)
    for result, a, b, matmul in (
        (out, left, right, recipe.fwd),
        (dx, g_x, kept_w.T, recipe.dlhs),
        (dw, kept_x.T, g_w, recipe.drhs),
    ):
        eps = numerics.BFLOAT16_EPS if matmul.accumulator == "bfloat16" else numerics.FLOAT32_EPS
        assert np.all(np.abs(np.asarray(result, np.float64) - a @ b) <= numerics.dot_bound(a, b, eps))


@pytest.mark.parametrize("name", ["int8", "int4w"])
def test_batch_dimensions_are_independent_matmuls(name):
    recipe = nearest(DISTINCT[name])
    x, w = jax.random.normal(jax.random.key(0), (3, M, K)), jax.random.normal(jax.random.key(1), (K, 3, N))
    numbers = (((2,), (0,)), ((0,), (1,)))
    out, pull = jax.vjp(lambda a, b: dot_general(a, b, numbers, recipe=recipe), x, w)
    dx, dw = pull(out)
    for i in range(3):
        one = run(recipe, x[i], w[:, i], out[i])
        for ours, theirs in zip((out[i], dx[i], dw[:, i]), one[:3], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("spelled", "name"), [("i32", "int8"), ("bf16", "aqt_fp8"), ("f32", "fp8_current")])
def test_the_accumulator_and_the_precision_are_asked_of_the_matmul(spelled, name):
    x, w, _ = operands()
    product = jax.jit(lambda a, b: dot_general(a, b, NUMBERS, ("highest", "default"), recipe=DISTINCT[name]))
    text = product.lower(x, w).as_text()
    assert [kinds[2] for kinds in dot_operand_types(text)] == [spelled]
    assert name == "int8" or "precision = [HIGHEST, DEFAULT]" in text


def on_absent_devices(platform, devices):
    """Return an activation with rows sharded over devices that are not attached, and a replicated weight."""
    chip = AbstractDevice(device_kind=platform, num_cores=1, platform=platform)
    mesh = AbstractMesh((devices,), ("x",), abstract_device=chip)
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16, sharding=rows)
    w = jax.ShapeDtypeStruct((K, N), jnp.bfloat16, sharding=whole)
    return x, w


@pytest.mark.parametrize(("platform", "name", "shards"), [("tpu", "int8_delayed", 1), ("gpu", "int8", 2)])
def test_sums_of_integers_are_scaled_before_devices_add_them_in_the_gradients_dtype(platform, name, shards):
    recipe = DISTINCT[name]
    recipe = dataclasses.replace(recipe, drhs=dataclasses.replace(recipe.drhs, shards=shards))
    product = lambda x, w: dot_general(x, w, NUMBERS, recipe=recipe, state=initial_state(recipe)).sum()  # noqa: E731
    shape = rf"(?:{N},{K}|{K},{N})"
    for devices in (1, 2):
        text = str(jax.jit(jax.grad(product, 1)).trace(*on_absent_devices(platform, devices)).jaxpr)
        parts = max(devices, shards)
        summed = re.findall(rf"(\w+)\[{f'{parts}(?:@x)?,' if parts > 1 else ''}{shape}\] = dot_general", text)
        assert summed == ["i32"]
        added = {1: "f32", 2: "bf16"}[devices]  # one device does not communicate
        assert re.findall(rf"(\w+)\[{shape}\] = reduce_sum", text) == ([added] if parts > 1 else [])


@pytest.mark.parametrize("text", ["fixed,1", "absmax,0.5", "rms,1"])
def test_values_beyond_a_clipping_range_get_no_gradient(text):
    calibration, grad_spec = parse_calibration(text), TensorSpec("float8_e5m2")
    spec = TensorSpec("float8_e4m3fn", "per_tensor" if text == "fixed,1" else "per_channel", calibration)
    recipe = Recipe("clipped", MatmulSpec(spec, spec), MatmulSpec(grad_spec, FORWARD), MatmulSpec(FORWARD, grad_spec))
    x, w, grad = operands()
    _, dx, dw, _ = run(recipe, x, w, grad)
    for values, axis, ours in ((x, 1, dx), (w, 0, dw)):
        bound = {
            "fixed,1": 1.0,
            "absmax,0.5": 0.5 * jnp.abs(values).max(axis, keepdims=True),
            "rms,1": jnp.sqrt((values**2).mean(axis, keepdims=True)),
        }[text]
        outside = jnp.abs(values) > bound
        assert 0 < int(outside.sum()) < outside.size
        assert not ours[outside].any()
        assert (ours[~outside] != 0).mean() > 0.95  # a zero in the middle is a zero of the quantized gradient


@pytest.mark.parametrize("text", ["minmax", "fixed,-3,2"])
def test_zero_points_in_all_three_matmuls(text):
    calibration = parse_calibration(text)
    granularity = "per_tensor" if calibration.method == "fixed" else "per_channel"
    spec = TensorSpec("int8", granularity, calibration)
    recipe = Recipe(
        "asymmetric",
        MatmulSpec(spec, spec, "int32"),
        MatmulSpec(TensorSpec("int8"), FORWARD, "int32"),
        MatmulSpec(FORWARD, TensorSpec("int8"), "int32"),
    )
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = (jax.random.uniform(k, s, minval=-2.9, maxval=1.9) for k, s in zip(keys, ((M, K), (K, N)), strict=False))
    grad = jax.random.normal(keys[2], (M, N))
    out, dx, dw, _ = run(recipe, x, w, grad)
    for ours, exact in ((out, x @ w), (dx, grad @ w.T), (dw, x.T @ grad)):
        # The int8 step is 4.9 / 255 = 0.019; the error of a wrong zero point is many times 2 % of the mean magnitude.
        assert float(jnp.abs(ours - exact).mean() / jnp.abs(exact).mean()) < 0.02


def test_shards_of_the_weight_gradient_are_quantized_by_themselves():
    """With n shards, larger rows in one shard do not change the error of the other shards."""
    x, w, grad = operands()
    grad, whole = grad.at[M // 2 :].multiply(1000.0), nearest(DISTINCT["int8"])
    sharded = dataclasses.replace(whole, drhs=dataclasses.replace(whole.drhs, shards=2))
    halves = grad.at[M // 2 :].set(0.0), grad.at[: M // 2].set(0.0)
    apart = sum(run(whole, x, w, half)[2] for half in halves)
    atol = 1e-6 * float(jnp.abs(x.T @ grad).max())
    np.testing.assert_allclose(run(sharded, x, w, grad)[2], apart, atol=atol)
    assert not np.allclose(run(whole, x, w, grad)[2], apart, atol=atol)


def over_keys(recipe, count, x, w, grad):
    """Return outputs and gradients for a number of keys, computed in one program."""
    return jax.jit(lambda keys: jax.lax.map(lambda key: run(recipe, x, w, grad, key=key), keys))(
        jax.random.split(jax.random.key(0), count)
    )


def test_stochastic_rounding_touches_the_gradient_only_and_is_unbiased():
    x, w, grad = operands()
    found = over_keys(DISTINCT["int8"], 64, x, w, grad)
    assert [bool((each != each[0]).any()) for each in found[:3]] == [False, True, True]
    q_x, q_w = (reference.quantize(np.asarray(v), "int8", axis, True, axis == 0) for v, axis in ((x, 1), (w, 0)))
    for draws, exact in zip(found[1:3], (grad @ (q_w[0] * q_w[1]).T, (q_x[0] * q_x[1]).T @ grad), strict=True):
        # The mean of 64 runs has 1/8 of one run's noise. It also has a bias: the bound is 127.5, so the largest element
        # of each sum always rounds to 127, an error of 0.5 in 16 terms, compared with a noise of sqrt(16 / 6) = 1.6.
        # Rounding to nearest would keep sqrt(16 / 12) / 1.6 = 0.7 of the error in the mean of any number of runs.
        assert jnp.abs(draws.mean(0) - exact).mean() < 0.5 * jnp.abs(draws - exact).mean()


def test_stochastic_rounding_of_a_forward_operand():
    """Without a key, the noise is computed from the operands."""
    spec = TensorSpec("int4", rounding="stochastic")
    recipe = Recipe("noisy", MatmulSpec(spec, spec, "int32"), MatmulSpec(None, FORWARD), MatmulSpec(FORWARD, None))
    x, w, grad = operands()
    first, again, other = (run(recipe, x * size, w, grad)[0] for size in (1, 1, 1 + 1e-6))
    np.testing.assert_array_equal(first, again)
    assert (other != first).any()
    keyed = over_keys(recipe, 48, x, w, grad)[0]
    assert jnp.abs(keyed.mean(0) - x @ w).mean() < 0.5 * jnp.abs(keyed[0] - x @ w).mean()


# -- arithmetic of blocks, and of weights with float activations ------------------------------------------------------

LONE = {
    "int8w": TensorSpec("int8"),
    "int4 tiles": TensorSpec("int4", "per_tile", tile_size=32),
    "fp8": TensorSpec("float8_e4m3fn"),
    "nvfp4": RECIPES["quartet2"].recipe.fwd.rhs,
}


def tilted(dtype):
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (64, 256)) * jnp.logspace(-3, 3, 256)
    return x.astype(dtype), (jax.random.normal(keys[1], (256, 64)) * jnp.logspace(-3, 3, 64)).astype(dtype)


def test_blocks_with_float32_scales_lose_a_bfloat16_rounding_and_no_more():
    """README states this about ``fp8_block`` in a bfloat16 model; a float32 model loses nothing."""
    recipe, (x, w), dims = DISTINCT["fp8_block"], tilted("float32"), Dimensions((1,), (0,), (), (), 2, 2)
    left, right = quantize(x, recipe.fwd.lhs, (1,)), quantize(w, recipe.fwd.rhs, (0,))
    expected = np.asarray(dequantize(left), np.float64) @ np.asarray(dequantize(right), np.float64)
    for out_dtype, most in (("bfloat16", 4e-3), ("float32", 1e-6)):
        found = contract(left, right, dims, out_dtype=out_dtype, accumulator="float32")
        assert np.linalg.norm(np.asarray(found, np.float64) - expected) <= most * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4"])
def test_no_step_of_a_block_recipe_holds_a_result_a_tile(name):
    product = lambda *sides: dot_general(*sides, NUMBERS, recipe=DISTINCT[name]).astype("float32").sum()  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(product, (0, 1)))(*tilted("bfloat16")).jaxpr
    assert max(variable.aval.size for eqn in equations(jaxpr) for variable in eqn.outvars) <= 64 * 256 * 1.01


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in LONE), ("int4 tiles", "float32")])
def test_a_served_row_has_the_bits_of_a_trained_one(name, dtype, monkeypatch):
    """The number of rows does not matter: one, up to half a tile, or more. A single row may be padded to two rows."""
    (x, w), spec = tilted(dtype), LONE[name]
    recipe = Recipe("lone", fwd=MatmulSpec(None, spec), dlhs=MatmulSpec(None, FORWARD))
    kernel = jax.jit(lambda w: quantize(w, spec, (0,)).astype(dtype))(w)
    product = jax.jit(lambda x, w: dot_general(x, w, NUMBERS, recipe=recipe))
    for is_padded in (False, True):
        for rows in (1,) if is_padded else (0, 1, 8, 64):
            np.testing.assert_array_equal(product(x[:rows], kernel), product(x[:rows], w))
        jax.clear_caches()
        monkeypatch.setattr("jaxquant.ops.contract.SMALL", 0)
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *given, cpu, default: default(*given))
