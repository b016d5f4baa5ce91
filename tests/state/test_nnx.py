"""Quant state of NNX models through real optimizer steps, compared with a Python loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxquant import maybe_quantize_model, state
from jaxquant.state.nnx import Gradients
from tests.states import nested, recorded

XS = [jax.random.normal(jax.random.key(i), (4, 8)) * scale for i, scale in enumerate((1.0, 9.0, 0.1))]
LENGTH = 4
FP8 = {"quantization": "fp8", "amax_history_length": LENGTH}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)])
        self.scale = nnx.Param(jnp.ones(8))

    def __call__(self, x):
        return self.layers[0](x) * self.scale


def loss(model, x):
    return (model(x) ** 2).sum()


def step(model, optimizer, x):
    value, grads = state.value_and_grad(loss)(model, x)
    state.apply_gradients(model, optimizer, grads)
    return value


def op_state(model):
    tree = nested(nnx.to_pure_dict(nnx.state(model, state.QuantState)))
    while "quant_kernel" not in tree:
        (tree,) = tree.values()
    return {name: np.asarray(value) for name, value in tree["quant_kernel"].items()}


def setup(kind=Net, config=FP8):
    model = maybe_quantize_model(kind(nnx.Rngs(0)), config, XS[0])
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def test_what_reads_the_same_names_advances_the_same():
    """nnx.DiffState by hand, auxiliary outputs and keyword arguments have the same gradients as the helper."""
    model, _ = setup()
    _, expected = state.value_and_grad(loss)(model, XS[0])
    with state.by_hand():
        by_hand = nnx.grad(loss, argnums=nnx.DiffState(0, (nnx.Param, state.QuantState)))(model, XS[0])
    by_hand = Gradients(*nnx.state(by_hand, nnx.Param, state.QuantState))
    with_aux, aux = state.grad(lambda x, model, factor: (factor * loss(model, x), "aux"), argnums=1, has_aux=True)(
        XS[0], model, factor=1.0
    )
    (both,) = state.grad(loss, argnums=(0,))(model, XS[0])
    assert aux == "aux"
    for grads in (by_hand, with_aux, both):
        assert jax.tree.structure(grads) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, grads, expected)


def test_only_the_factors_of_a_tuned_model_are_trained():
    model = maybe_quantize_model(nnx.LoRALinear(8, 8, lora_rank=2, rngs=nnx.Rngs(0)), FP8, XS[0])
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    kernel, factor = (np.asarray(value[...]) for value in (model.kernel, model.lora.lora_b))
    grads = state.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, XS[0])
    state.apply_gradients(model, optimizer, grads)
    np.testing.assert_array_equal(model.kernel[...], kernel)
    assert (model.lora.lora_b[...] != factor).any()
    assert op_state(model)["input_amax_history"][0] == recorded(jnp.abs(XS[0]).max())


def two_layers():
    return maybe_quantize_model(nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2))), FP8, XS[0])


def test_gradients_and_optimizers_that_do_not_fit_are_an_error_and_change_nothing():
    (model, optimizer), two = setup(), two_layers()
    with_state = nnx.Optimizer(model, optax.sgd(0.1), wrt=(nnx.Param, state.QuantState))
    last = nnx.All(nnx.Any(*(nnx.Param, state.QuantState)), nnx.PathContains(1))
    of_last = nnx.Optimizer(two, optax.sgd(0.1), wrt=nnx.All(nnx.Param, nnx.PathContains(1)))
    with state.frozen():
        without = nnx.grad(loss)(model, XS[0])
    with state.by_hand():
        some = nnx.grad(loss, argnums=nnx.DiffState(0, last))(two, XS[0])
    for each, opt, grads, message in (
        (model, optimizer, without, r"'layers/0', but the gradients have no quant state; differentiate"),
        (model, with_state, state.grad(loss)(model, XS[0]), r"updates quant state, such as 'layers/0', .*; .*wrt=nnx"),
        (two, of_last, some, r"at 'layers/0/quant_kernel/\w+'; .*the complete"),
    ):
        before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(each)))
        with pytest.raises(ValueError, match=message):
            state.apply_gradients(each, opt, grads)
        jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(each)), before)


def test_training_some_layers_advances_the_state_of_all():
    model = two_layers()
    first = nnx.All(nnx.Param, nnx.PathContains(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=first)
    kernels = [np.asarray(layer.kernel[...]) for layer in model.layers]
    hidden = model.layers[0](XS[0])
    grads = nnx.jit(state.grad(loss, argnums=nnx.DiffState(0, first)))(model, XS[0])
    state.apply_gradients(model, optimizer, grads)
    assert (model.layers[0].kernel[...] != kernels[0]).any()
    np.testing.assert_array_equal(model.layers[1].kernel[...], kernels[1])
    found = [op_state(layer)["input_amax_history"][0] for layer in model.layers]
    assert found == [recorded(jnp.abs(XS[0]).max()), recorded(jnp.abs(hidden).max())]


def test_a_gradient_taken_by_hand_is_asked_what_becomes_of_the_state():
    model, optimizer = setup()
    take = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, (nnx.Param, state.QuantState))))
    with pytest.raises(ValueError, match=r"'layers/0' .* without jaxquant\.state\.value_and_grad"):
        take(model, XS[0])
    with state.by_hand():
        grads = take(model, XS[0])
        with pytest.raises(ValueError, match="taken with respect to the kernel but not the quant state"):
            nnx.grad(loss)(model, XS[0])
    with pytest.raises(ValueError, match=r"without jaxquant\.state\.value_and_grad"):
        take(model, XS[0])
    state.apply_gradients(model, optimizer, grads)
    assert op_state(model)["input_amax_history"][0] == recorded(jnp.abs(XS[0]).max())


def test_a_gradient_of_an_input_is_told_of_frozen_first():
    model, _ = setup()
    saliency = jax.grad(lambda x: loss(model, x))
    with pytest.raises(ValueError, match=r"leaves out the quant state; .*, call the model under .*frozen\(\)"):
        saliency(XS[0])
    with state.frozen():
        assert saliency(XS[0]).any()


def test_a_frozen_teacher_stands_still_beside_a_student_that_advances():
    (student, optimizer), (teacher, _) = setup(), setup()

    def distil(student, x):
        hidden = student(x)
        with state.frozen():
            return ((hidden - teacher(hidden)) ** 2).sum()

    before = op_state(teacher)
    state.apply_gradients(student, optimizer, nnx.jit(state.grad(distil))(student, XS[0]))
    assert op_state(student)["input_amax_history"][0] == recorded(jnp.abs(XS[0]).max())
    jax.tree.map(np.testing.assert_array_equal, op_state(teacher), before)


def test_the_base_of_lora_is_not_taken_for_a_teacher():
    """Its kernel is not trained, but its state must still advance."""
    layers = [nnx.LoRALinear(8, 8, lora_rank=2, rngs=nnx.Rngs(0)) for _ in range(2)]
    model = maybe_quantize_model(nnx.Sequential(*layers), FP8, XS[0])
    with pytest.raises(ValueError, match=r"'layers/1' .* otherwise differentiate with jaxquant\.state\.value_and_grad"):
        nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, XS[0])


def test_advancing_between_micro_batches_loses_nothing():
    for first, second in ((XS[1], XS[0]), (XS[0], XS[1])):
        model, _ = setup()
        optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.sgd(0.0), 3), wrt=nnx.Param)
        step(model, optimizer, first)
        assert op_state(model)["input_amax_bins"].any()
        state.advance(model, state.grad(loss)(model, second))
        new = op_state(model)
        np.testing.assert_array_equal(new["input_amax_history"], [recorded(jnp.abs(XS[1]).max()), 0, 0, 0])
        assert not new["input_amax_bins"].any()
