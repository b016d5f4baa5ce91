"""N:M sparsity: the mask, its schedule against a plain Python loop, its state, and evaluation with it."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import maybe_quantize_model, state
from jaxquant.core.recipe import SparsitySpec
from jaxquant.ops.sparsity import initial_state, magnitude_mask, sparsify
from jaxquant.state.table import make_state

OPTIMIZED = False

SPEC = SparsitySpec(2, 4, start_step=3, update_step=2)


def python_mask(w: np.ndarray, n: int, m: int) -> np.ndarray:
    """n largest of every m along axis 0."""
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


def test_ties_keep_exactly_n():
    assert (magnitude_mask(jnp.ones((8, 3)), SparsitySpec(2, 4, 0, 1), (0,)).sum(0) == 4).all()


def test_schedule_and_state_are_those_of_a_python_loop():
    kept = initial_state(jnp.ones((8, 3)), SPEC, (0,))
    mask = np.ones((8, 3), bool)

    @jax.jit
    def run(w, kept):
        out, pull = jax.vjp(lambda a, s: sparsify(SPEC, (0,), a, s), w, kept)
        return out, *pull(jnp.ones_like(out))

    for step in range(9):
        w = jax.random.normal(jax.random.key(step), (8, 3))
        out, grad, seen = run(w, kept)
        np.testing.assert_array_equal(out, np.where(mask, w, 0))
        assert (int((~mask).sum()) == 12) == (step >= 3)
        if step + 1 >= 3 and (step + 1 - 3) % 2 == 0:
            mask = python_mask(np.asarray(w), 2, 4)
        np.testing.assert_array_equal(grad, np.ones((8, 3)))  # masked weights can come back
        kept = updated(kept, seen)
        assert float(kept["step"]) == step + 1
        np.testing.assert_array_equal(kept["mask"].astype(bool), mask)


def updated(kept, seen):
    new = state.update(*(make_state({"sparsity": fields}) for fields in (kept, seen)))
    return state.rows_of(new)["sparsity"]


def test_two_uses_of_a_weight_count_one_step():
    kept = initial_state(jnp.ones((8, 3)), SPEC, (0,))
    new = updated(kept, {"step": jnp.float32(2.0), "mask": 2 * kept["mask"], "uses": jnp.float32(2)})
    assert float(new["step"]) == 1
    np.testing.assert_array_equal(new["mask"], kept["mask"])
    assert float(updated(new, jax.tree.map(jnp.zeros_like, new))["step"]) == 1


def test_training_saves_the_mask_and_evaluation_uses_it():
    config = {
        "quantization": "fp8_full",
        "quant_backend": "native",
        "weight_sparsity_n": 2,
        "weight_sparsity_m": 4,
        "weight_sparsity_start_step": 2,
        "weight_sparsity_update_step": 2,
    }
    x = jax.random.normal(jax.random.key(0), (6, 16))
    model = maybe_quantize_model(nn.Dense(8), config, x)
    params, quant = state.split(jax.jit(model.init)(jax.random.key(1), x))

    def loss(params, quant):
        return (model.apply(state.merge(params, quant), x) ** 2).mean()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    evaluate = jax.jit(loss)
    for i in range(6):
        before = evaluate(params, quant)
        value, (grads, seen) = step(params, quant)
        # Evaluating after step n is the loss of step n + 1 on the same batch.
        np.testing.assert_allclose(before, value, rtol=1e-6)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        quant = state.update(quant, seen)
        (saved,) = state.rows_of(quant).values()
        zeros = int((saved["mask"] == 0).sum())
        assert zeros == (64 if i >= 1 else 0)  # the mask of the next step
