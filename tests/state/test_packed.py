"""Packed quant state: bit for bit what nested state gives, in few arrays, with the same errors."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxquant
from jaxquant import state
from jaxquant.core import delayed
from jaxquant.core.quant_state import BINS, flat, is_named
from jaxquant.ops import initial_state
from train.model import Decoder, DecoderConfig

KEYS = jax.random.split(jax.random.key(0), 5)
X = jax.random.normal(KEYS[0], (8, 16))
PARAMS = {
    "used": {"w": jax.random.normal(KEYS[1], (16, 16)) / 4},
    "stack": {"w": jax.random.normal(KEYS[2], (3, 16, 16)) / 4},
    "skipped": {"w": jax.random.normal(KEYS[3], (16, 16)) / 4},
    "last": {"w": jax.random.normal(KEYS[4], (16, 16)) / 4},
}
FP8 = {"quantization": "fp8", "amax_history_length": 4, "quant_backend": "native"}
CONFIGS = {
    "fp8": FP8,
    "flax mode": FP8 | {"amax_init": "flax"},
    "sparse": FP8
    | {"rules": [{"path": "last", "recipe": "fp8_full"}]}
    | {"weight_sparsity_n": 2, "weight_sparsity_m": 4, "weight_sparsity_start_step": 1},
}


def model(params: Any, x: jax.Array, is_skipped: Any, uses: int = 2) -> jax.Array:
    for _ in range(uses):
        x = jnp.tanh(x @ params["used"]["w"])
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"]["w"])
    x = jax.lax.cond(is_skipped, lambda x: x, lambda x: jnp.tanh(x @ params["skipped"]["w"]), x)
    return x @ params["last"]["w"]


class Loop:
    """A training loop of two micro-batches a step, beside a frozen model that it learns from."""

    def __init__(self, config: Any = FP8) -> None:
        uses = 1 if config.get("amax_init") == "flax" else 2  # flax's protocol is of one use
        self.run = jaxquant.quantize(functools.partial(model, uses=uses), config)
        self.start = self.run.init(PARAMS, X, True)
        self.teacher = jax.tree.map(lambda leaf: 2 * leaf, PARAMS)
        self.step = jax.jit(self._step)

    def loss(self, params: Any, quant_state: Any, x: jax.Array, is_skipped: Any) -> jax.Array:
        with state.frozen():
            wanted = self.run(self.teacher, quant_state, x, is_skipped)
        return ((self.run(params, quant_state, x, is_skipped) - wanted) ** 2).mean()

    def _step(self, params: Any, quant_state: Any, x: jax.Array, is_skipped: Any) -> Any:
        def add(carry: Any, part: jax.Array) -> Any:
            grads, seen = jax.grad(self.loss, argnums=(0, 1))(params, quant_state, part, is_skipped)
            return (jax.tree.map(jnp.add, carry[0], grads), state.accumulate(carry[1], seen)), None

        nothing = (jax.tree.map(jnp.zeros_like, params), state.no_observation(quant_state))
        (grads, seen), _ = jax.lax.scan(add, nothing, x.reshape(2, -1, x.shape[-1]))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state.update(quant_state, seen)


def assert_same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def is_warm(nested: Any) -> dict[str, bool]:
    """Return which arrays of bins have the column of warm state."""
    leaves = jax.tree.leaves_with_path(nested)
    return {
        jax.tree_util.keystr(path): leaf.shape[-1] > delayed.BINS
        for path, leaf in leaves
        if is_named(path[-1].key, BINS)
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_steps_have_the_bits_of_nested_ones(name):
    loop = Loop(CONFIGS[name])
    nested, packed = (PARAMS, loop.start), (PARAMS, state.pack(loop.start))
    assert len(packed[1].groups) == 2  # state of the scanned layers has an axis more
    for number, is_skipped in enumerate((True, True, False)):
        x = X * (1.0, 3.0, 0.1)[number]
        nested, packed = loop.step(*nested, x, is_skipped), loop.step(*packed, x, is_skipped)
        assert isinstance(packed[1], state.PackedState)
        assert_same((packed[0], state.unpack(packed[1])), nested)
    assert float(nested[1]["used"]["input_amax_history"][0]) > 0
    if name == "fp8":
        _check_warm(loop)


def _check_warm(loop: Loop) -> None:
    """What has a history is warm, the layer that did not run is cold, and the next step knows both."""
    nested, packed = (loop.step(PARAMS, each, X, True)[1] for each in (loop.start, state.pack(loop.start)))
    nested, packed = state.warm(nested), state.warm(packed)
    assert_same(state.unpack(packed), nested)
    assert len(packed.groups) == 3
    assert {path for path, warm in is_warm(state.unpack(packed)).items() if not warm} == {
        f"['skipped']['{tensor}_amax_bins']" for tensor in ("input", "kernel", "output_grad")
    }
    nested, packed = (loop.step(PARAMS, each, X, False) for each in (nested, packed))
    assert_same((packed[0], state.unpack(packed[1])), nested)
    assert all(is_warm(state.unpack(state.warm(packed[1]))).values())


def test_a_derivative_is_one_concatenation_for_each_array():
    loop = Loop()
    jaxpr = jax.make_jaxpr(jax.grad(lambda packed: _weighted(state.unpack(packed))))(state.pack(loop.start))
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert names.count("split") == names.count("concatenate") == 6
    assert not {"pad", "add_any", "gather", "scatter", "dynamic_slice", "dynamic_update_slice", "slice"} & set(names)


def _weighted(tree: Any) -> jax.Array:
    leaves = jax.tree.leaves(tree)
    return jnp.stack([number * leaf.sum() for number, leaf in enumerate(leaves)]).sum()


def test_arrays_shapes_and_tracers_are_packed_and_unpacked_alike():
    start = {**Loop(CONFIGS["sparse"]).start, "empty": {}, "blocks": {0: flat(initial_state(_recipe()))}}
    packed, shapes = state.pack(start), jax.eval_shape(lambda: start)
    assert_same(state.unpack(packed), start)
    assert state.pack(shapes) == jax.eval_shape(lambda: state.pack(start)) == jax.eval_shape(lambda: packed)
    assert state.unpack(state.pack(shapes)) == shapes == jax.eval_shape(state.unpack, state.pack(shapes))
    assert state.pack(packed) is packed
    assert state.unpack(start) is start
    assert repr(packed) == "PackedState(12 tensors in 9 arrays)"
    assert not state.pack({})
    assert state.unpack(state.pack({})) == {}
    assert packed.rest["last"].keys() == {"sparsity_step", "sparsity_mask", "sparsity_uses"}


def _recipe() -> Any:
    return jaxquant.RECIPES["fp8"].recipe


def test_a_model_of_twelve_layers_has_few_leaves():
    shape: Any = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 8, "num_layers": 12, "scan_layers": False}
    decoder, tokens = Decoder(DecoderConfig(64, 32, 64, **shape)), jnp.zeros((1, 8), jnp.int32)
    quantized = jaxquant.maybe_quantize_model(decoder, FP8, tokens)
    params, nested = state.split(jax.eval_shape(quantized.init, jax.random.key(0), tokens))
    packed = state.pack(nested)
    assert len(jax.tree.leaves((params, nested))) == 866
    assert len(jax.tree.leaves((params, packed))) == len(jax.tree.leaves(params)) + 8 * 3 == 134
    assert repr(packed) == "PackedState(252 tensors in 24 arrays)"


def test_it_is_stored_in_the_layout_of_nested_state(tmp_path):
    loop = Loop(CONFIGS["sparse"])
    nested = loop.step(PARAMS, loop.start, X, True)[1]
    packed = state.pack(nested)
    assert_same(state.strip_bins(packed), state.strip_bins(nested))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state.strip_bins(packed))
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(lambda: packed)
        found = checkpointer.restore(tmp_path / "state", state.strip_bins(shapes))
    assert_same(state.with_bins(found, like=shapes), packed)
    assert_same(state.with_bins(found, like=nested), nested)
    assert_same(state.with_bins(packed), packed)


def test_a_stack_is_sharded_as_its_rows():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    along = NamedSharding(mesh, PartitionSpec("x"))
    replicated = NamedSharding(mesh, PartitionSpec())
    stack = {name: value[None] for name, value in flat(initial_state(_recipe())).items()}

    def placed(*shardings: NamedSharding) -> dict[str, Any]:
        return {str(number): jax.device_put(stack, each) for number, each in enumerate(shardings)}

    for nested, spec in ((placed(along, along), (None, "x")), (placed(along, replicated), ())):
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), nested)
        for packed in (state.pack(nested), state.pack(shapes)):
            assert {leaf.sharding for leaf in jax.tree.leaves(packed)} == {NamedSharding(mesh, PartitionSpec(*spec))}
            rows = NamedSharding(mesh, PartitionSpec(*spec[1:]))
            assert {leaf.sharding for leaf in jax.tree.leaves(state.unpack(packed))} == {rows}


def test_state_of_nnx_models_is_packed_as_pure_dicts():
    plain = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 16, rngs=nnx.Rngs(1)))
    quantized = jaxquant.maybe_quantize_model(plain, FP8, X)
    nested = nnx.to_pure_dict(nnx.state(quantized, state.QuantState))
    packed = state.pack(nested)
    assert len(jax.tree.leaves(packed)) == 3
    assert_same(state.unpack(packed), nested)
    nnx.update(quantized, state.unpack(packed))


def test_what_is_wrong_with_packed_state_is_said_of_the_layer():
    loop = Loop()
    packed, lacks = state.pack(loop.start), {name: loop.start[name] for name in ("stack", "last")}

    def called(quant_state: Any, params: Any = PARAMS) -> jax.Array:
        return loop.run(params, quant_state, X, True).sum()

    def of_params(quant_state: Any) -> Any:
        return jax.grad(lambda params: called(quant_state, params))(PARAMS)

    for call, given, match in (
        (of_params, loop.start, "gradient is taken without"),
        (called, lacks, "keeps state, and"),
    ):
        with pytest.raises(ValueError, match=match) as nested_error:
            call(given)
        with pytest.raises(ValueError, match=match) as packed_error:
            call(state.pack(given))
        assert str(packed_error.value) == str(nested_error.value)
    other = state.pack(lacks)
    trained = jax.tree.map(lambda leaf: leaf - 0.1, packed)
    for refused in (lambda: loop.run(PARAMS, trained, X, True), lambda: state.strip_bins(trained)):
        with pytest.raises(ValueError, match=r"quant state 'last/input_amax_bins' has negative numbers"):
            refused()
    with pytest.raises(ValueError, match="quant state has a module at 'skipped' and its gradient has nothing"):
        state.update(packed, other)
    warm = state.warm(loop.step(PARAMS, packed, X, False)[1])
    with pytest.raises(ValueError, match=r"has shape \(3, 2049\) at 'last/input_amax_bins' and .* shape \(3, 2048\)"):
        state.update(warm, state.no_observation(packed))
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), packed)
    with pytest.raises(ValueError, match=r"scales of rank \d and was .* rank \d; unpack an ensemble inside"):
        state.unpack(two)
    assert_same(jax.tree.map(lambda leaf: leaf[1], jax.vmap(state.unpack)(two)), state.unpack(packed))
    whole = state.pack(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), loop.start))
    with pytest.raises(ValueError, match=r"pack each member inside of jax\.vmap"):
        jax.vmap(state.unpack, in_axes=1)(whole)
    with pytest.raises(ValueError, match="quant state has 'last' and the model's has stack; restore it"):
        state.with_bins(state.strip_bins(other), like=state.pack({"stack": loop.start["stack"]}))
    variables = {"params": PARAMS, state.OVERWRITE_WITH_GRADIENT: packed}
    with pytest.raises(TypeError, match=r"variables have packed quant state in '_overwrite_with_gradient'.*unpack"):
        state.split(variables)


def test_packed_and_nested_state_may_meet():
    loop = Loop()
    packed = state.pack(loop.start)
    seen = jax.tree.map(jnp.ones_like, loop.start)
    assert_same(state.update(packed, seen), state.pack(state.update(loop.start, seen)))
    assert_same(state.update(loop.start, state.pack(seen)), state.update(loop.start, seen))
