"""Errors of converting that name the parameter and the layer, of a model that is one layer too."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxquant
from tests.models import chain

X = jnp.ones((2, 8))
INT8 = {"quantization": "int8", "quant_backend": "native"}
TWO = chain(up=8, down=4)


def without(path, params):
    """The parameters without what lies at a path."""
    *outer, last = path.split("/")
    if not outer:
        return {name: value for name, value in params.items() if name != last}
    return params | {outer[0]: without("/".join((*outer[1:], last)), params[outer[0]])}


@pytest.mark.parametrize(
    ("model", "gone", "named"),
    [(TWO, "up", "up/kernel"), (nn.Dense(4), "kernel", "kernel")],
)
def test_a_missing_kernel(model, gone, named):
    params = jax.eval_shape(model.init, jax.random.key(0), X)["params"]
    with pytest.raises(ValueError, match=f"no parameter '{named}', the kernel that 'int8' converts; pass all"):
        jaxquant.convert({"params": without(gone, params)}, INT8, X, model=model)


def test_the_root_layer_has_a_name():
    """A model that is one layer has the path '', which says nothing in an error."""
    fp8 = {"quantization": "fp8"}
    model = jaxquant.maybe_quantize_model(nn.Dense(4), fp8, X)
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="recipe 'fp8' at the root layer keeps state in the collection"):
        model.apply({"params": variables["params"]}, X)
    with pytest.raises(ValueError, match="'fp8' at the root layer keeps state in the collection '_overwrite_with_gra"):
        jaxquant.convert({"params": variables["params"]}, fp8, X, model=nn.Dense(4))
