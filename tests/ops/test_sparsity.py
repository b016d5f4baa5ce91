"""N:M sparsity: the mask, and training and evaluation with the mask."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import maybe_quantize_model, state
from jaxquant.core.recipe import SparsitySpec
from jaxquant.ops.sparsity import initial_state, magnitude_mask
from jaxquant.state.table import make_state
from tests.trace.functions import normal

OPTIMIZED = False


def python_mask(w: np.ndarray, n: int, m: int) -> np.ndarray:
    """Return the mask of the n largest of every m elements along axis 0."""
    mask = np.zeros(w.shape, bool)
    for start in range(0, w.shape[0], m):
        for column in range(w.shape[1]):
            group = np.abs(w[start : start + m, column])
            mask[start + np.argsort(-group, kind="stable")[:n], column] = True
    return mask


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4)])
def test_mask_runs_along_the_contraction(n, m):
    w = np.asarray(jax.random.normal(jax.random.key(0), (16, 6)))
    spec = SparsitySpec(n, m, 0, 1)
    np.testing.assert_array_equal(magnitude_mask(jnp.asarray(w), spec, (0,)), python_mask(w, n, m))
    np.testing.assert_array_equal(magnitude_mask(jnp.asarray(w.T), spec, (1,)), python_mask(w, n, m).T)
    folded = magnitude_mask(jnp.asarray(w.reshape(4, 4, 6)), spec, (0, 1))
    np.testing.assert_array_equal(folded, python_mask(w, n, m).reshape(4, 4, 6))
    # Of equal numbers, n are selected.
    assert (magnitude_mask(jnp.ones((8, 3)), spec, (0,)).sum(0) == 8 * n // m).all()


def test_two_uses_of_a_weight_count_one_step_and_none_counts_no_step():
    kept = initial_state(jnp.ones((8, 3)), SparsitySpec(2, 4, 3, 2), (0,))
    twice = {"step": jnp.float32(2), "mask": 2 * kept["mask"], "uses": jnp.float32(2)}
    state_of = lambda fields: make_state({"sparsity": fields})  # noqa: E731
    once = state.update(state_of(kept), state_of(twice))
    for new in (once, state.update(once, state.no_observation(once))):
        found = state.rows_of(new)["sparsity"]
        assert float(found["step"]) == 1
        np.testing.assert_array_equal(found["mask"], kept["mask"])


def test_training_saves_the_mask_and_evaluation_uses_it():
    sparsity = {"n": 2, "m": 4, "start_step": 2, "update_step": 2}
    config = {"quantization": "fp8_full"} | {f"weight_sparsity_{name}": value for name, value in sparsity.items()}
    x = jax.random.normal(jax.random.key(0), (6, 16))
    model = maybe_quantize_model(nn.Dense(8), config, x)
    params, quant = state.split(jax.jit(model.init)(jax.random.key(1), x))
    loss = lambda params, quant: (model.apply(state.merge(params, quant), x) ** 2).mean()  # noqa: E731
    step, evaluate = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), jax.jit(loss)
    mask = np.ones((16, 8), bool)
    for i in range(5):
        before = evaluate(params, quant)
        value, (grads, seen) = step(params, quant)
        # Evaluating after step n is the loss of step n + 1 on the same batch.
        np.testing.assert_allclose(before, value, rtol=1e-6)
        quant = state.update(quant, seen)
        (saved,) = state.rows_of(quant).values()
        if i in (1, 3):  # the next step's mask is computed from these weights; a masked weight can become active again
            mask = python_mask(np.asarray(params["kernel"]), 2, 4)
        np.testing.assert_array_equal(saved["mask"].astype(bool), mask)
        assert all((grad != 0).all() for grad in jax.tree.leaves(grads))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


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
    quant = q.init(p, x)
    masks = state.rows_of(quant)["experts/sparsity"]
    assert {name: leaf.shape for name, leaf in masks.items()} == {"mask": (3, 8, 4), "step": (3,), "uses": (3,)}
    alone = jaxquant.quantize(lambda p, x: x @ p["w"], SPARSE)
    out, seen = jax.value_and_grad(lambda s: jnp.sum(q(p, s, x)))(quant)
    for expert in range(3):
        one = {"w": p["experts"]["w"][expert]}
        np.testing.assert_array_equal(q(p, quant, x)[expert], jax.jit(alone)(one, alone.init(one, x[0]), x[expert]))
    assert jnp.isfinite(out)
    new = state.rows_of(state.update(quant, seen))["experts/sparsity"]
    assert new["step"].tolist() == [1, 1, 1]


NO_ROOM = {"weight_sparsity_m": 8, "weight_sparsity_start_step": 3}


@pytest.mark.parametrize(
    ("fn", "sizes", "options", "error", "text"),
    [
        (lambda p, x: x @ (p["w"] * p["g"]), ((8, 8), (8,)), {}, NotImplementedError, "is the result of mul; set w"),
        (
            lambda p, x: x @ p["w"][:, :8] + x @ p["w"][:, 8:],
            ((8, 16),),
            {},
            NotImplementedError,
            "is used in parts or m",
        ),
        (lambda p, x: (x @ (p["w"] * 2)) @ (p["w"] * 2).T, ((8, 8),), {}, NotImplementedError, "is used in parts or m"),
        (lambda p, x: x @ p["w"], ((20, 4),), NO_ROOM, ValueError, "weight_sparsity_m 8 does not divide"),
    ],
)
def test_what_has_no_mask_is_refused(fn, sizes, options, error, text):
    params = {name: normal(0, *size) for name, size in zip("wg", sizes, strict=False)}
    with pytest.raises(error, match=text):
        jaxquant.quantize(fn, SPARSE | options).init(params, normal(2, 2, sizes[0][0]))
