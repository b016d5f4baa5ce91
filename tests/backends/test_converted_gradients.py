"""Converted models: input gradients on every backend, and blocks beside batch axes and stacked layers."""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np
import pytest

import jaxquant
from jaxquant.core.qtensor import dequantize, is_tensor
from tests import numerics


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(24)(x)
        return nn.Einsum((24, 2, 8), "bk,khd->bhd", use_bias=False)(x)


X = jax.random.normal(jax.random.key(0), (6, 16))
PAIRS = [("int8", "aqt"), ("fp8_full", "qwix")]  # native: ops/test_edges.py


def exact_gradient(params):
    floats = jax.tree.map(lambda leaf: dequantize(leaf) if is_tensor(leaf) else leaf, params, is_leaf=is_tensor)
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


def test_a_kernel_that_is_not_finite_is_refused():
    model, x = nn.Dense(8), X[:, :8]
    variables = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(np.inf), model.init(jax.random.key(0), x))
    with pytest.raises(ValueError, match="has NaN or infinity in its kernel 'kernel', which 'fp8_current' cannot hold"):
        jaxquant.convert(variables, {"quantization": "fp8_current"}, x, model=model)
