"""Convolutions and experts in a ragged matmul: the converted model computes the same bits as the trained model."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import QuantConfig, state
from jaxquant.config.rules import Rule
from tests.ops.recipes import RECIPES, change
from tests.serving.models import convert_linen
from tests.states import edited

X = jax.random.normal(jax.random.key(0), (2, 5, 4))
OWG = state.OVERWRITE_WITH_GRADIENT


INT4_TILES = change(RECIPES["int4w"], granularity="per_tile", tile_size=8)


@pytest.mark.parametrize("string", ["fp8_block", "nvfp4", "ggml_q4_0", "int4w tiles"])
def test_experts_in_tiles_are_served_as_trained(string):
    """Tested in bfloat16, in layers of a scan, and with a last tile that is smaller."""
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
    [("fp8", "native", False), ("fp8", "native", True), ("aqt_fp8_full", "aqt", False), ("fp8_e4m3", "qwix", False)],
)
def test_flax_layers_with_a_batch_axis_have_scales_of_each_element(string, backend, shares):
    """Training and conversion quantize each expert separately. With the option, all experts share one scale."""
    config, x = {"quantization": string, "quant_backend": backend}, EXPERTS
    config |= {"quantization_share_expert_scales": True} if shares else {}
    converted = convert_linen(LinenExperts(), config, x)
    assert converted["params"]["experts"]["kernel"].scale.shape[1] == (1 if shares else 3)


def test_a_layer_of_which_no_expert_was_seen_takes_no_scale_of_another_layer():
    sizes, x = jnp.array([4, 0, 4]), jax.random.normal(jax.random.key(0), (8, 4))
    stack = lambda p, x: jax.lax.scan(lambda x, w: (jax.lax.ragged_dot(x, w, sizes), None), x, p["w"])[0]  # noqa: E731
    q, p = jaxquant.quantize(stack, {"quantization": "fp8"}), {"w": jax.random.normal(jax.random.key(1), (2, 3, 4, 4))}
    seen = state.update(before := q.init(p, x), jax.grad(lambda s: q(p, s, x).sum())(before))
    with pytest.warns(UserWarning, match=r"experts \(0, 1\), \(1, 1\) of layer 'w' received no tokens"):
        scale = q.convert(p, seen, x)["w"].input_scale.reshape(2, 3)
    assert (scale[:, 1] == scale[:, ::2].max(1)).all()
    lost = lambda name, row: row | ({"amax_history": row["amax_history"].at[0].set(0)} if name == "w/input" else {})  # noqa: E731
    unseen = edited(seen, lost)
    with pytest.raises(ValueError, match="needs the amax history of the input of layer 'w' for a static scale, but"):
        q.convert(p, unseen, x)
