"""``quantization_share_expert_scales``: one scale and one state for all experts of a weight."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import state
from jaxquant.config.recipes import RECIPES
from jaxquant.core.qtensor import dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec
from tests.serving.models import filled
from tests.states import nested, recorded
from tests.trace.functions import FP8, normal

SHARE = {"quantization_share_expert_scales": True}
SIZES = jnp.array([4, 0, 6])
P = {
    "scanned": normal(0, 2, 3, 8, 8) * jnp.array([1.0, 2.0, 4.0])[:, None, None],
    "last": normal(1, 8, 8, 3),
    "ragged": normal(2, 3, 8, 4),
}
X = normal(3, 3, 4, 8) * jnp.array([1.0, 3.0, 9.0])[:, None, None]


def experts(p, x):
    """Experts in scanned layers with a trailing batch axis, and in a ragged matmul with rows outside the groups."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(jnp.einsum("ebd,edf->ebf", x, w)), None), x, p["scanned"])
    x = jax.vmap(jnp.matmul, in_axes=(0, 2))(x, p["last"])
    return jax.lax.ragged_dot(x.reshape(-1, 8), p["ragged"], SIZES)


def einsum(w, x):
    return jnp.einsum("efd,ebd->ebf", w, x)


def grouped(w, x):
    return jax.lax.ragged_dot(x.reshape(-1, 8), w.swapaxes(1, 2), SIZES)


@pytest.mark.parametrize(("fn", "string"), [(einsum, "fp8_current"), (grouped, "fp8")])
def test_numbers_are_those_of_whole_tensors(fn, string):
    """Result and both gradients are those of three operands that are each quantized as one tensor."""
    config = {"quantization": string, "quant_backend": "native"} | SHARE
    w, x = normal(0, 3, 8, 8) * jnp.array([1.0, 2.0, 4.0])[:, None, None], X
    if fn is grouped:  # the rows after the last group are not part of a tensor
        x = x.reshape(-1, 8).at[10:].set(0).reshape(X.shape)
    q = jaxquant.quantize(lambda p, x: fn(p["w"], x), config)
    with state.frozen():
        y, back = jax.vjp(lambda w, x: q({"w": w}, q.init({"w": w}, x), x), w, x)
    grad = normal(4, *y.shape)
    grad = grad.at[10:].set(0) if fn is grouped else grad
    recipe: Any = RECIPES[string].recipe
    fake = lambda x, spec: dequantize(quantize(x, whole(spec), tuple(range(x.ndim))), x.dtype.name)  # noqa: E731
    expected, _ = jax.vjp(fn, fake(w, recipe.fwd.rhs), fake(x, recipe.fwd.lhs))
    backward = [recipe.resolve("dlhs", "rhs"), recipe.resolve("drhs", "lhs"), recipe.dlhs.lhs]
    _, pull = jax.vjp(fn, fake(w, backward[0]), fake(x, backward[1]))
    for one, other in zip((y, *back(grad)), (expected, *pull(fake(grad, backward[2]))), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.max(np.abs(other)))


def whole(spec):
    return TensorSpec(spec.dtype, "per_tensor", reciprocal=spec.reciprocal)


def test_state_is_one_for_all_experts_and_sees_all():
    q = jaxquant.quantize(experts, FP8 | SHARE)
    quant_state = q.init(P, X)
    assert {path: each["kernel_scale"].shape for path, each in nested(quant_state).items()} == {
        "scanned": (2, 1), "last": (1,), "ragged": (1,),
    }  # fmt: skip
    seen = jax.jit(jax.grad(lambda s: jnp.sum(q(P, s, X))))(quant_state)
    new = nested(state.update(quant_state, seen))
    amax = {path: np.max(np.abs(P[path]), axis=(1, 2, 3) if path == "scanned" else None) for path in P}
    for path, expected in amax.items():
        np.testing.assert_array_equal(new[path]["kernel_amax_history"][..., 0], recorded(expected))
    other = jaxquant.quantize(experts, FP8)
    assert nested(other.init(P, X))["ragged"]["kernel_scale"].shape == (3, 1)
    with pytest.raises(ValueError, match="shared by all experts, but quantization_share_expert_scales is false"):
        other(P, quant_state, X)
    with pytest.raises(ValueError, match="separate for each expert, but quantization_share_expert_scales is true"):
        q(P, other.init(P, X), X)


def test_converted_kernels_have_one_scale_and_the_bits_of_training():
    q, own = jaxquant.quantize(experts, FP8 | SHARE), jaxquant.quantize(experts, FP8)
    quant_state = filled(q.init(P, X))
    converted = q.convert(P, quant_state, X)
    assert {path: kernel.scale.shape for path, kernel in converted.items()} == {
        "scanned": (2, 1, 1, 1), "last": (1, 1, 1), "ragged": (1, 1, 1),
    }  # fmt: skip
    np.testing.assert_array_equal(jax.jit(q)(converted, {}, X), jax.jit(q)(P, quant_state, X))
    with pytest.raises(ValueError, match="one scale for all experts, but quantization_share_expert_scales is false"):
        own(converted, {}, X)


def test_what_cannot_share_is_refused():
    with pytest.raises(ValueError, match="quantization_share_expert_scales True is not read by quantization 'int8'; r"):
        jaxquant.QuantConfig(quantization="int8", quantization_share_expert_scales=True)
