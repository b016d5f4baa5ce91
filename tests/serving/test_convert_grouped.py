"""Convolutions and experts in a ragged matmul: served as trained, to the bit."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import QuantConfig, convert, maybe_quantize_model, state
from jaxquant.config.rules import Rule
from tests.ops.recipes import RECIPES, change
from tests.serving.models import convert_linen, kernels_of
from tests.states import edited

OWG = state.OVERWRITE_WITH_GRADIENT
X = jax.random.normal(jax.random.key(0), (2, 5, 4))
SIZES = (6, 0, 3)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3,), name="conv")(x)).reshape(-1, 8)
        experts = self.param("experts", nn.initializers.normal(0.3), (3, 8, 8))
        x = jnp.tanh(jax.lax.ragged_dot(x, experts, jnp.array(SIZES)))
        return nn.Dense(4, name="last")(x)


def test_a_convolution_whose_recipe_does_not_run_stays_float_and_experts_in_blocks_are_served_as_trained():
    config = {"quantization": "fp8_block", "quant_backend": "native"}
    model = maybe_quantize_model(Linen(), config, X)
    variables = model.init(jax.random.key(0), X)
    converted = convert(variables, config, X, model=Linen())
    assert kernels_of(converted["params"]) == {"experts", "last/kernel"}
    served = maybe_quantize_model(Linen(), config | {"checkpoint_is_quantized": True}, X)
    np.testing.assert_array_equal(jax.jit(served.apply)(converted, X), jax.jit(model.apply)(variables, X))


INT4_TILES = change(RECIPES["int4w"], granularity="per_tile", tile_size=8)


@pytest.mark.parametrize("string", ["fp8_block", "nvfp4", "mxfp4w", "nvfp4w", "ggml_q4_0", "int4w tiles"])
def test_experts_in_tiles_are_served_as_trained(string):
    """In bfloat16, in layers of a scan, and with a last tile that is not full."""
    rules = (Rule(path=".*", recipe=INT4_TILES),)
    kind = {"rules": rules} if string == "int4w tiles" else {"quantization": string}
    config = QuantConfig(quant_backend="native", **kind)
    x = jax.random.normal(jax.random.key(0), (40, 144), jnp.bfloat16)
    params = {"experts": jax.random.normal(jax.random.key(1), (2, 3, 144, 144), jnp.bfloat16)}

    def layer(x, w):
        return jnp.tanh(jax.lax.ragged_dot(x, w.swapaxes(1, 2), jnp.array([20, 0, 13]))), None

    q = jaxquant.quantize(lambda p, x: jax.lax.scan(layer, x, p["experts"])[0], config)
    converted = q.convert(params, {}, x)
    assert converted["experts"].qvalue.dtype.itemsize == 1
    np.testing.assert_array_equal(jax.jit(q)(converted, {}, x), jax.jit(q)(params, {}, x))


EXPERTS = X[..., None] * jnp.array([1.0, 4.0, 9.0])


class LinenExperts(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Einsum((4, 3, 8), "bsde,def->bsef", use_bias=False, name="experts")(x)


@pytest.mark.parametrize(
    ("string", "backend", "shares"),
    [
        ("fp8", "native", False),
        ("fp8", "native", True),
        ("int8", "native", False),
        ("aqt_fp8_full", "aqt", False),
        ("fp8_e4m3", "qwix", False),
    ],
)
def test_flax_layers_with_a_batch_axis_have_scales_of_each_element(string, backend, shares):
    """Training quantizes each expert by itself; so does conversion. With the option they share one scale."""
    config, x = {"quantization": string, "quant_backend": backend}, EXPERTS
    config |= {"quantization_share_expert_scales": True} if shares else {}
    converted = convert_linen(LinenExperts(), config, x)
    assert converted["params"]["experts"]["kernel"].scale.shape[1] == (1 if shares else 3)


def test_a_layer_of_which_no_expert_was_seen_takes_no_scale_of_another_layer():
    sizes, x = jnp.array([4, 0, 4]), jax.random.normal(jax.random.key(0), (8, 4))
    stack = lambda p, x: jax.lax.scan(lambda x, w: (jax.lax.ragged_dot(x, w, sizes), None), x, p["w"])[0]  # noqa: E731
    q, p = jaxquant.quantize(stack, {"quantization": "fp8"}), {"w": jax.random.normal(jax.random.key(1), (2, 3, 4, 4))}
    seen = state.update(before := q.init(p, x), jax.grad(lambda s: q(p, s, x).sum())(before))
    with pytest.warns(UserWarning, match=r"kernels \(0, 1\), \(1, 1\) of layer 'w'"):
        scale = q.convert(p, seen, x)["w"].input_scale.reshape(2, 3)
    assert (scale[:, 1] == scale[:, ::2].max(1)).all()
    lost = lambda name, row: row | ({"amax_history": row["amax_history"].at[0].set(0)} if name == "w/input" else {})  # noqa: E731
    unseen = edited(seen, lost)
    with pytest.raises(ValueError, match="layer 'w' has no amax history of its input"):
        q.convert(p, unseen, x)


@pytest.mark.parametrize("way", ["ragged", "linen"])
def test_an_expert_that_never_got_rows_takes_the_input_scale_of_the_others(way):
    config = {"quantization": "fp8", "quant_backend": "native"}
    told = r"kernels 1 of layer 'experts' have no amax history of their input.* scale of 'fp8' is the largest of the ot"
    if way == "ragged":
        q = jaxquant.quantize(lambda p, x: jax.lax.ragged_dot(x, p["experts"]["w"], jnp.array([4, 0, 4])), config)
        x, p = X.reshape(-1, 4)[:8], {"experts": {"w": jax.random.normal(jax.random.key(1), (3, 4, 8))}}
        grad = jax.grad(lambda s: q(p, s, x).sum())
        seen = state.update(before := q.init(p, x), grad(before))
        with pytest.raises(ValueError, match="no amax history of its input"):
            q.convert(p, before, x)
        with pytest.warns(UserWarning, match=told):
            scale = q.convert(p, seen, x)["experts"]["w"].input_scale
    else:
        x = EXPERTS.at[..., 1].set(0)
        model = maybe_quantize_model(LinenExperts(), config, x)
        variables = model.init(jax.random.key(0), x)
        seen = jax.grad(lambda v: model.apply(v, x).sum())(variables)
        given = {"params": variables["params"], OWG: state.update(variables[OWG], seen[OWG])}
        with pytest.warns(UserWarning, match=told):
            scale = convert(given, config, x, model=LinenExperts())["params"]["experts"]["kernel"].input_scale
    first, empty, last = scale.ravel()
    assert empty == max(first, last) > min(first, last) > 0
