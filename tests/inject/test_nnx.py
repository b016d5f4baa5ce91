"""maybe_quantize_model on NNX models that do not use jaxquant."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

import jaxquant
from jaxquant import describe_layers, maybe_quantize_model
from tests.models import NnxChain

X = jax.random.normal(jax.random.key(0), (2, 5, 16))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.wi, self.wo = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.wo(nnx.silu(self.wi(x)))


class Model(nnx.Module):
    """Every kind of layer: in a list, stacked under nnx.scan and nnx.remat, in attention, inside LoRA, used twice."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs)])
        self.stack = nnx.vmap(Block, in_axes=0, out_axes=0)(rngs.split(2))
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.mix = nnx.Einsum("bsd,dhk->bshk", (16, 2, 8), rngs=rngs)
        self.join = nnx.LinearGeneral((2, 8), 16, axis=(-2, -1), rngs=rngs)
        self.wrapped = nnx.LoRA(16, 2, 16, base_module=nnx.Linear(16, 16, rngs=rngs), rngs=rngs)
        self.tuned = nnx.LoRALinear(16, 16, lora_rank=2, rngs=rngs)
        self.gate, self.logits = nnx.Linear(16, 4, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        x = self.blocks[0](x)
        scan = nnx.scan(nnx.remat(lambda block, x: block(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        x = self.attention(scan(self.stack, x))
        x = self.tuned(self.tuned(self.wrapped(self.join(self.mix(x)))))
        return self.logits(x) * self.gate(x).sum(-1, keepdims=True)


QUANTIZED = [
    "blocks/0/wi",
    "blocks/0/wo",
    "stack/wi",
    "stack/wo",
    *(f"attention/{name}" for name in ("query", "key", "value", "out")),
    "mix",
    "join",
    "wrapped/base_module",
    "tuned",
]


def asked(quantization, **fields):
    return {"quantization": quantization, "quant_backend": "native", **fields}


def pure(tree, kind):
    return nnx.to_pure_dict(nnx.state(tree, kind))


@pytest.fixture(scope="module")
def model():
    return nnx.jit(lambda: Model(nnx.Rngs(0)))()


def test_every_kind_of_layer_is_found_and_quantized(model):
    """Parameters and the original model do not change; each layer is quantized, or has a reason for float."""
    before, graph = pure(model, nnx.Param), nnx.graphdef(model)
    reports = {report.path: report for report in describe_layers(model, {"quantization": "int8"}, X)}
    assert [path for path, report in reports.items() if report.recipe] == QUANTIZED
    assert "output head" in reports["logits"].reason
    assert "router" in reports["gate"].reason
    quantized = maybe_quantize_model(model, asked("fp8"), X)
    assert "\n  blocks/*/wi: fp8" in str(quantized)
    jax.tree.map(np.testing.assert_array_equal, pure(quantized, nnx.Param), before)
    assert nnx.graphdef(model) == graph, "the given model has changed"
    assert sorted({row.path for row in jaxquant.coverage(quantized, X).rows if row.is_low}) == sorted(QUANTIZED)


def test_a_layer_that_is_probably_the_head_is_marked():
    layers = nnx.Embed(50, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 9, rngs=nnx.Rngs(0)), nnx.Linear(9, 50, rngs=nnx.Rngs(0))
    model = maybe_quantize_model(nnx.Sequential(*layers), "int8", jnp.arange(8))
    assert "\n  layers/*: int8\n  layers/2: int8; probably the head: add the rule {path: 'layers/2'," in str(model)


class Pair(nnx.Module):
    """Two layers of one shape that share a jitted function."""

    def __init__(self, rngs):
        self.one, self.two = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        run = _shared()
        return run(self.two, run(self.one, x))


@functools.cache
def _shared():
    return nnx.jit(lambda layer, x: layer(x))


def test_only_the_layer_that_was_asked_for_is_quantized():
    """The other layer of the same shape stays in float, although both share a jitted function and its cache."""
    pair = Pair(nnx.Rngs(0))
    exact, hidden = pair(X[0]), pair.one(X[0])
    outs = {}
    for path in ("one", "two"):
        config = asked("fp8_e4m3", rules=[{"path": path, "recipe": None}])
        outs[path] = maybe_quantize_model(pair, config, X[0])(X[0])
    first, second = (maybe_quantize_model(each, asked("fp8_e4m3"), X[0]) for each in (pair.one, pair.two))
    np.testing.assert_array_equal(pair(X[0]), exact)
    np.testing.assert_array_equal(outs["one"], second(hidden))
    np.testing.assert_array_equal(outs["two"], pair.two(first(X[0])))


def test_state_must_be_mapped_with_its_layers():
    stack = nnx.vmap(lambda rngs: maybe_quantize_model(Block(rngs), asked("fp8"), X))(nnx.Rngs(0).split(2))
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    with pytest.raises(ValueError, match="a call of layer 'wi' got the quant state of 2 layers; map quant"):
        nnx.vmap(lambda block, x: block(x), in_axes=(axes, None))(stack, X)


def test_refusals():
    with pytest.raises(ValueError, match="quantizes no layer of this model"):
        maybe_quantize_model(NnxChain(16, logits=4), asked("int8"), X)
    late = maybe_quantize_model(Block(nnx.Rngs(0)), asked("int8", rules=[{"path": "a", "recipe": None}]))
    with pytest.raises(ValueError, match="'a' matches no layer"):
        late(X)


class Coder(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def encode(self, x):
        return nnx.relu(self.up(x))

    @nnx.jit
    def decode(self, x):
        return self.down(x)

    def __call__(self, x):
        return self.decode(self.encode(x))


def test_other_methods_run_quantized_too():
    coder = Coder(nnx.Rngs(0))
    quantized = maybe_quantize_model(coder, asked("fp8_e4m3"), X[0])
    encoded = quantized.encode(X[0])
    assert (encoded != coder.encode(X[0])).any()
    assert (quantized.decode(encoded) != coder.decode(encoded)).any()
    np.testing.assert_array_equal(quantized(X[0]), quantized.decode(encoded))


def test_qwix_adds_lora_to_a_quantized_model():
    """Qwix finds the layer that calls a matmul on Python's stack."""
    x = jnp.ones((2, 8))
    model = maybe_quantize_model(NnxChain(8, up=8, down=8), asked("fp8"), x)
    model = qwix.apply_lora_to_model(model, qwix.LoraProvider(module_path="up", rank=2, alpha=2.0), x, rngs=nnx.Rngs(2))
    rows = jaxquant.coverage(model, x).rows
    expected = {"up": True, "up/kernel_lora_a": False, "up/kernel_lora_b": False, "down": True}
    assert {row.path: row.is_low for row in rows} == expected


class Inner(nnx.Module):
    """A module whose call sets attributes that are not variables (a counter, a cache, a list), and deletes one."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 8, rngs=rngs)
        self.count, self.before = 0, "unused"
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))
        self.kept = nnx.List([])

    def __call__(self, x):
        y = self.layer(x)
        self.count += 1
        self.steps[...] += 1
        self.last = nnx.Cache(y)
        self.kept.append(nnx.Cache(y.mean()))
        if self.count == 1:
            del self.before
        return y


@pytest.mark.parametrize("call", [nnx.jit(lambda m: m(X[0])), nnx.remat(lambda m: m(X[0]))])
def test_attributes_that_a_quantized_call_sets(call):
    model = maybe_quantize_model(Inner(nnx.Rngs(0)), asked("fp8"), X[0])
    call(model)
    call(model)
    assert (model.count, int(model.steps[...]), len(model.kept)) == (2, 2, 2)
    assert jnp.allclose(model.kept[1][...], model.last[...].mean())
    assert not hasattr(model, "before")
