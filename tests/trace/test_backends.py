"""AQT and Qwix as functions: the bits of the injected Linen and NNX models, without a random stream, and refusals."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxquant
from jaxquant.backends import load
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Rule
from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec
from tests import decoder
from tests.serving import models
from tests.trace.functions import normal, shape
from tests.trace.test_bits import assert_same_bits

OPTIMIZED = False  # one backend's calls by two ways, both compiled alike; compiled as users do: test_bits.py

AQT = [string for string, backend in models.schemes() if backend == "aqt"]
QWIX = [string for string, backend in models.schemes() if backend == "qwix"]


def step(apply, x):
    """The loss, the outputs and the gradients of a function of (params, x)."""

    def loss(params):
        out = apply(params, x).astype(jnp.float32)
        return jnp.mean(out**2), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.fixture(scope="module")
def small():
    """A Linen model of two kinds of layers in bfloat16, its parameters and an input."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.DenseGeneral((2, 8), dtype=jnp.bfloat16, name="up")(x)
            return nn.DenseGeneral(16, axis=(-2, -1), dtype=jnp.bfloat16, name="down")(nn.silu(y))

    model, x = Model(), normal(1, 4, 16)
    return model, jax.jit(model.init)(jax.random.key(0), x)["params"], x


@pytest.mark.parametrize(("backend", "string"), [("aqt", each) for each in AQT] + [("qwix", each) for each in QWIX])
def test_steps_are_those_of_the_injected_model(small, backend, string, monkeypatch):
    """Loss, outputs and gradients; where AQT draws noise, both get one key."""
    model, params, x = small
    config = {"quantization": string, "quant_backend": backend}
    q = jaxquant.quantize(lambda params, x: model.apply({"params": params}, x), config)
    injected, rngs = jaxquant.maybe_quantize_model(model, config, x), {"quant": jax.random.key(3)}
    if any(recipe.is_stochastic for recipe in q.config.resolver().recipes):
        fixed = jax.random.key(7)
        if backend == "aqt":
            from jaxquant.backends import aqt

            monkeypatch.setattr(aqt.AqtDotGeneral, "make_rng", lambda self, name="quant": fixed)
        else:
            from jaxquant.backends import qwix

            monkeypatch.setattr(qwix, "operands_key", lambda lhs, rhs: fixed)
            injected = None  # Qwix draws from the stream in Linen; test_nnx compares the noise
        real = load(backend).contract

        def with_key(lhs, rhs, product, given):
            return real(lhs, rhs, product, dataclasses.replace(given, key=fixed))

        monkeypatch.setattr(load(backend), "contract", with_key, raising=False)
    own = step(lambda params, x: q(params, {}, x), x)(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.tree.map(np.asarray, own[1])))
    if injected is not None:
        theirs = step(lambda params, x: injected.apply({"params": params}, x, rngs=rngs), x)(params)
        assert_same_bits(theirs, own)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.LinearGeneral(16, (2, 8), rngs=rngs)
        self.down = nnx.LinearGeneral((2, 8), 16, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.up(x)))


@pytest.mark.parametrize("string", ["int8", "fp8_full"])
def test_qwix_draws_the_noise_of_its_nnx_models(string):
    model, x = NnxModel(nnx.Rngs(0)), normal(1, 4, 16)
    config = {"quantization": string, "quant_backend": "qwix"}
    graph, params = nnx.split(model)
    injected = jaxquant.maybe_quantize_model(model, config, x)
    q = jaxquant.quantize(lambda params, x: nnx.merge(graph, params)(x), config)
    own = step(lambda params, x: q(params, {}, x), x)(params)

    other, state = nnx.split(injected)
    theirs = step(lambda params, x: nnx.merge(other, params)(x), x)(state)
    assert_same_bits(jax.tree.leaves(theirs), jax.tree.leaves(own))


@pytest.mark.parametrize(("backend", "string"), [("aqt", "aqt_fp8_full"), ("qwix", "fp8_full")])
def test_decoder(backend, string):
    """Logits and gradients of the decoder, to the bit."""
    model, tokens = decoder.Decoder(), decoder.tokens()
    config = {"quantization": string, "quant_backend": backend}
    injected = jaxquant.maybe_quantize_model(model, config, tokens)
    params = decoder._initial_float(model, 0)["params"]
    q = jaxquant.quantize(lambda params, tokens: model.apply({"params": params}, tokens), config)
    assert len(q.report(params, tokens).quantized) == len(decoder.LINEAR)
    rngs = {"quant": jax.random.key(0)}
    assert_same_bits(
        step(lambda params, x: injected.apply({"params": params}, x, rngs=rngs), tokens)(params),
        step(lambda params, x: q(params, {}, x), tokens)(params),
    )


