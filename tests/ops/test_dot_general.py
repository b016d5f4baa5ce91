"""dot_general: the three matmuls of every recipe against plain numpy, and what a call promises beside them."""

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
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, TensorSpec
from jaxquant.ops import dot_general, initial_state
from tests import numerics, reference
from tests.lowering import dot_operand_types
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
    """qvalues and scale in numpy; float operands have scale 1."""
    if spec is None:
        return np.asarray(x, np.float64), np.ones((1, 1))
    if spec.codec is not None:
        return reference.through_gguf(x, spec.codec, axis), np.ones((1, 1))
    if spec.tile_size is not None:
        block = tuple(spec.tile_size if i == axis else spec.free_size or 1 for i in range(2))
        is_power = spec.scale_dtype == "float8_e8m0fnu"
        return reference.quantize_blocks(x, spec.dtype, block, is_power)
    if spec.scaling == "delayed":  # by the element's largest number, where this step's amax takes an integer's bound
        scale = np.abs(x).max(keepdims=True).astype(np.float32) * np.float32(1 / element(spec.dtype).max)
        return reference.cast(np.asarray(x, np.float32) / scale, spec.dtype), scale
    axis = None if spec.granularity == "per_tensor" else axis
    return reference.quantize(x, spec.dtype, axis, spec.reciprocal, spec.has_grid_scale)


def gradient(matmul_grad, matmul_kept, grad, kept, kept_forward, axis):
    """Contract ``grad`` with an operand over their common axis ``axis``; returns both factors, [rows, axis]."""
    if matmul_kept == FORWARD:
        qvalue, scale = kept_forward
        if matmul_grad is None:
            return np.asarray(grad, np.float64), qvalue * scale
        if scale.shape[axis] > 1 and 1 in scale.shape:  # per channel in the forward: goes into the gradient
            grad, scale = (grad * np.moveaxis(scale, axis, 1 if axis == 1 else 0).astype(np.float32)), np.ones((1, 1))
    else:
        qvalue, scale = quantized(kept, matmul_kept, axis)
    q_grad, grad_scale = quantized(grad, matmul_grad, axis)
    return q_grad * grad_scale.astype(np.float64), qvalue * scale.astype(np.float64)


# NVFP4's are in core/test_micro.py, core/test_casts.py and trace/test_converted.py.
@pytest.mark.parametrize(
    "name", [name for name, each in DISTINCT.items() if not getattr(each.fwd.rhs, "outer_scale", 0)]
)
def test_three_matmuls_are_those_of_plain_numpy(name):
    recipe = nearest(DISTINCT[name])
    check_three_matmuls(recipe, *(np.asarray(a) for a in operands()))


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "mxfp4"])
def test_blocks_that_do_not_divide_are_those_of_plain_numpy(name):
    """Tokens, contraction and outputs all end in a smaller block, with a scale of its own."""
    m, k, n = (300, 200, 150) if name == "fp8_block" else (70, 80, 50)
    # A seed of which no quotient lies within a last bit of a rounding boundary: XLA's division may differ in that bit.
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


