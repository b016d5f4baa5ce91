"""The model is quantized as configured: properties 10 to 14. Each check fails if its property is broken on purpose."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import state
from jaxquant.core import quantize as quantize_module
from jaxquant.core import rounding
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.rounding import saturating_cast
from jaxquant.inject import linen
from jaxquant.ops.contract import contract
from jaxquant.trace import reach
from tests.lowering import dot_operand_types
from tests.models import chain
from tests.must_hold.broken import fails_when_broken
from tests.numerics import stochastic_mean_bound

ops: Any = importlib.import_module("jaxquant.ops.dot_general")  # the package shows the function under this name
coverage_of: Any = importlib.import_module("jaxquant.audit.coverage")
X = jax.random.normal(jax.random.key(0), (4, 16))
NATIVE = {"quant_backend": "native"}


class Alike(nn.Module):
    """Two layers with equal programs, under one jit."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = nn.jit(nn.Dense)
        return dense(16, name="second")(dense(16, name="first")(x))


NET = chain(first=16, second=16)


# -- 10: jit caches --


def check_alike() -> None:
    """A rule for the second of two layers with equal programs applies only to the second layer."""
    assert [layer.path for layer in jaxquant.describe_layers(Alike(), "", X)] == ["first", "second"]
    config = NATIVE | {"rules": [{"path": "second", "recipe": "int8"}]}
    model = jaxquant.maybe_quantize_model(Alike(), config, X)
    variables = jax.jit(model.init)(jax.random.key(1), X)
    found = jaxquant.coverage(model.apply, variables, X)
    assert [row.path for row in found.rows if row.is_low] == ["second"]


def test_10_layers_that_look_alike_have_their_own_recipes():
    check_alike()


# -- 11: options --


def check_stochastic() -> None:
    """Stochastic rounding to e4m3 is right on average: 1.03 lies between 1 and 1.125."""
    n = 1 << 14
    spec = TensorSpec("float8_e4m3fn", "per_tensor", rounding="stochastic")
    scale = jnp.ones((1,))
    got = dequantize(
        quantize_module.quantize_with_scale(jnp.full((n,), 1.03), spec, scale, key=jax.random.key(0))
    ).mean()
    assert abs(float(got) - 1.03) <= stochastic_mean_bound(0.125, n)


def test_11_stochastic_rounding_rounds_at_random():
    check_stochastic()


# -- 12: parameters --


def check_parameters() -> None:
    for name, backend in (("int8", "native"), ("fp8", "native"), ("int8", "aqt"), ("fp8_full", "qwix")):
        model = jaxquant.maybe_quantize_model(NET, {"quantization": name, "quant_backend": backend}, X)
        params, _ = state.split(jax.jit(model.init)(jax.random.key(1), X))
        expected = jax.jit(NET.init)(jax.random.key(1), X)["params"]
        assert jax.tree.structure(params) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_12_the_seed_gives_the_same_parameters():
    check_parameters()


# -- 13: the lowered step --


def step(name: str):
    """Return the gradient function of a quantized net, and its arguments."""
    config = NATIVE | {"quantization": name}
    model = jaxquant.maybe_quantize_model(NET, config, X)
    params, quant = state.split(jax.jit(model.init)(jax.random.key(1), X))

    def loss(params: Any, quant: Any, x: jax.Array) -> jax.Array:
        return model.apply(state.merge(params, quant), x).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2)), (params, quant, X)


def check_lowered() -> None:
    """Check that the program has six matmuls, all with 8-bit operands."""
    for name in ("int8", "fp8"):
        function, args = step(name)
        types = dot_operand_types(jax.jit(function).lower(*args).as_text())
        assert len(types) == 6
        assert not any("f32" in (lhs, rhs) for lhs, rhs, _ in types), types


def test_13_matmuls_of_the_lowered_step_are_8_bit_forward_and_backward():
    check_lowered()


# -- 14: coverage --


def check_coverage_sees_a_fallback() -> None:
    function, args = step("fp8")
    jaxquant.coverage(function, *args).check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "contract", _in_float)
        jax.clear_caches()
        found = jaxquant.coverage(function, *args)
    with pytest.raises(ValueError, match="first"):
        found.check()


def test_14_coverage_raises_where_a_matmul_fell_back():
    check_coverage_sees_a_fallback()


# -- broken on purpose --


def _in_float(lhs: Any, rhs: Any, dims: Any, **options: Any) -> jax.Array:
    """Contract dequantized operands: the numbers are correct, but no matmul has low precision."""
    lhs, rhs = (dequantize(side) if isinstance(side, QTensor) else side for side in (lhs, rhs))
    return contract(lhs, rhs, dims, **options)


class _Within(nn.Module):
    """A model that wraps the quantized model, as some libraries do."""

    inner: nn.Module

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.inner(x)


_of = linen.Face.of


def _together(place: Any, index: int, eqn: Any) -> Any:
    """Return the same place for every equation."""
    return dataclasses.replace(_at(place, index, eqn), context=())


_at = reach.Place.at


BROKEN = {
    "layers share traces": (reach.Place, "at", _together, check_alike),
    "stochastic is nearest": (
        rounding,
        "stochastic_cast",
        lambda x, element, *_: saturating_cast(x, element),
        check_stochastic,
    ),
    "the model is wrapped": (linen.Face, "of", lambda face, model: _of(face, _Within(model)), check_parameters),
    "matmuls are in float": (ops, "contract", _in_float, check_lowered),
    "coverage takes any dtype": (coverage_of, "_match", lambda found, expected: True, check_coverage_sees_a_fallback),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_property_is_seen(name):
    fails_when_broken(*BROKEN[name])
