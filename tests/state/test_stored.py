"""Quant state that is stored holds no bins, and comes back whole; what others stored comes back too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxquant import RECIPES, maybe_quantize_model, state
from jaxquant.core.quant_state import flat
from jaxquant.ops import initial_state

VARIABLES = flat(initial_state(RECIPES["fp8"].recipe))
TRAINED = {
    "dense": {"Fp8DirectDotGeneralOp_0": {**VARIABLES, "input_amax_history": jnp.arange(1024.0) / 7}},
    "layers": {"op": jax.tree.map(lambda leaf: jnp.stack([leaf, 3 * leaf]), VARIABLES)},
}


def names(tree):
    return {path[-1].key for path, _ in jax.tree.leaves_with_path(tree)}


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_what_is_stored_is_scales_and_histories_as_flax_has_them():
    stored = state.strip_bins(TRAINED)
    tensors = ("input", "kernel", "output_grad")
    assert names(stored) == {f"{tensor}_{field}" for tensor in tensors for field in ("scale", "amax_history")}
    assert nbytes(stored) == 3 * 3 * 4 * 1025  # three tensors of three layers
    assert nbytes(TRAINED) - nbytes(stored) == 3 * 3 * 4 * 3 * 2048


def test_stored_and_restored_it_has_lost_no_bit(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state.strip_bins(TRAINED))
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "state", state.strip_bins(jax.eval_shape(lambda: TRAINED)))
    jax.tree.map(np.testing.assert_array_equal, state.with_bins(found), TRAINED)
    jax.tree.map(np.testing.assert_array_equal, state.with_bins(TRAINED), TRAINED)
    jax.tree.map(np.testing.assert_array_equal, state.from_flax(state.strip_bins(TRAINED)), TRAINED)


def test_shapes_are_stripped_and_restored_as_arrays_are():
    shapes = jax.eval_shape(lambda: TRAINED)
    stored = jax.eval_shape(lambda: state.strip_bins(TRAINED))
    assert state.strip_bins(shapes) == stored
    assert state.with_bins(stored) == shapes
    assert jax.eval_shape(state.with_bins, stored) == shapes


def test_state_without_bins_passes_through():
    sparse = {"op": {"sparsity_uses": jnp.ones(()), "sparsity_mask": jnp.ones((4, 4))}}
    assert state.strip_bins(sparse) == sparse == state.with_bins(sparse)
    flax_mode = state.strip_bins(TRAINED)
    assert names(state.with_bins(flax_mode, like=flax_mode)) == names(flax_mode)
    assert state.strip_bins({}) == {} == state.with_bins({})


def test_state_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"quant state has 'dense' and the model's has layers; restore it into"):
        state.with_bins(state.strip_bins(TRAINED), {"layers": TRAINED["layers"]})


@pytest.mark.parametrize("whole", [False, True])
def test_state_that_was_kept_in_another_dtype_comes_back_in_float32(whole):
    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), TRAINED if whole else state.strip_bins(TRAINED))
    found = state.with_bins(stored)
    assert names(found) == names(TRAINED)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}
    history = found["dense"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    np.testing.assert_array_equal(history, stored["dense"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"])


def test_bins_lie_where_those_of_the_model_do():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), TRAINED)
    found = state.with_bins(state.strip_bins(TRAINED), like)
    assert found["layers"]["op"]["input_amax_bins"].sharding == sharding
    jax.tree.map(np.testing.assert_array_equal, found, TRAINED)


class Net(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0))])

    def __call__(self, x):
        return self.layers[0](x)


def quant_state(model):
    return nnx.to_pure_dict(nnx.state(model, state.QuantState))


def test_an_nnx_model_between_micro_batches_is_stored_whole_or_not_at_all():
    """Its bins then hold what was observed; when the optimizer has stepped, they are zeros again."""
    config = {"quantization": "fp8", "amax_history_length": 4}
    model = maybe_quantize_model(Net(), config, jnp.ones((4, 8)))
    optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.sgd(0.1), 2), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (4, 8))

    @nnx.jit
    def step(model, optimizer, x):
        state.apply_gradients(model, optimizer, state.grad(lambda model: (model(x) ** 2).sum())(model))

    step(model, optimizer, 9 * x)
    with pytest.raises(ValueError, match=r"'input_amax_bins' holds what micro-batches observed .*; store it after"):
        state.strip_bins(quant_state(model))
    step(model, optimizer, x)
    stored = state.strip_bins(quant_state(model))
    assert not any(name.endswith("amax_bins") for name in names(stored))
    fresh = maybe_quantize_model(Net(), config, jnp.ones((4, 8)))
    nnx.update(fresh, state.with_bins(stored))
    jax.tree.map(np.testing.assert_array_equal, quant_state(fresh), quant_state(model))
    assert quant_state(fresh)["layers"][0]["quant_kernel"]["input_amax_history"][0] == float(jnp.abs(9 * x).max())


def test_integer_keys_that_orbax_restored_as_text_are_taken_or_named(tmp_path):
    own = quant_state(maybe_quantize_model(Net(), {"quantization": "fp8"}, jnp.ones((4, 8))))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state.strip_bins(own))
        checkpointer.wait_until_finished()
        text = checkpointer.restore(tmp_path / "state")
    assert list(text["layers"]) == ["0"]
    jax.tree.map(np.testing.assert_array_equal, state.with_bins(text, own), own)
    for pair in ((own, state.with_bins(text)), (state.with_bins(text), own)):
        for combine in (state.update, state.accumulate):
            with pytest.raises(ValueError, match=r"at 'layers/0' .* as orbax restores .* nnx.restore_int_paths"):
                combine(*pair)
