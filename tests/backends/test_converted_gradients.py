"""Converted models: input gradients on every backend, and blocks beside batch axes and stacked layers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.core.qtensor import QTensor, dequantize
from tests import numerics


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(24)(x)
        return nn.Einsum((24, 2, 8), "bk,khd->bhd", use_bias=False)(x)


X = jax.random.normal(jax.random.key(0), (6, 16))
PAIRS = [("int8", "aqt"), ("int8", "qwix"), ("fp8_full", "qwix")]  # native: ops/test_edges.py


def exact_gradient(params):
    floats = jax.tree.map(
        lambda leaf: dequantize(leaf) if isinstance(leaf, QTensor) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, QTensor),
    )
    return jax.grad(lambda x: Model().apply({"params": floats}, x).sum())(X)


@pytest.mark.parametrize(("string", "backend"), PAIRS)
def test_linen(string, backend):
    config = {"quantization": string, "quant_backend": backend}
    variables = Model().init(jax.random.key(1), X)
    served = jaxquant.convert(variables, config, X, model=Model())
    model = jaxquant.maybe_quantize_model(Model(), config | {"checkpoint_is_quantized": True}, X)
    gradient = jax.jit(jax.grad(lambda x: model.apply(served, x).sum()))(X)
    np.testing.assert_allclose(
        gradient, exact_gradient(served["params"]), rtol=numerics.SMALL_SUM_RTOL, atol=numerics.SMALL_SUM_ATOL
    )


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Einsum((6, 40, 48), "gmk,gkn->gmn", use_bias=False)(x)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(200, name="dense")(x), None


class Stack(nn.Module):
    """Layers stacked along the kernel's second axis, as MaxText does."""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Layer, variable_axes={"params": 1}, split_rngs={"params": True}, length=3)
        return scan(name="layers")(x, None)[0]


@pytest.mark.parametrize(("model", "shape"), [(Experts(), (6, 5, 40)), (Stack(), (5, 200))])
@pytest.mark.parametrize("string", ["fp8_block", "mxfp8"])
def test_blocks_of_experts_and_of_stacked_layers(model, shape, string, tmp_path):
    x, config = jax.random.normal(jax.random.key(0), shape), {"quantization": string}
    trained = jaxquant.maybe_quantize_model(model, config, x)
    variables = trained.init(jax.random.key(1), x)
    params = jaxquant.convert(variables, config, x, model=model)["params"]
    jaxquant.serving.save(tmp_path / "served", params, config=config)
    loaded = jaxquant.serving.load(tmp_path / "served", like=params).params
    served = jaxquant.maybe_quantize_model(model, config | {"checkpoint_is_quantized": True}, x)
    np.testing.assert_array_equal(jax.jit(served.apply)({"params": loaded}, x), jax.jit(trained.apply)(variables, x))
    is_kernel = lambda leaf: isinstance(leaf, QTensor)  # noqa: E731
    for kernel, exact in zip(
        jax.tree.leaves(loaded, is_leaf=is_kernel), jax.tree.leaves(variables["params"]), strict=True
    ):
        if is_kernel(kernel):
            assert jnp.linalg.norm(dequantize(kernel) - exact) < 0.03 * jnp.linalg.norm(exact)
