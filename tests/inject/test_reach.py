"""Every way to call a matmul with a parameter is quantized, including calls that once stayed in float silently."""

from __future__ import annotations

import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxquant
from jaxquant import maybe_quantize_model, state
from tests.models import NnxChain
from tests.serving.models import convert_linen, convert_nnx, kernels_of
from tests.states import nested

INT8 = {"quantization": "int8", "quant_backend": "native"}
FP8 = {"quantization": "fp8", "quant_backend": "native"}
X = jax.random.normal(jax.random.key(0), (4, 16))
OWG = state.OVERWRITE_WITH_GRADIENT


class Coder(nn.Module):
    def setup(self):
        self.up = nn.Dense(32)
        self.layers = [nn.Dense(32), nn.Dense(32)]
        self.down = nn.Dense(16)

    def encode(self, x):
        for layer in self.layers:
            x = layer(nn.relu(self.up(x)) if x.shape[-1] == 16 else x)
        return x

    def __call__(self, x):
        return self.down(nn.relu(self.encode(x)))

    def _first(self, x):
        return x @ self.up.variables["params"]["kernel"]


class Other(nn.Module):
    def encode(self, x):
        return self.layers[0](nn.relu(self.up(x)))  # pyright: ignore[reportAttributeAccessIssue]


def low(fn, *args):
    """Count the matmuls of a function, and the 8-bit matmuls; equal layers are lowered once."""
    text = jax.jit(fn).lower(*args).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    return len(lines), sum("xi8>" in line or "f8E" in line for line in lines)


WAYS = {
    "a name": lambda m, v, x: m.apply(v, x, method="encode"),
    "a function of another class": lambda m, v, x: m.apply(v, x, method=Other.encode),
    "a private method": lambda m, v, x: m.apply(v, x, method="_first"),
    "init_with_output": lambda m, v, x: m.init_with_output(jax.random.key(1), x)[0],
    "nn.apply of a submodule": lambda m, v, x: nn.apply(lambda m, x: m.up(x), m)(v, x),
    "bind and a method": lambda m, v, x: m.bind(v).encode(x),
    "bind and a submodule": lambda m, v, x: m.bind(v).layers[1](m.bind(v).up(x)),
}


@pytest.fixture(scope="module")
def quantized():
    """Return a quantized model and its variables."""
    model = maybe_quantize_model(Coder(), FP8, X)
    return model, jax.jit(model.init)(jax.random.key(1), X)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_into_a_linen_model(quantized, way):
    model, variables = quantized
    matmuls, in_8_bits = low(lambda v, x: WAYS[way](model, v, x), variables, X)
    assert in_8_bits == matmuls > 0


def test_a_part_of_the_model_first():
    """Initialize and run a part before the whole model: the same layers are quantized, decided in order of use."""
    model = maybe_quantize_model(Coder(), FP8)
    variables = jax.jit(lambda key, x: model.init(key, x, method="encode"))(jax.random.key(1), X)
    assert set(nested(variables[OWG])) == {"up", "layers_0", "layers_1"}
    whole = jax.jit(model.init)(jax.random.key(1), X)
    assert set(nested(whole[OWG])) == {"up", "layers_0", "layers_1", "down"}


class Larger(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="own")(self.inner(nn.Dense(16, name="first")(x)))