@pytest.mark.parametrize("name", ["int8", "fp8", "int4w"])
def test_batch_dimensions_are_independent_matmuls(name):
    recipe = nearest(DISTINCT[name])
    x, w = jax.random.normal(jax.random.key(0), (3, M, K)), jax.random.normal(jax.random.key(1), (K, 3, N))
    per_tensor = any(isinstance(s, TensorSpec) and s.granularity == "per_tensor" for s in recipe.specs.values())
    numbers = (((2,), (0,)), ((0,), (1,)))
    out, pull = jax.vjp(lambda a, b: dot_general(a, b, numbers, recipe=recipe, state=initial_state(recipe)), x, w)
    dx, dw = pull(out)
    assert out.shape == (3, M, N)
    assert dx.shape == x.shape
    assert dw.shape == w.shape
    for i in range(3):
        if per_tensor:  # a scale of the whole tensor ties the batch together; only the size of the error is known
            np.testing.assert_allclose(out[i], x[i] @ w[:, i], atol=0.2 * float(jnp.abs(x[i] @ w[:, i]).max()))
            continue
        one, one_dx, one_dw, _ = run(recipe, x[i], w[:, i], out[i])
        np.testing.assert_allclose(out[i], one, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(dx[i], one_dx, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dw[:, i], one_dw, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("accumulator", "name"), [("int32", "int8"), ("bfloat16", "aqt_fp8"), ("float32", "fp8_current")]
)
def test_the_accumulator_is_asked_of_the_matmul(accumulator, name):
    x, w, _ = operands()
    recipe = DISTINCT[name]
    text = jax.jit(lambda a, b: dot_general(a, b, NUMBERS, recipe=recipe)).lower(x, w).as_text()
    spelled = {"int32": "i32", "bfloat16": "bf16", "float32": "f32"}[accumulator]
    assert [kinds[2] for kinds in dot_operand_types(text)] == [spelled]


def on_absent_devices(platform, devices):
    """An activation whose rows are cut over devices that are not here, and a whole weight."""
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
        added = {1: "f32", 2: "bf16"}[devices]  # one device sends nothing
        assert re.findall(rf"(\w+)\[{shape}\] = reduce_sum", text) == ([added] if parts > 1 else [])


def test_precision_reaches_the_matmul():
    x, w, _ = operands()
    run_at = lambda p: jax.jit(lambda a, b: dot_general(a, b, NUMBERS, p, recipe=DISTINCT["fp8_current"])).lower(x, w)  # noqa: E731
    assert "precision = [HIGHEST, HIGHEST]" in run_at("highest").as_text()
    assert "precision = [DEFAULT, DEFAULT]" in run_at(None).as_text()
    assert "precision = [HIGHEST, DEFAULT]" in run_at(("highest", "default")).as_text()


@pytest.mark.parametrize("text", ["fixed,1", "absmax,0.5", "rms,1"])
def test_values_beyond_a_clipping_range_get_no_gradient(text):
    calibration = parse_calibration(text)
    granularity = "per_tensor" if calibration.method == "fixed" else "per_channel"
    spec = TensorSpec("float8_e4m3fn", granularity, calibration)
    grad_spec = TensorSpec("float8_e5m2")
    recipe = Recipe("clipped", MatmulSpec(spec, spec), MatmulSpec(grad_spec, FORWARD), MatmulSpec(FORWARD, grad_spec))
    x, w, grad = operands()
    _, dx, dw, _ = run(recipe, x, w, grad)
    plain = dataclasses.replace(spec, calibration=parse_calibration("absmax"), granularity="per_channel")
    open_recipe = Recipe("open", MatmulSpec(plain, plain), recipe.dlhs, recipe.drhs)
    _, open_dx, open_dw, _ = run(open_recipe, x, w, grad)
    for values, axis, ours, free in ((x, 1, dx, open_dx), (w, 0, dw, open_dw)):
        bound = {
            "fixed,1": 1.0,
            "absmax,0.5": 0.5 * jnp.abs(values).max(axis, keepdims=True),
            "rms,1": jnp.sqrt((values**2).mean(axis, keepdims=True)),
        }[text]
        outside = jnp.abs(values) > bound
        assert 0 < int(outside.sum()) < outside.size
        assert not ours[outside].any()
        assert (ours[~outside] != 0).mean() > 0.95  # a zero inside is a zero of the quantized gradient
        assert (free != 0).mean() > 0.95


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
        # The int8 step is 4.9 / 255 = 0.019; a wrong zero point is off by many times 2 % of the mean magnitude.
        assert float(jnp.abs(ours - exact).mean() / jnp.abs(exact).mean()) < 0.02


def test_shards_of_the_weight_gradient_are_quantized_by_themselves():
    """With n shards, scaling the rows of one shard up leaves the error of the others as it was."""
    x, w, grad = operands()
    grad = grad.at[M // 2 :].multiply(1000.0)
    exact = x.T @ grad
    sharded = dataclasses.replace(
        nearest(DISTINCT["int8"]), drhs=dataclasses.replace(nearest(DISTINCT["int8"]).drhs, shards=2)
    )
    silent = grad.at[M // 2 :].set(0.0)
    shard_error = run(sharded, x, w, grad)[2] - exact
    rest = grad.at[: M // 2].set(0.0)
    apart = run(nearest(DISTINCT["int8"]), x, w, silent)[2] + run(nearest(DISTINCT["int8"]), x, w, rest)[2] - exact
    np.testing.assert_allclose(shard_error, apart, atol=1e-6 * float(jnp.abs(exact).max()))
    whole_error = run(nearest(DISTINCT["int8"]), x, w, grad)[2] - exact
    assert not np.allclose(whole_error, apart, atol=1e-6 * float(jnp.abs(exact).max()))


def test_stochastic_rounding_touches_the_gradient_only_and_is_unbiased():
    recipe = DISTINCT["int8"]
    x, w, grad = operands()
    runs = [run(recipe, x, w, grad, key=jax.random.key(i)) for i in range(64)]
    assert all((r[0] == runs[0][0]).all() for r in runs)
    assert any((r[1] != runs[0][1]).any() for r in runs)
    assert any((r[2] != runs[0][2]).any() for r in runs)
    q_x, q_w = (reference.quantize(np.asarray(v), "int8", axis, True, axis == 0) for v, axis in ((x, 1), (w, 0)))
    for index, exact in ((1, grad @ (q_w[0] * q_w[1]).T), (2, (q_x[0] * q_x[1]).T @ grad)):
        single = jnp.stack([jnp.abs(r[index] - exact).mean() for r in runs]).mean()
        mean = jnp.abs(jnp.stack([r[index] for r in runs]).mean(0) - exact).mean()
        # The mean of 64 has 1/8 of one run's noise, and the bias of the largest element of each sum, which the bound
        # of 127.5 lets round to 127 only: 0.5 in 16 terms, against a noise of sqrt(16 / 6) = 1.6. Rounding to nearest
        # would keep sqrt(16 / 12) / 1.6 = 0.7 of the error however often it is repeated.
        assert float(mean) < 0.5 * float(single)


def test_stochastic_rounding_of_a_forward_operand():
    """Without a key the noise follows the operands."""
    spec = TensorSpec("int4", rounding="stochastic")
    recipe = Recipe("noisy", MatmulSpec(spec, spec, "int32"), MatmulSpec(None, FORWARD), MatmulSpec(FORWARD, None))
    x, w, grad = operands()
    first, again, other = (run(recipe, x * size, w, grad)[0] for size in (1, 1, 1 + 1e-6))
    np.testing.assert_array_equal(first, again)
    assert (other != first).any()
    keyed = [run(recipe, x, w, grad, key=jax.random.key(i))[0] for i in range(48)]
    single = float(jnp.abs(keyed[0] - x @ w).mean())
    assert float(jnp.abs(jnp.stack(keyed).mean(0) - x @ w).mean()) < 0.5 * single


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lhs": jnp.ones((M, K), int)}, TypeError, "lhs has dtype int32"),
        ({"recipe": DISTINCT["fp8"], "state": {}}, ValueError, "got none"),
        ({"state": initial_state(DISTINCT["fp8"])}, ValueError, "'int8' takes state of no tensor"),
    ],
)
def test_refusals(changes, error, message):
    given = dict(zip(("lhs", "rhs"), operands(), strict=False), dimension_numbers=NUMBERS, recipe=DISTINCT["int8"])
    with pytest.raises(error, match=message):
        dot_general(**given | changes)