@pytest.mark.parametrize(
    ("backend", "string"), [("aqt", "int8"), ("qwix", "int8"), ("aqt", "aqt_fp8"), ("qwix", "fp8_full")]
)
def test_converted(backend, string):
    """Scanned layers and an einsum over heads: served is trained."""
    model, x = models.Linen(jnp.bfloat16, 1), normal(3, 2, 4, models.D)
    config = {"quantization": string, "quant_backend": backend}
    params = models.filled(jax.eval_shape(model.init, jax.random.key(0), x))["params"]
    q = jaxquant.quantize(lambda params, x: model.apply({"params": params}, x), config)
    converted = q.convert(params, {}, x)
    assert str(converted["twice"]["kernel"].tensor.qvalue.dtype)[:3] in ("int", "flo")
    first, second = (np.asarray(jax.jit(q)(given, {}, x), np.float32) for given in (params, converted))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("backend", ["aqt", "qwix"])
def test_each_expert_is_quantized_by_itself(backend):
    """As under vmap, forward and backward, with a weight on either side; noise of no stream differs by step."""
    q = jaxquant.quantize(
        lambda p, x: jnp.einsum("efd,ebd->ebf", p["w"], x), {"quantization": "int8", "quant_backend": backend}
    )
    alone = jaxquant.quantize(lambda p, x: x @ p["w"].T, {"quantization": "int8", "quant_backend": backend})
    p, x = {"w": normal(0, 3, 4, 8)}, normal(1, 3, 5, 8)
    out = jax.jit(q)(p, {}, x)
    for expert in range(3):
        expected = jax.jit(alone)({"w": p["w"][expert]}, {}, x[expert])
        np.testing.assert_allclose(out[expert], expected, rtol=1e-6, atol=1e-6)
    grad = jax.jit(jax.grad(lambda p, x, key=None: jnp.sum(jnp.sin(q(p, {}, x, key=key)))))
    first, again = grad(p, x), grad(p, x)
    np.testing.assert_array_equal(first["w"], again["w"])
    assert not np.array_equal(grad(p, x, key=jax.random.key(1))["w"], grad(p, x, key=jax.random.key(2))["w"])


def test_an_activation_of_the_kernels_shape():
    """Qwix takes it for a weight in a model; the function knows which is which."""
    config = {"quantization": "fp8_full", "quant_backend": "qwix"}
    q = jaxquant.quantize(lambda p, x: x @ p["w"], config)
    p, x = {"w": normal(0, 8, 8)}, normal(1, 8, 8)
    np.testing.assert_array_equal(jax.jit(q)(p, {}, x)[:4], jax.jit(q)(p, {}, x[:4]))


def conv(p, x):
    return jax.lax.conv(x, p["conv"], (1,), "SAME")[:, 0] @ p["w"]


@pytest.mark.parametrize("backend", ["aqt", "qwix"])
def test_what_a_backend_cannot_do_is_refused_by_name(backend):
    title, config = {"aqt": "AQT", "qwix": "Qwix"}[backend], {"quantization": "int8", "quant_backend": backend}
    p, x = {"w": shape(8, 8), "conv": shape(3, 2, 3)}, shape(4, 2, 8)
    report = jaxquant.quantize(conv, config).report(p, x)
    assert [row.reason for row in report.out_of_reach] == [
        f"{title} has no conv_general_dilated; use quant_backend 'native'"
    ]
    with pytest.raises(NotImplementedError, match=f"rule 'conv' at 'conv': {title} has no conv_general_dilated"):
        jaxquant.quantize(conv, config | {"rules": [{"path": "conv", "recipe": "int8"}]}).init(p, x)
    with pytest.raises(NotImplementedError, match="strict true"):
        jaxquant.quantize(conv, config | {"strict": True}).init(p, x)
    blocks = TensorSpec("int8", "per_block", tile_size=4, free_size=4)
    rules = (Rule(path=".*", recipe=Recipe("blocks", MatmulSpec(blocks, blocks))),)
    with pytest.raises(NotImplementedError, match=f"recipe 'blocks' operand fwd_lhs: {title} has no"):
        jaxquant.quantize(lambda p, x: x @ p["w"], QuantConfig(quant_backend=backend, rules=rules))
    for options, text in (
        ({"precision": "highest"}, "precision HIGHEST"),
        ({"preferred_element_type": "float32"}, "pref"),
    ):
        fn = lambda p, x, options=options: jnp.matmul(x, p["w"], **options)  # noqa: E731
        half = {"w": shape(8, 8, dtype="bfloat16")}, shape(4, 8, dtype="bfloat16")
        with pytest.raises(NotImplementedError, match=f"{text}.* of a contraction is dropped by {title}"):
            jax.eval_shape(jaxquant.quantize(fn, config), half[0], {}, half[1])


def test_auto_is_that_of_the_table():
    for string, backend in (("int8", "aqt"), ("fp4", "qwix"), ("fp8", "native")):
        q = jaxquant.quantize(lambda p, x: x @ p["w"], {"quantization": string})
        assert q.config.resolved_backend == backend
        assert q.report({"w": shape(8, 8)}, shape(2, 8)).quantized[0].recipe == string
