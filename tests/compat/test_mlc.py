"""MLC's functions compared with numpy: values, shapes, layouts, layers, experts, latent attention, rules."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant
from jaxquant.compat import mlc
from jaxquant.compat.mlc import ScaleLayout
from jaxquant.config.recipes import RECIPES
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec
from tests import numerics
from tests.models import chain

linear, split = mlc.block_scale_linear, mlc.split_kv_b_proj
BLOCK = (128, 128)
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
F32 = np.float32


def normal(*shape, seed=0, dtype=F32):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def groups_of(x, group, dtype, scale_of):
    """Quantize group by group; ``scale_of`` maps a group's largest magnitude to its scale."""
    q, scales = np.zeros(x.shape, dtype), np.zeros((*x.shape[:-1], -(-x.shape[-1] // group)), F32)
    for index in np.ndindex(*scales.shape):
        part = (*index[:-1], slice(index[-1] * group, (index[-1] + 1) * group))
        own = x[part].astype(F32)
        scales[index] = scale = scale_of(np.max(np.abs(own)), index)
        q[part] = np.clip(own / scale, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)
    return q, scales


def by_mlc(dtype, eps=1e-10):
    return lambda amax, _: np.maximum(amax, F32(eps)) / F32(LARGEST[dtype])


def ours(dtype):
    return lambda amax, _: amax * F32(1 / LARGEST[dtype]) if amax > 0 else F32(1)


def values(q, scale, block):
    """Return the values of elements and scales, in float64."""
    for axis, step in zip(range(-len(block), 0), block, strict=True):
        scale = np.repeat(scale, step, axis).take(range(q.shape[axis]), axis)
    return np.asarray(q, np.float64) * np.asarray(scale, np.float64)


def weight(*shape, block=BLOCK, dtype="float8_e4m3fn"):
    """Return elements and random scales, as in MLC's tests."""
    counts = [-(-n // step) for n, step in zip(shape[-2:], block, strict=True)]
    scale = np.random.default_rng(7).random((*shape[:-2], *counts)).astype(F32) / F32(448) + F32(1e-3)
    return normal(*shape, seed=1).astype(dtype), scale


def close(found, x, w, bias=0.0):
    """Compare with x · wᵀ + bias in float64, within the rounding of a float32 matmul and of one sum."""
    want = x @ w.swapaxes(-1, -2) + bias
    bound = numerics.dot_bound(x, w.swapaxes(-1, -2)) + numerics.FLOAT32_EPS * np.abs(want)
    np.testing.assert_array_less(np.abs(np.asarray(found, np.float64) - want), bound)


# -- activations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "group", "dtype", "x_dtype"),
    [((2, 576), 128, "float8_e4m3fn", "bfloat16"), ((3, 4, 200), 64, "float8_e5m2", "float32")],
)
def test_groups_are_quantized_as_mlc_does(shape, group, dtype, x_dtype):
    x = normal(*shape).astype(x_dtype)
    x[..., -3:] *= 1000
    x[0, ..., :group] = 0
    want_q, want = groups_of(x, group, dtype, by_mlc(dtype))
    q, scale = jax.jit(lambda x: mlc.rowwise_group_quant_fp8(x, group, dtype))(x)
    np.testing.assert_array_equal(np.asarray(q).view(np.uint8), want_q.view(np.uint8))
    np.testing.assert_array_equal(scale, want)
    static = want.reshape(-1, want.shape[-1])[-1]  # with known scales: the scales of the last row
    want_q, _ = groups_of(x, group, dtype, lambda _, index: static[index[-1]])
    q = jax.jit(lambda x, s: mlc.static_activation_group_quant_fp8(x, s, group, dtype))(x, static)
    np.testing.assert_array_equal(np.asarray(q).view(np.uint8), want_q.view(np.uint8))


def test_every_layout_of_scales_is_written_and_read():
    scale = normal(2, 3, 5)
    stored = {
        ScaleLayout.ROW_MAJOR: scale,
        ScaleLayout.M_MAJOR: np.pad(scale.reshape(6, 5).T, ((0, 0), (0, 2))),
        ScaleLayout.MLC_DYNAMIC: np.stack([scale[..., g] for g in range(5)]),
        ScaleLayout.MLC_BMM: np.stack([scale[:, :, g] for g in range(5)], axis=1),
        ScaleLayout.MLC_STATIC: np.stack([each.T for each in scale]),
    }
    assert set(stored) == set(ScaleLayout)
    for found, want in zip(jax.jit(lambda x: [each.write(x) for each in stored])(scale), stored.values(), strict=True):
        np.testing.assert_array_equal(found, want)
    read = jax.jit(lambda all_of: [each.read(x, (2, 3)) for each, x in zip(stored, all_of, strict=True)])
    for found in read(list(stored.values())):
        np.testing.assert_array_equal(found, scale)
    x = jax.ShapeDtypeStruct((2, 3, 5 * 64), "float32")
    static = jax.jit(lambda s: mlc.broadcast_activation_scale(x, s, ScaleLayout.MLC_STATIC))(scale[0, 0])
    np.testing.assert_array_equal(static, np.broadcast_to(scale[0, 0], (2, 3, 5)).swapaxes(1, 2))
    empty = jax.eval_shape(lambda x: mlc.rowwise_group_quant_fp8(x, 128), jnp.zeros((0, 200)))
    assert [each.shape for each in empty] == [(0, 200), (0, 2)]
    dynamic = jax.eval_shape(lambda x: mlc.rowwise_group_quant_fp8(x, 64, layout=ScaleLayout.MLC_BMM), x)
    assert dynamic[1].shape == (2, 5, 3)


def test_a_group_of_zeros_has_mlcs_least_scale_and_a_tiny_one_keeps_its_digits_by_our_rule():
    tiny = normal(4, 256) * F32(1e-16)
    tiny[0] = 0
    spec = TensorSpec("float8_e4m3fn", "per_tile", tile_size=128)
    (q, scale), own, tensor = jax.jit(
        lambda x: (*(mlc.rowwise_group_quant_fp8(x, 128, eps=eps) for eps in (1e-10, None)), quantize(x, spec, (1,)))
    )(tiny)
    assert float(scale[0, 0]) == float(F32(1e-10) / F32(448))
    assert not np.any(np.asarray(q[0], F32))
    for each, low, high in (((q, scale), 0.5, 1), (own, 0, 0.04)):  # relative RMSE of 1 × 128 in e4m3: 0.026
        error = values(*map(np.asarray, each), (128,)) - tiny.astype(np.float64)
        assert low <= np.sqrt(np.mean(error**2) / np.mean(tiny.astype(np.float64) ** 2)) <= high
    np.testing.assert_array_equal(own[1], tensor.scale)


def test_mlcs_flags_name_layouts():
    found = [ScaleLayout.of_mlc(*flags).name for flags in itertools.product((False, True), repeat=2)]
    assert found == ["ROW_MAJOR", "ROW_MAJOR", "MLC_DYNAMIC", "MLC_BMM"]


# -- layers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "how", "block", "dtype"),  # 576 and 100 are not multiples of a block
    [
        (256, 576, "row", BLOCK, "float8_e4m3fn"),
        (200, 100, "static", BLOCK, "float8_e4m3fn"),
        (200, 192, "own", (64, 96), "float8_e5m2"),  # MLC reads this format, but has no matmul for it
    ],
)
def test_a_linear_layer_is_that_of_the_values(n, k, how, block, dtype):
    (w, scale), bias, tile = weight(n, k, block=block, dtype=dtype), normal(n), block[1]
    static = np.linspace(5e-3, 1e-2, -(-k // tile)).astype(F32) if how == "static" else None

    @jax.jit
    def layer(xs, w, scale, bias, static):
        more = {"bias": bias, "activation_scale": static, "quantizes_row": how == "row"}
        return [mlc.block_scale_linear(x, w, scale, block, **more) for x in xs]

    inputs = [normal(rows, k) for rows in (1, 2, 4, 8)]
    for x, y in zip(inputs, layer(inputs, w, scale, bias, static), strict=True):
        left = x.astype(np.float64)
        if how == "static":
            left = values(*groups_of(x, tile, dtype, lambda _, i: static[i[-1]]), (tile,))
        elif len(x) > 1 or how == "row":
            left = values(*groups_of(x, tile, dtype, ours(dtype)), (tile,))
        close(y, left, values(w, scale, block), bias)


def test_a_row_in_float_is_mlcs_gemv_and_a_quantized_one_is_a_row_of_a_prefill():
    (w, scale), x = weight(200, 896), normal(8, 896).astype(ml_dtypes.bfloat16)
    run = jax.jit(
        lambda x, w, s, **more: mlc.block_scale_linear(x, w, s, out_dtype="float32", **more),
        static_argnames="quantizes_row",
    )
    rounded = values(w.astype(ml_dtypes.bfloat16), scale.astype(ml_dtypes.bfloat16), BLOCK)
    gemv = rounded.astype(ml_dtypes.bfloat16).astype(np.float64) @ x[0].astype(np.float64)
    # MLC rounds the scale and the weight to bfloat16, half of its eps each.
    bound = numerics.BFLOAT16_EPS * np.abs(values(w, scale, BLOCK)) @ np.abs(x[0].astype(np.float64))
    assert np.all(np.abs(np.asarray(run(x[:1], w, scale)[0]) - gemv) <= bound * (1 + 2**-8))
    decoded, prefilled = run(x[:1], w, scale, quantizes_row=True), run(x, w, scale)
    np.testing.assert_array_equal(decoded, prefilled[:1])
    static = {"activation_scale": jnp.full(7, 0.01)}
    np.testing.assert_array_equal(run(x[0], w, scale, **static), run(x, w, scale, **static)[0])
    left = values(*groups_of(x, 128, w.dtype.name, ours(w.dtype.name)), (128,))
    bound = 2 * numerics.dot_bound(left[:1], values(w, scale, BLOCK).T)
    assert not np.all(np.abs(np.asarray(run(x[:1], w, scale) - prefilled[:1])) <= bound)
    # In bfloat16, both operands and the result are rounded: half an eps each.
    exact, size = left @ values(w, scale, BLOCK).T, np.abs(left) @ np.abs(values(w, scale, BLOCK)).T
    bound = numerics.BFLOAT16_EPS * (size * (1 + 2**-8) + np.abs(exact) / 2 + size * 2**-8)
    found = mlc.block_scale_linear(jnp.asarray(x), w, scale)
    assert found.dtype == jnp.bfloat16
    assert np.all(np.abs(np.asarray(found, np.float64) - exact) <= bound)


def test_the_gradient_of_activations_is_that_of_the_dequantized_weight():
    w, x = weight(200, 100)[0], normal(4, 100)
    scale = F32(0.01)  # one for all blocks
    gradient = jax.jit(jax.grad(lambda x: mlc.block_scale_linear(x, w, scale).sum()))
    for rows in (1, 4):
        close(gradient(x[:rows]), np.ones((rows, 200)), values(w, np.full((2, 1), scale), BLOCK).T)


REFUSED = [
    (lambda x, w, s: linear(x, normal(64, 96), s[0]), "weight must be float8, got float32"),
    (lambda x, w, s: linear(x, w[0], np.ones((2, 1, 1), F32)), "weight with weight_scale_inv has"),
    (lambda x, w, s: linear(x, w[0], np.ones((2, 2), F32)), r"needs scale of shape \(1, 1\), got \(2, 2\)"),
    (lambda x, w, s: linear(x, w[0], s[0], activation_scale=np.ones(3, F32)), "got 3 static scales for an array of"),
    (lambda x, w, s: linear(x[:, :9], w[0], s[0]), r"x \(4, 9\) must equal K of weight \[N, K\] = \(64, 96\)"),
    (lambda x, w, s: linear(x, w[0], s[0], bias=np.ones(1, F32)), r"bias must have shape \(64,\), got \(1,\)"),
    (lambda x, w, s: linear(x, w[0], s[0], out_dtype="int8"), "out_dtype must be float, got int8"),
    (lambda x, w, s: linear(x, w[0], s[0], block_size=32), r"must be \(rows, columns\)"),
    (lambda x, w, s: mlc.block_scale_experts(x, w[0], s[0], np.array([4])), r"must be \[E, N, K\]"),
    (lambda x, w, s: mlc.block_scale_experts(x, w, s, np.array([1.0, 4.0])), "must be an array of integers"),
    (lambda x, w, s: mlc.block_scale_experts(x[:, :9], w, s, np.array([1, 4])), "must equal K of"),
    (lambda x, w, s: mlc.block_scale_experts(x[None], w, s, [1, 4]), r"x must be \[tokens, K\]"),
    (lambda x, w, s: mlc.block_scale_experts(x[:2], w, s, np.array([[0, 1, 0]])), "for x with 1 or k rows, got 2"),
    (lambda x, w, s: mlc.group_sizes(np.array([1, 2, 3, 4]), 5), r"for 5 experts the shape must be \(5,\) or \(6,\)"),
    (lambda x, w, s: split(w[0, 0], s[0], 2, 128, 128), r"weight must be \[rows, C\], got"),
    (lambda x, w, s: split(*weight(1152, 192), 3, 128, 256), "kv_lora_rank 192 is not a multiple of 128 "),
    (lambda x, w, s: split(*weight(1152, 256), 3, 192, 192), "qk_nope_head_dim 192 is not a multiple of 128"),
    (lambda x, w, s: split(*weight(960, 256), 3, 256, 64), "v_head_dim 64 is not a multiple of 128"),
    (lambda x, w, s: split(*weight(1152, 256), 3, 128, 257), r"rows, not num_heads 3 times \(qk_nope_head_dim 128"),
    (lambda x, w, s: mlc.skip_reason("mlp.up", 8, "mlp"), "must be a list of modules, got 'mlp'"),
    (lambda x, w, s: mlc.block_scale_bmm(x[None], w, s), r"\(1, 4, 96\) must be \[H, M, K\] with as"),
    (lambda x, w, s: mlc.rowwise_group_quant_fp8(x, 32, "int8"), "dtype must be float8_e4m3fn or"),
    (lambda x, w, s: mlc.rowwise_group_quant_fp8(x.astype("int32"), 32), "x has dtype int32"),
    (lambda x, w, s: mlc.static_activation_group_quant_fp8(x, jnp.ones(2), 32), "of 32, but activation_scale has 2"),
    (lambda x, w, s: ScaleLayout.MLC_BMM.write(x), "at least three axes, got 2"),
]


def test_what_does_not_fit_is_refused_by_name():
    for call, message in REFUSED:
        with pytest.raises((TypeError, ValueError), match=message):
            call(normal(4, 96), *weight(2, 64, 96))


# -- experts -----------------------------------------------------------------------------------------------------------


def test_experts_are_grouped_by_both_forms_of_indptr():
    sizes = np.array([3, 0, 1, 4, 0])  # empty experts, and two rows after the last expert
    (w, scale), x = weight(5, 256, 200), normal(10, 200)
    x[8:] = np.nan
    left = values(*groups_of(x[:8], 128, w.dtype.name, ours(w.dtype.name)), (128,))
    dense, ids = values(w, scale, BLOCK), np.repeat(np.arange(5), sizes)
    run = jax.jit(mlc.block_scale_experts)
    ends = np.cumsum(sizes)
    for indptr in (ends.astype(np.int64), np.concatenate([[0], ends]).astype(np.int32)):
        y = np.asarray(run(x, w, scale, indptr))
        for row in range(8):
            close(y[row], left[row], dense[ids[row]])
        assert not np.any(y[8:])


def test_a_single_token_goes_to_its_experts():
    (w, scale), x = weight(5, 200, 576), normal(3, 576)
    dense, chosen = values(w, scale, BLOCK), np.array([[4, 0, 2]], np.int32)
    run = jax.jit(mlc.block_scale_experts, static_argnames="quantizes_row")
    for rows, quantizes in ((x[:1], False), (x, False), (x, True)):  # into the experts, and out of them
        cast = values(*groups_of(rows, 128, w.dtype.name, ours(w.dtype.name)), (128,))
        left = cast if quantizes else rows.astype(np.float64)
        y = run(rows, w, scale, chosen, quantizes_row=quantizes)
        assert y.shape == (3, 200)
        for i, expert in enumerate(chosen[0]):
            close(y[i], left[i % len(left)], dense[expert])
    out = run(x, w, scale, np.array([[-1, 2, 5]], np.int32), quantizes_row=False)  # -1 and 5 are not experts
    np.testing.assert_array_equal(np.isnan(out).any(axis=1), [True, False, True])
    many = [np.repeat(part[:1], 128, axis=0) for part in (w, scale)]  # more experts than int8 can index
    out = run(x[:1], *many, np.array([[-1, 2]], np.int8))
    np.testing.assert_array_equal(np.isnan(out).any(axis=1), [True, False])


# -- latent attention --------------------------------------------------------------------------------------------------

HEADS, NOPE, VALUE, RANK = 3, 128, 256, 256


def test_the_absorbed_projections_are_those_of_kv_b_proj():
    w, scale = weight(HEADS * (NOPE + VALUE), RANK)
    found = split(w, scale, HEADS, NOPE, VALUE)
    dense = values(w, scale, BLOCK).reshape(HEADS, NOPE + VALUE, RANK)
    assert (found.w_uk.shape, found.w_uk_scale_inv.shape) == ((HEADS, RANK, NOPE), (HEADS, RANK // 128, 1))
    np.testing.assert_array_equal(values(found.w_uk, found.w_uk_scale_inv, BLOCK), dense[:, :NOPE].swapaxes(1, 2))
    np.testing.assert_array_equal(values(found.w_uv, found.w_uv_scale_inv, BLOCK), dense[:, NOPE:])
    oblong = weight(HEADS * (NOPE + VALUE), RANK, block=(128, 64))
    w_uk, uk_scale, *_ = split(*oblong, HEADS, NOPE, VALUE, (128, 64))  # its blocks are transposed, too
    want = values(*oblong, (128, 64)).reshape(dense.shape)[:, :NOPE].swapaxes(1, 2)
    np.testing.assert_array_equal(values(w_uk, uk_scale, (64, 128)), want)
    bmm = jax.jit(mlc.block_scale_bmm)
    for rows in (1, 4):
        query, latent = normal(HEADS, rows, NOPE), normal(HEADS, rows, RANK)
        for x, part in ((query, found[:2]), (latent, found[2:])):
            y = bmm(x, *part)
            left = values(*groups_of(x, 128, w.dtype.name, ours(w.dtype.name)), (128,))
            for head in range(HEADS):
                close(y[head], left[head], values(*part, BLOCK)[head])


# -- rules and config --------------------------------------------------------------------------------------------------


FLOATS = [
    *((name, 32000, "output head") for name in ("head", "lm_head", "lm_head.linear", "embed_out")),
    ("model.lm_head", 32000, ""),  # whole names
    ("model.layers.3.mlp.gate", 256, "MoE gate"),
    ("model.layers.3.mlp.gate", 384, ""),
    ("model.layers.3.mlp.shared_expert_gate", 1, "MoE gate"),
    ("model.layers.3.mlp.gate_proj", 256, ""),
    ("vision.block.q", 64, "inside 'vision', which is marked no_quantization"),
    ("vision_tower.q", 64, ""),
]


def test_mlcs_rules_for_layers_that_stay_in_float():
    for name, width, reason in FLOATS:
        assert mlc.skip_reason(name, width, ("vision",)) == reason


CHECKPOINT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
SCHEME = {"name": "mine", "kind": "block-scale", "weight_dtype": "float8_e4m3fn", "model_dtype": "bfloat16"}


def test_a_block_scale_config_trains_as_fp8_block():
    checkpoint = CHECKPOINT | {"modules_to_not_convert": ["vision_tower"]}
    resolver = mlc.quant_config(SCHEME, {"quantization_config": checkpoint}).resolver()
    for path in ("lm_head", "lm_head/linear", "vision_tower/a", "layers/0/mlp/gate"):
        assert resolver(path, 64).recipe is None, path
    assert resolver("mlp/up", 64).recipe == RECIPES["fp8_block"].recipe
    rounded = mlc.quant_config(SCHEME, {"quantization_config": checkpoint | {"scale_fmt": "ue8m0"}})
    assert rounded.scale_fmt == "ue8m0"
    assert mlc.quant_config(SCHEME | {"quantize_linear": False}, {"quantization_config": checkpoint}).resolver() is None
    assert resolver("layers/0/mlp/gate", 4096).recipe is not None  # a SwiGLU's


@pytest.mark.parametrize(("head", "listed"), [("lm_head", ["lm_head"]), ("logits_dense", [])])
def test_the_config_trains_a_model_whatever_its_head_is_called(head, listed):
    checkpoint = CHECKPOINT | {"modules_to_not_convert": listed}
    config, x = mlc.quant_config(SCHEME, {"quantization_config": checkpoint}), jnp.ones((4, 128))
    rows = jaxquant.describe_layers(chain(up=128, **{head: 64}), config, x)
    assert {row.path: row.recipe for row in rows} == {"up": "fp8_block", head: None}


def test_what_is_served_alone_is_not_trained():
    for scheme, checkpoint in (
        ({}, {"weight_block_size": [64, 128]}),
        ({"weight_dtype": "float8_e5m2"}, {"fmt": "e5m2"}),
        ({"use_activation_scale": True}, {"activation_scheme": "static"}),
    ):
        with pytest.raises(NotImplementedError, match=r"training does not support weight_dtype .* use float8_e4m3fn"):
            mlc.quant_config(SCHEME | scheme, {"quantization_config": CHECKPOINT | checkpoint})