def test_in_a_larger_float_model():
    outer = Larger(maybe_quantize_model(Coder(), FP8))
    plain = Larger(Coder()).init(jax.random.key(1), X)
    variables = jax.jit(outer.init)(jax.random.key(1), X)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], plain["params"])
    assert low(outer.apply, variables, X) == (5, 3)
    params, quant = state.split(variables)
    grads = jax.jit(jax.grad(lambda p, s: (outer.apply(state.merge(p, s), X) ** 2).sum(), argnums=(0, 1)))
    seen = grads(params, quant)[1]
    history = nested(state.update(quant, seen))["inner"]["down"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    assert history[0] > 0


def test_a_model_that_holds_a_quantized_one_keeps_its_recipe():
    outer = maybe_quantize_model(Larger(maybe_quantize_model(Coder(), INT8)), FP8 | {"quantization": "fp8_current"})
    variables = jax.eval_shape(outer.init, jax.random.key(1), X)
    text = jax.jit(outer.apply).lower(variables, X).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert [sum(kind in line for line in lines) for kind in ("xi8>", "f8E4M3FN>")] == [3, 2]


def test_a_quantized_model_is_copied_whole(quantized):
    model, variables = quantized
    for each in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(each.apply(variables, X), model.apply(variables, X))


def test_a_quantized_nnx_model_and_its_graph_are_pickled():
    model = maybe_quantize_model(NnxChain(16, up=32, down=16), FP8, X)
    _, grads = state.value_and_grad(lambda model: jnp.sum(model(X) ** 2))(model)
    state.advance(model, grads)
    for each in (model, jaxquant.convert(model, FP8, X)):
        graph, arrays = nnx.split(each)
        for found in (pickle.loads(pickle.dumps(each)), nnx.merge(pickle.loads(pickle.dumps(graph)), arrays)):
            np.testing.assert_array_equal(found(X), each(X))


class Moody(nn.Module):
    """A model that overrides ``init`` and ``apply`` with another argument, like MaxText's model."""

    mood: str = "train"

    def init(self, *args, mood="train", **kwargs):
        return nn.Module.init(self.clone(mood=mood), *args, **kwargs)

    def apply(self, *args, mood="train", **kwargs):
        return nn.Module.apply(self.clone(mood=mood), *args, **kwargs)

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x) * (-1 if self.mood == "serve" else 1)


def test_a_model_with_an_apply_of_its_own():
    model = maybe_quantize_model(Moody(), FP8)
    variables = jax.jit(lambda key: model.init(key, X, mood="serve"))(jax.random.key(1))
    assert set(variables) == {"params", OWG}
    trained, served = (model.apply(variables, X, mood=mood) for mood in ("train", "serve"))
    np.testing.assert_array_equal(trained, -served)
    assert low(lambda v: model.apply(v, X, mood="serve"), variables) == (1, 1)


class Bridged(nnx.Module):
    """A Linen layer in an NNX model, with an unhashable field, like MaxText's layers."""

    def __init__(self, rngs):
        self.widths = [8, 4]
        self.inner = nnx.bridge.ToNNX(nn.Dense(8), rngs=rngs)
        self.inner.lazy_init(X)
        self.outer = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.inner(x))


def test_a_linen_layer_in_an_nnx_model():
    model = maybe_quantize_model(Bridged(nnx.Rngs(0)), INT8, X)
    rows = jaxquant.coverage(model, X).rows
    assert [(row.path, str(row.dtypes) != "float") for row in rows] == [("inner", True), ("outer", True)]
    np.testing.assert_array_equal(model(X), model.outer(model.inner(X)))


