"""Quant state as tables: few arrays, access by name, sharding, storage, and conversion from other formats."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxquant
from jaxquant import state
from jaxquant.ops import initial_state
from jaxquant.state.table import make_state
from jaxquant.training.layers import DecoderConfig
from jaxquant.training.model import Decoder
from tests.states import edited, nested

FP8 = {"quantization": "fp8", "amax_history_length": 4, "quant_backend": "native"}
SPARSE = FP8 | {
    "rules": [{"path": "last", "recipe": "fp8_full"}],
    "weight_sparsity_n": 2,
    "weight_sparsity_m": 4,
    "weight_sparsity_start_step": 1,
}
OWG = state.OVERWRITE_WITH_GRADIENT
X = jax.random.normal(jax.random.key(0), (8, 16))
PARAMS = {
    "one": jax.random.normal(jax.random.key(1), (16, 16)) / 4,
    "stack": jax.random.normal(jax.random.key(2), (3, 16, 16)) / 4,
    "last": jax.random.normal(jax.random.key(3), (16, 16)) / 4,
}


def function(params: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.tanh(x @ params["one"]), params["stack"])
    return x @ params["last"]


def trained(config: Any = FP8) -> Any:
    """Return the state of the function after a step."""
    run = jaxquant.quantize(function, config)
    start = run.init(PARAMS, X)
    seen = jax.jit(jax.grad(lambda both: (run(*both, X) ** 2).mean()))((PARAMS, start))[1]
    return state.update(start, seen)


def assert_same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("config", [FP8, FP8 | {"amax_init": "flax"}, SPARSE])
def test_rows_are_read_by_name_and_make_the_same_tables(config):
    tables = trained(config)
    rows = state.rows_of(tables)
    assert rows["one/input"]["amax_history"].shape == (4,)
    assert rows["stack/kernel"]["amax_history"].shape == (3, 4)  # of layers in a scan
    assert float(rows["one/input"]["amax_history"][0]) >= float(jnp.abs(X).max())
    assert_same(make_state(rows), tables)
    shapes = jax.eval_shape(lambda: tables)
    assert jax.tree.structure(make_state(state.rows_of(shapes))) == jax.tree.structure(tables)
    assert_same(jax.jit(lambda tables: make_state(state.rows_of(tables)))(tables), tables)
    if config is SPARSE:
        assert rows["last/sparsity"].keys() == {"step", "mask", "uses"}
        assert rows["last/sparsity"]["mask"].shape == (16, 16)


def test_a_model_of_twelve_layers_has_few_arrays():
    shape: Any = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 8, "num_layers": 12, "scan_layers": False}
    decoder, tokens = Decoder(DecoderConfig(64, 32, 64, **shape)), jnp.zeros((1, 8), jnp.int32)
    quantized = jaxquant.maybe_quantize_model(decoder, FP8, tokens)
    _, tables = state.split(jax.eval_shape(quantized.init, jax.random.key(0), tokens))
    assert len(state.rows_of(tables)) == 252
    assert len(jax.tree.leaves(tables)) <= 30


def test_a_stack_is_sharded_as_its_rows():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    along, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))
    recipe: Any = jaxquant.RECIPES["fp8"].recipe
    row = jax.tree.map(lambda leaf: leaf[None], initial_state(recipe)["input"])
    for shardings, spec in (((along, along), (None, "x")), ((along, replicated), ())):
        rows = {str(number): jax.device_put(row, each) for number, each in enumerate(shardings)}
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), rows)
        for tables in (make_state(rows), make_state(shapes)):
            assert {leaf.sharding for leaf in jax.tree.leaves(tables)} == {NamedSharding(mesh, PartitionSpec(*spec))}
            found = {leaf.sharding for leaf in jax.tree.leaves(state.rows_of(tables))}
            assert found == {NamedSharding(mesh, PartitionSpec(*spec[1:]))}


class Net(nn.Module):
    """Two layers; the second may be skipped."""

    @nn.compact
    def __call__(self, x: jax.Array, is_whole: bool = True) -> jax.Array:
        x = nn.Dense(16, name="first")(x)
        last = nn.Dense(16, name="last")
        return last(x) if is_whole or self.is_initializing() else x


@pytest.mark.parametrize("is_warm", [False, True])
def test_stored_and_restored_it_has_lost_no_bit(is_warm, tmp_path):
    """Also warm state, restored into the variables of ``model.init``; the values determine which rows are warm."""
    model: Any = jaxquant.maybe_quantize_model(Net(), FP8, X)
    template = model.init(jax.random.key(0), X)
    grads = jax.grad(lambda variables: (model.apply(variables, X, False) ** 2).mean())(template)
    params, quant_state = state.split(template)
    quant_state = state.update(quant_state, state.split(grads)[1])
    variables = state.merge(params, state.warm(quant_state) if is_warm else quant_state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", variables)
        checkpointer.wait_until_finished()
        by_orbax = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: template))
    by_flax = serialization.from_bytes(template, serialization.to_bytes(variables))
    for found in (by_orbax, by_flax):
        assert_same(found["params"], variables["params"])
        found = state.split(found)[1]
        assert_same(state.warm(found) if is_warm else found, state.split(variables)[1])
    fields = serialization.to_state_dict(quant_state)["tables"]
    assert any(name.startswith("first/") for name in fields)
    other = {"tables": {name: each for name, each in fields.items() if not name.startswith("first/")}}
    with pytest.raises(ValueError, match=r"quant state 'first/.*' is only in the model"):
        serialization.from_state_dict(quant_state, other)


@pytest.mark.parametrize(("rows", "dtype"), [(1, jnp.float32), (3, jnp.bfloat16)])
def test_nested_state_of_before_is_read(rows, dtype):
    tables = trained()
    old = nested(tables)
    for layer in old.values():
        for name in [name for name in layer if name.endswith("amax_bins")]:
            layer[name] = jnp.zeros((*layer[name].shape[:-2], rows, 2048))
    old = jax.tree.map(lambda leaf: leaf.astype(dtype), old)
    found = state.from_flax(old, like=tables)
    assert_same(found, jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), tables))
    shapes = jax.eval_shape(lambda: tables)
    assert state.from_flax(jax.eval_shape(lambda: old), shapes) == shapes


def test_flaxs_own_state_is_read():
    theirs = nn.Dense(8, dot_general_cls=nn.Fp8DirectDotGeneralOp).init(jax.random.key(0), X)
    saved = jax.tree.map(lambda leaf: leaf + jnp.arange(float(leaf.size)).reshape(leaf.shape), theirs[OWG])
    for mode in ("flax", "warmup"):
        model = jaxquant.maybe_quantize_model(nn.Dense(8), {"quantization": "fp8", "amax_init": mode}, X)
        found = nested(state.from_flax(saved, like=state.split(model.init(jax.random.key(0), X))[1]))
        for name, value in saved["Fp8DirectDotGeneralOp_0"].items():
            np.testing.assert_array_equal(found["Fp8DirectDotGeneralOp_0"][name], value)


def test_integer_keys_that_were_stored_as_text_are_taken():
    plain = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 16, rngs=nnx.Rngs(1)))
    model = jaxquant.maybe_quantize_model(plain, FP8, X)
    own = nnx.to_pure_dict(nnx.state(model, state.QuantState))
    own = edited(own, lambda name, fields: fields | {"amax_history": fields["amax_history"] + len(name)})
    assert list(own["layers"]) == [0, 1]
    text = nested(own)
    assert list(text["layers"]) == ["0", "1"]
    as_integers = {"layers": {int(key): value for key, value in text["layers"].items()}}
    by_operation = {"layers": {key: {"dot_general": each["quant_kernel"]} for key, each in text["layers"].items()}}
    for old in (text, as_integers, by_operation):
        assert_same(state.from_flax(old, like=own), own)


def test_what_does_not_fit_is_refused_by_name():
    tables = trained()
    old = nested(tables)
    bins = old["one"] | {"input_amax_bins": old["one"]["input_amax_bins"].at[0, 5].set(1.0)}
    short = old["one"] | {"input_amax_history": jnp.zeros(3)}
    for wrong, match in (
        ({**old, "one": bins}, r"'one/input' was saved between two optimizer steps, .*; save "),
        ({**old, "one": short}, r"'one/input' has amax_history of shape \(3,\), but the model needs shape \(4,\)"),
        ({**old, "other": old["one"]}, r"the model has no quant state 'other/\w+'; use the model that was saved"),
        ({"one": old["one"]}, r"the checkpoint has no quant state 'last/input'; use the model that"),
        ({**old, "one": old["one"] | {"bias": jnp.zeros(3)}}, "unknown entry 'one/bias'; pass only quant state"),
    ):
        with pytest.raises(ValueError, match=match):
            state.from_flax(wrong, like=tables)
