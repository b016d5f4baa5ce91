"""Weight sparsity and ``implementation`` in traced functions, beside the injected model and by hand."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxquant
from jaxquant import state as quant_state
from tests.trace.functions import normal, primitives, shape
from tests.trace.test_bits import assert_same_bits

SPARSE = {
    "quantization": "fp8_full",
    "quant_backend": "native",
    "weight_sparsity_n": 2,
    "weight_sparsity_m": 4,
    "weight_sparsity_start_step": 0,
    "weight_sparsity_update_step": 2,
}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.DenseGeneral((2, 4), name="up")(x)
        return x + nn.DenseGeneral(8, axis=(-2, -1), name="down")(nn.silu(y)), None


class Model(nn.Module):
    """Scanned layers whose stored axis is the second, and a layer alone."""

    @nn.compact
    def __call__(self, x):
        axes = {"params": 1, "_overwrite_with_gradient": 0}
        x, _ = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=2)(name="layers")(x, None)
        return nn.Dense(8, name="last")(x)


def flat(tree):
    """State by layer and name, without the names of Linen's op modules."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(p.key for p in path if "DotGeneral" not in p.key): leaf for path, leaf in leaves}


@pytest.mark.parametrize("start", [0, 1])
def test_steps_are_those_of_the_injected_model(start):
    config, model, x = SPARSE | {"weight_sparsity_start_step": start}, Model(), normal(1, 6, 8)
    injected = jaxquant.maybe_quantize_model(model, config, x)
    params, state = quant_state.split(jax.jit(injected.init)(jax.random.key(0), x))
    traced = jaxquant.quantize(lambda params, x: model.apply({"params": params}, x), config)
    own = traced.init(params, x)
    assert_same_bits(flat(state), flat(own))
    assert own["layers"]["down"]["sparsity_mask"].shape == (2, 2, 4, 8)
    kept = np.mean(np.asarray(own["last"]["sparsity_mask"], np.float32))
    assert kept == (0.5 if start == 0 else 1.0)

    @jax.jit
    def both(params, states):
        losses = (
            lambda params, state: jnp.mean(injected.apply(quant_state.merge(params, state), x) ** 2),
            lambda params, state: jnp.mean(traced(params, state, x) ** 2),
        )
        steps = [
            jax.value_and_grad(loss, argnums=(0, 1))(params, each) for loss, each in zip(losses, states, strict=True)
        ]
        states = [quant_state.update(each, seen) for each, (_, (_, seen)) in zip(states, steps, strict=True)]
        return [(value, grads) for value, (grads, _) in steps], states

    states, masks = [state, own], []
    for _ in range(3):
        (first, second), states = both(params, states)
        assert_same_bits(first, second)
        assert_same_bits(flat(states[0]), flat(states[1]))
        masks.append(np.asarray(states[1]["last"]["sparsity_mask"], np.float32))
        params = jax.tree.map(lambda weight, grad: weight - 5.0 * grad, params, second[1])
    assert masks[2].mean() == 0.5
    assert any((masks[0] != mask).any() for mask in masks[1:])


def test_each_expert_has_a_mask():
    fn = lambda p, x: jnp.einsum("ebk,ekn->ebn", x, p["experts"]["w"])  # noqa: E731
    p, x = {"experts": {"w": normal(0, 3, 8, 4)}}, normal(1, 3, 5, 8)
    q = jaxquant.quantize(fn, SPARSE)
    state = q.init(p, x)
    assert {name: leaf.shape for name, leaf in state["experts"].items()} == {
        "sparsity_mask": (3, 8, 4),
        "sparsity_step": (3,),
        "sparsity_uses": (3,),
    }
    alone = jaxquant.quantize(lambda p, x: x @ p["w"], SPARSE)
    out, seen = jax.value_and_grad(lambda s: jnp.sum(q(p, s, x)))(state)
    for expert in range(3):
        one = {"w": p["experts"]["w"][expert]}
        np.testing.assert_array_equal(q(p, state, x)[expert], jax.jit(alone)(one, alone.init(one, x[0]), x[expert]))
    assert jnp.isfinite(out)
    new = quant_state.update(state, seen)["experts"]
    assert new["sparsity_step"].tolist() == [1, 1, 1]


