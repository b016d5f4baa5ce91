"""Compositions: forward, dlhs and drhs from different rows, each operand quantized from the float tensor."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.recipes import RECIPES, lookup
from jaxquant.core.delayed import advance
from jaxquant.core.recipe import FORWARD, Recipe
from jaxquant.ops import dot_general, initial_state

OPTIMIZED = False

M, K, N = 256, 128, 384
NUMBERS = (((1,), (0,)), ((), ()))
KEY = jax.random.key(7)


def recipe(name, **options) -> Recipe:
    found = QuantConfig.from_any({"quantization": name, **options}).recipe()
    assert found is not None
    return found


def composed(fwd, dlhs=None, drhs=None, **options) -> Recipe:
    return recipe({"fwd": fwd, "dlhs": dlhs, "drhs": drhs}, **options)


def operands():
    shapes = zip(jax.random.split(jax.random.key(0), 3), ((M, K), (K, N), (M, N)), strict=True)
    return tuple(jax.random.normal(key, shape, "bfloat16") for key, shape in shapes)


def step(chosen: Recipe, state=None):
    """Return output, gradients and what was observed, of one step with a key."""
    state = initial_state(chosen) if state is None else state

    @jax.jit
    def run(x, w, g, state):
        out, back = jax.vjp(lambda x, w, s: dot_general(x, w, NUMBERS, recipe=chosen, state=s, key=KEY), x, w, state)
        return out, *back(g.astype(out.dtype))

    return run(*operands(), state)


def original(name: str) -> Recipe:
    """Return a row beside a float forward: what its gradients are when made of the float tensors."""
    return composed(None, name, name)


def assert_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("fwd", ["fp8", "mxfp8", "nvfp4", "int8w"])
def test_the_forward_is_that_of_its_row_to_the_bit(fwd):
    """Whatever the gradients are, and with the arithmetic of its row."""
    assert_bits(step(composed(fwd, "quartet2", "int8"))[0], step(recipe(fwd))[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "quartet2"])
def test_a_gradient_does_not_depend_on_the_forward_beside_it(name):
    """Its operands are made of the float tensor: of a forward's int4 codes it would have the error, 17 % and more."""
    _, dlhs, drhs, _ = step(original(name))
    for fwd in ("mxfp8", "int4"):
        assert_bits(step(composed(fwd, name, "fp8_block"))[1], dlhs)
        assert_bits(step(composed(fwd, "fp8_block", name))[2], drhs)


def test_three_times_one_row_is_that_row():
    for name in {row.recipe.name for row in RECIPES.values() if row.recipe}:
        whole = composed(name, name, name)
        assert dataclasses.replace(whole, name=name) == recipe(name)
        assert lookup(whole.name).backends == RECIPES[name].backends


@pytest.mark.parametrize(
    ("strings", "tensors"),
    [
        (("fp8", "quartet2", "quartet2"), {"input", "kernel"}),
        (("quartet2", "fp8", "fp8"), {"input", "kernel", "output_grad"}),
        (("mxfp8", None, "fp8"), {"input", "output_grad"}),
        (("fp8_current", "quartet2", "quartet2"), set()),
    ],
)
def test_histories_are_those_of_the_delayed_operands_and_advance(strings, tensors):
    whole = composed(*strings, **({"amax_history_length": 4} if tensors else {}))
    state = initial_state(whole)
    assert set(state) == tensors
    amaxes = dict(
        zip(("input", "kernel", "output_grad"), map(lambda x: float(jnp.max(jnp.abs(x))), operands()), strict=True)
    )
    seen = step(whole, state=state)[3]
    after = {name: advance(state[name], seen[name]) for name in state}
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor["amax_history"], [amaxes[name], 0, 0, 0])
    assert step(whole, state=after)[0].shape == (M, N)


def test_a_delayed_gradient_is_shared_by_those_who_scale_by_it_alone():
    """fp8's dlhs beside fp8_current's drhs: each as in its own row, with a history that is far off."""
    whole, row = composed("fp8", "fp8", "fp8_current"), recipe("fp8")
    old = initial_state(row)
    past = {name: {**each, "amax_history": each["amax_history"].at[0].set(1e3)} for name, each in old.items()}
    got, delayed, current = step(whole, state=past), step(row, state=past), step(recipe("fp8_current"))
    assert_bits(got[1], delayed[1])
    assert_bits(got[2], current[2])
    assert not np.array_equal(np.asarray(got[2], np.float32), np.asarray(delayed[2], np.float32))


def test_two_rows_with_histories_of_one_tensor_are_refused():
    with pytest.raises(
        ValueError, match="'fp8' of fwd and 'int8_delayed' of dlhs scale one tensor, the kernel, by its"
    ):
        composed("fp8", "int8_delayed")


def test_flax_s_op_is_not_composed():
    with pytest.raises(ValueError, match="amax_init 'flax' is flax's own op of three matmuls"):
        composed("fp8", "fp8", "fp8_current", amax_init="flax")
    assert composed("fp8", "fp8", "fp8", amax_init="flax").matches_flax


def test_a_tensor_format_is_the_forward_s():
    with pytest.raises(NotImplementedError, match="the weight of dlhs in the tensor format q4_0 is the forward's"):
        composed("fp8", "ggml_q4_0")
    assert composed("ggml_q4_0", "ggml_q4_0", "quartet2").dlhs.rhs == FORWARD


def test_options_of_a_row_change_its_matmuls_alone():
    plain, six = (composed("fp8_current", "nvfp4", "nvfp4", four_over_six=each) for each in (False, True))
    assert six.fwd == plain.fwd
    assert six.dlhs != plain.dlhs
    assert composed("mxfp8", "mxfp8", "int8", quantization_local_shard_count=4).drhs.shards == 4
