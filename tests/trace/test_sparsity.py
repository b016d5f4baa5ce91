"""Weight sparsity in traced functions: a mask for each expert, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import state as quant_state
from tests.trace.functions import normal, shape

SPARSE = {
    "quantization": "fp8_full",
    "quant_backend": "native",
    "weight_sparsity_n": 2,
    "weight_sparsity_m": 4,
    "weight_sparsity_start_step": 0,
    "weight_sparsity_update_step": 2,
}


def test_each_expert_has_a_mask():
    fn = lambda p, x: jnp.einsum("ebk,ekn->ebn", x, p["experts"]["w"])  # noqa: E731
    p, x = {"experts": {"w": normal(0, 3, 8, 4)}}, normal(1, 3, 5, 8)
    q = jaxquant.quantize(fn, SPARSE)
    state = q.init(p, x)
    masks = quant_state.rows_of(state)["experts/sparsity"]
    assert {name: leaf.shape for name, leaf in masks.items()} == {"mask": (3, 8, 4), "step": (3,), "uses": (3,)}
    alone = jaxquant.quantize(lambda p, x: x @ p["w"], SPARSE)
    out, seen = jax.value_and_grad(lambda s: jnp.sum(q(p, s, x)))(state)
    for expert in range(3):
        one = {"w": p["experts"]["w"][expert]}
        np.testing.assert_array_equal(q(p, state, x)[expert], jax.jit(alone)(one, alone.init(one, x[0]), x[expert]))
    assert jnp.isfinite(out)
    new = quant_state.rows_of(quant_state.update(state, seen))["experts/sparsity"]
    assert new["step"].tolist() == [1, 1, 1]


def test_a_mask_of_a_shape_is_refused():
    q = jaxquant.quantize(lambda p, x: x @ p["w"], SPARSE)
    with pytest.raises(TypeError, match=r"weight_sparsity_start_step 0 at 'w'.*got a shape"):
        q.init({"w": shape(8, 8)}, shape(2, 8))
    later = jaxquant.quantize(lambda p, x: x @ p["w"], SPARSE | {"weight_sparsity_start_step": 3})
    assert quant_state.rows_of(later.init({"w": shape(8, 8)}, shape(2, 8)))["w/sparsity"]["mask"].shape == (8, 8)


def test_a_mask_of_two_parameters_is_refused():
    q = jaxquant.quantize(lambda p, x: x @ (p["w"] * p["g"]), SPARSE)
    with pytest.raises(NotImplementedError, match=r"not one parameter .mul."):
        q.init({"w": normal(0, 8, 8), "g": normal(1, 8)}, normal(2, 2, 8))


@pytest.mark.parametrize(
    ("fn", "w"),
    [
        (lambda p, x: x @ p["w"][:, :8] + x @ p["w"][:, 8:], (8, 16)),
        (lambda p, x: jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"][i]), x), (3, 8, 8)),
        (lambda p, x: (x @ (p["w"] * 2)) @ (p["w"] * 2).T, (8, 8)),
    ],
)
def test_one_mask_of_several_parts_is_refused(fn, w):
    q = jaxquant.quantize(fn, SPARSE | {"weight_sparsity_start_step": 1})
    with pytest.raises(
        NotImplementedError, match=r"at '(s\+)?w', whose weight is not one parameter \(\w+\), is read in parts or m"
    ):
        q.init({"w": normal(0, *w), "s": normal(1, 8)}, normal(2, 2, 8))
    multiple = jaxquant.quantize(lambda p, x: x @ (p["w"] * 2), SPARSE | {"weight_sparsity_start_step": 1})
    made = quant_state.rows_of(multiple.init({"w": normal(0, 8, 8)}, normal(2, 2, 8)))
    assert made["w/sparsity"]["mask"].shape == (8, 8)


def test_groups_that_do_not_divide_are_refused_where_the_layer_is_decided_on():
    params = {"in": {"kernel": shape(16, 20)}, "out": {"kernel": shape(20, 4)}}
    sparse = SPARSE | {"weight_sparsity_m": 8, "weight_sparsity_start_step": 3}
    with pytest.raises(ValueError, match="layer 'out': weight_sparsity_m 8 does not divide the contraction of size 20"):
        jaxquant.quantize(lambda p, x: x @ p["in"]["kernel"] @ p["out"]["kernel"], sparse).init(params, shape(2, 16))