def test_a_mask_of_a_shape_is_refused():
    q = jaxquant.quantize(lambda p, x: x @ p["w"], SPARSE)
    with pytest.raises(TypeError, match=r"weight_sparsity_start_step 0 at 'w'.*got a shape"):
        q.init({"w": shape(8, 8)}, shape(2, 8))
    later = jaxquant.quantize(lambda p, x: x @ p["w"], SPARSE | {"weight_sparsity_start_step": 3})
    assert later.init({"w": shape(8, 8)}, shape(2, 8))["w"]["sparsity_mask"].shape == (8, 8)


def test_a_mask_of_two_parameters_is_refused():
    q = jaxquant.quantize(lambda p, x: x @ (p["w"] * p["g"]), SPARSE)
    with pytest.raises(NotImplementedError, match=r"not one parameter .mul."):
        q.init({"w": normal(0, 8, 8), "g": normal(1, 8)}, normal(2, 2, 8))


def test_one_weight_in_two_layouts_is_refused():
    q = jaxquant.quantize(lambda p, x: (x @ p["w"]) @ p["w"].T, SPARSE)
    with pytest.raises(NotImplementedError, match="weight_sparsity at 'w', whose weight is read in two layouts"):
        q.init({"w": normal(0, 8, 8)}, normal(2, 2, 8))


def test_the_implementation_reaches_the_op(monkeypatch):
    asked = []
    from jaxquant.backends.native_backend import ops

    real = ops.dot_general

    def noting(*args, implementation=None, **kwargs):
        asked.append(implementation)
        return real(*args, implementation=implementation, **kwargs)

    monkeypatch.setattr(ops, "dot_general", noting)
    config = {"quantization": "fp8_full", "quant_backend": "native", "implementation": "xla"}
    q = jaxquant.quantize(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"], config)
    jaxpr = jax.make_jaxpr(lambda p, x: q(p, {}, x))({"a": normal(0, 8, 8), "b": normal(1, 8, 8)}, normal(2, 2, 8))
    assert asked == ["xla", "xla"]
    assert "dot_general" in primitives(jaxpr.jaxpr)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"quantization": "intmp", "quant_cfg_path": "tiles.json"},
            r"layer 'out': tile_size 16 does not divide contraction axis 0 of size 20 \(shape \(20, 4\)\)",
        ),
        (
            SPARSE | {"weight_sparsity_m": 8, "weight_sparsity_start_step": 3},
            r"layer 'out': weight_sparsity_m 8 does not divide the contraction of size 20 \(shape \(20, 4\)\)",
        ),
    ],
)
def test_tiles_and_groups_that_do_not_divide_are_refused_where_the_layer_is_decided_on(
    config, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiles.json").write_text('{"__default__": {"w_bits": 8, "a_bits": 8, "tile_size": 16}}')
    params = {"in": {"kernel": shape(16, 20)}, "out": {"kernel": shape(20, 4)}}
    q = jaxquant.quantize(lambda p, x: x @ p["in"]["kernel"] @ p["out"]["kernel"], config | {"quant_backend": "native"})
    with pytest.raises(ValueError, match=text):
        q.init(params, shape(2, 16))
    model = nn.Sequential([nn.Dense(20), nn.Dense(4)])
    with pytest.raises(ValueError, match=text.replace("out", "layers_1")):
        jaxquant.maybe_quantize_model(model, config | {"quant_backend": "native"}, shape(2, 16))
    rngs = nnx.Rngs(0)
    chain = nnx.Sequential(nnx.Linear(16, 20, rngs=rngs), nnx.Linear(20, 4, rngs=rngs))
    with pytest.raises(ValueError, match=text.replace("out", "layers/1")):
        jaxquant.maybe_quantize_model(chain, config | {"quant_backend": "native"}, shape(2, 16))