class Logged(nn.Dense):
    @nn.compact
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class Plain(nn.Module):
    """Einsums and products with custom parameters."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (16, 16))
        mixing = self.param("mixing", nn.initializers.lecun_normal(), (2, 8, 16))
        x = jnp.einsum("bk,kn->bn", x @ w, w)
        return jnp.einsum("bhd,hdk->bk", x.reshape(-1, 2, 8), mixing)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.LSTMCell(8))(x[None])


class Stack(nn.Module):
    """A scan that does not mention quant state."""

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.Dense(16, dtype=x.dtype)(x), None

        scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(name="layers")(x, None)[0]


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        experts = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0)
        return experts(8, name="experts")(jnp.stack([x, 2 * x])).sum(0)


class Tied(nn.Module):
    """Custom parameters, scanned and mapped, two of them in one module."""

    @nn.compact
    def __call__(self, x):
        x = Stack()(x) + Plain()(x)
        up, down = (self.param(name, nn.initializers.lecun_normal(), (16, 16)) for name in ("up", "down"))
        return nn.Dense(8, name="last")(Experts()(nn.silu(x @ up) @ down))


@pytest.mark.parametrize(
    ("model", "matmuls"), [(Logged(8), 1), (Recurrent(), 2), (Tied(), 6)], ids=lambda value: type(value).__name__
)
def test_layers_of_any_author(model, matmuls):
    quantized = maybe_quantize_model(model, FP8, X)
    variables = jax.jit(quantized.init)(jax.random.key(1), X)
    plain = jax.jit(model.init)(jax.random.key(1), X)
    assert jax.tree.structure(plain["params"]) == jax.tree.structure(variables["params"])
    jax.tree.map(np.testing.assert_array_equal, plain["params"], variables["params"])
    assert low(quantized.apply, variables, X) == (matmuls, matmuls)
    exact, out = jax.jit(model.apply)(plain, X), jax.jit(quantized.apply)(variables, X)
    assert (out != exact).any()
    np.testing.assert_allclose(out, exact, atol=0.15 * float(jnp.abs(exact).max()))
    params, quant = state.split(variables)
    seen = jax.jit(jax.grad(lambda s: (quantized.apply(state.merge(params, s), X) ** 2).sum()))(quant)
    histories = [h for p, h in jax.tree.leaves_with_path(state.update(quant, seen)) if "history" in str(p[-1])]
    assert histories
    assert all((history[..., 0] > 0).all() for history in histories)


def test_layers_of_any_author_are_served_as_they_were_trained():
    model, x = Tied(), X.astype(jnp.bfloat16)
    trained = maybe_quantize_model(model, FP8, x)
    variables = jax.jit(trained.init)(jax.random.key(1), x)
    seen = jax.jit(jax.grad(lambda v: (trained.apply(v, x) ** 2).sum()))(variables)[OWG]
    variables = {**variables, OWG: state.update(variables[OWG], seen)}
    assert len(kernels_of(convert_linen(model, FP8, x, variables)["params"])) == 7


class Clipped(nn.Module):
    """A layer with a custom backward pass, and a layer without."""

    @nn.compact
    def __call__(self, x):
        forward = lambda layer, x: nn.vjp(lambda layer, x: layer(x), layer, x)  # noqa: E731
        backward = lambda vjp, g: vjp(jnp.clip(g, -1, 1))  # noqa: E731
        clipped = nn.custom_vjp(lambda layer, x: layer(x), forward_fn=forward, backward_fn=backward)
        return nn.Dense(8, name="plain")(clipped(nn.Dense(16, name="clipped"), x))


def test_a_layer_that_is_out_of_reach_is_not_converted():
    model = Clipped()
    variables = maybe_quantize_model(model, FP8, X).init(jax.random.key(1), X)
    variables = jaxquant.calibrate(model, variables, FP8, [X])
    assert kernels_of(convert_linen(model, FP8, X, variables)["params"]) == {"plain/kernel"}


class NNXOwn(nnx.Module):
    """Custom parameters, one in a list and one shared, and a layer of flax."""

    def __init__(self, rngs):
        key = rngs.params
        self.up = nnx.Param(jax.random.normal(key(), (16, 4, 8)))
        self.mixes = nnx.List([nnx.Param(jax.random.normal(key(), (32, 32))) for _ in range(2)])
        self.same = self.mixes[0]
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        x = jnp.einsum("bd,dhk->bhk", x, self.up[...]).reshape(x.shape[0], 32)
        for mix in self.mixes:
            x = nn.silu(x @ mix)
        return self.down(x @ self.same)


def test_an_nnx_model_of_any_author_is_served_as_it_was_trained():
    trained = jaxquant.calibrate(NNXOwn(nnx.Rngs(0)), FP8, [X])
    call = nnx.jit(lambda model: model(X))
    converted = convert_nnx(trained, FP8, X, call=call)
    params = jaxquant.serving.nnx_params(converted)
    assert kernels_of(params) == {"up", "mixes/0", "mixes/1", "down/kernel"}
    assert converted.same is converted.mixes[0]

    empty = nnx.eval_shape(lambda: jaxquant.convert(trained, FP8, X))
    jaxquant.serving.update_nnx(empty, params)
    np.testing.assert_array_equal(call(empty), call(trained))


class Shifted(nn.Module):
    shift: jax.Array

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x) + self.shift


def test_models_that_differ_in_an_array_are_two():
    model = maybe_quantize_model(Shifted(jnp.ones(8)), INT8)
    variables = model.init(jax.random.key(0), X)
    other = model.clone(shift=jnp.zeros(8))
    np.testing.assert_allclose(model.apply(variables, X) - other.apply(variables, X), 1, rtol=1e-5)
