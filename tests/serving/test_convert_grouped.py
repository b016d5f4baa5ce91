"""Convolutions and experts in a ragged matmul: served as trained, to the bit, through the disk."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxquant
from jaxquant import convert, maybe_quantize_model, serving, state
from jaxquant.core.qtensor import QTensor
from tests.serving.models import filled

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


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(4, 8, (3,), rngs=rngs)
        self.experts = nnx.Param(jax.random.normal(rngs(), (3, 8, 8)) * 0.3)
        self.last = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(x)).reshape(-1, 8)
        return self.last(jnp.tanh(jax.lax.ragged_dot(x, self.experts[...], jnp.array(SIZES))))


def stored(params):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, QTensor))
        if isinstance(leaf, QTensor)
    }


CONVERTED = {"conv/kernel", "experts", "last/kernel"}


@pytest.mark.parametrize("string", ["fp8", "int8"])
def test_linen(string, tmp_path):
    config = {"quantization": string, "quant_backend": "native"}
    quantized = maybe_quantize_model(Linen(), config, X)
    variables = filled(jax.eval_shape(quantized.init, jax.random.key(0), X))
    converted = convert(variables, config, X, model=Linen())
    assert stored(converted["params"]) == CONVERTED
    serving.save(tmp_path / "served", converted["params"], config)
    params = serving.load(tmp_path / "served").params
    server = maybe_quantize_model(Linen(), config | {"checkpoint_is_quantized": True}, X)
    expected = jax.jit(quantized.apply)(variables, X)
    np.testing.assert_array_equal(expected, jax.jit(server.apply)({"params": params}, X))
    float_kernels = {"conv": variables["params"]["conv"]}
    with pytest.raises(ValueError, match=f"layer 'conv' has a float kernel and checkpoint_is_quantized .* '{string}'"):
        server.apply({"params": params | float_kernels}, X)


@pytest.mark.parametrize("string", ["fp8", "int8"])
def test_nnx(string, tmp_path):
    config = {"quantization": string, "quant_backend": "native"}
    run = nnx.jit(lambda model: model(X))

    def quantized():
        return maybe_quantize_model(Nnx(), config, X)

    trained = quantized()
    nnx.update(trained, filled(nnx.to_pure_dict(nnx.state(trained, state.QuantState))))
    served = convert(trained, config, X)
    np.testing.assert_array_equal(run(trained), run(served))
    assert stored(serving.nnx_params(served)) == CONVERTED
    assert {leaf.ndim for leaf in jax.tree.leaves(nnx.state(served, nnx.Param))} == {1}
    serving.save(tmp_path / "served", serving.nnx_params(served), config)
    loaded = nnx.eval_shape(lambda: convert(quantized(), config, X))
    serving.update_nnx(loaded, serving.load(tmp_path / "served").params)
    np.testing.assert_array_equal(run(served), run(loaded))


def test_a_convolution_whose_recipe_does_not_run_stays_float_with_its_reason():
    config = {"quantization": "fp8_block", "quant_backend": "native"}
    quantized = maybe_quantize_model(Linen(), config, X)
    variables = quantized.init(jax.random.key(0), X)
    converted = convert(variables, config, X, model=Linen())
    assert stored(converted["params"]) == {"last/kernel"}
    server = maybe_quantize_model(Linen(), config | {"checkpoint_is_quantized": True}, X)
    np.testing.assert_array_equal(jax.jit(quantized.apply)(variables, X), jax.jit(server.apply)(converted, X))


EXPERTS = X[..., None] * jnp.array([1.0, 4.0, 9.0])


class LinenExperts(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Einsum((4, 3, 8), "bsde,def->bsef", use_bias=False, name="experts")(x)


class NnxExperts(nnx.Module):
    def __init__(self):
        self.experts = nnx.Einsum("bsde,def->bsef", (4, 3, 8), None, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.experts(x)


@pytest.mark.parametrize(
    ("string", "backend", "shares"),
    [
        ("fp8", "native", False),
        ("fp8", "native", True),
        ("fp8_current", "native", False),
        ("fp8_current", "native", True),
        ("int8", "native", False),
        ("aqt_fp8_full", "aqt", False),
        ("fp8_e4m3", "qwix", False),
    ],
)
def test_flax_layers_with_a_batch_axis_have_scales_of_each_element(string, backend, shares):
    """Training quantizes each expert by itself; so does conversion. With the option they share one scale."""
    if backend != "native":
        pytest.importorskip(backend)
    config, x = {"quantization": string, "quant_backend": backend}, EXPERTS
    config |= {"quantization_share_expert_scales": True} if shares else {}
    quantized = maybe_quantize_model(LinenExperts(), config, x)
    variables = filled(jax.eval_shape(quantized.init, jax.random.key(0), x))
    converted = convert(variables, config, x, model=LinenExperts())
    assert converted["params"]["experts"]["kernel"].scale.shape[1] == (1 if shares else 3)
    server = maybe_quantize_model(LinenExperts(), config | {"checkpoint_is_quantized": True}, x)
    np.testing.assert_array_equal(jax.jit(quantized.apply)(variables, x), jax.jit(server.apply)(converted, x))
    trained = maybe_quantize_model(NnxExperts(), config, x)
    nnx.update(trained, filled(nnx.to_pure_dict(nnx.state(trained, state.QuantState))))
    served, run = convert(trained, config, x), nnx.jit(lambda model: model(x))
    np.testing.assert_array_equal(run(trained), run(served))


@pytest.mark.parametrize("way", ["ragged", "linen", "nnx"])
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
    elif way == "linen":
        x = EXPERTS.at[..., 1].set(0)
        model = maybe_quantize_model(LinenExperts(), config, x)
        variables = model.init(jax.random.key(0), x)
        seen = jax.grad(lambda v: model.apply(v, x).sum())(variables)
        given = {"params": variables["params"], OWG: state.update(variables[OWG], seen[OWG])}
        with pytest.warns(UserWarning, match=told):
            scale = convert(given, config, x, model=LinenExperts())["params"]["experts"]["input_scale"]
    else:
        x = EXPERTS.at[..., 1].set(0)
        model = maybe_quantize_model(NnxExperts(), config, x)
        _, grads = state.value_and_grad(lambda model: model(x).sum())(model)
        state.apply_gradients(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), grads)
        with pytest.warns(UserWarning, match=told):
            scale = convert(model, config, x).experts.kernel.input_scale[...]
    first, empty, last = scale.ravel()
    assert empty == max(first, last) > min(first, last) > 0
