"""maybe_quantize_model on Linen models that know nothing of jaxquant."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxquant
from jaxquant import describe_layers, linear_layers, maybe_quantize_model, state
from jaxquant.backends import native as native_backend
from jaxquant.config.recipes import RECIPES
from jaxquant.core.delayed import NON_FINITE_BIN

OPTIMIZED = False
OWG = state.OVERWRITE_WITH_GRADIENT
# Aliases share a recipe; one string for each will do.
NATIVE = list(
    {
        id(row.recipe): name for name, row in reversed(RECIPES.items()) if "native" in row.backends and row.recipe
    }.values()
)


def native(quantization, **fields):
    return {"quantization": quantization, "quant_backend": "native", **fields}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(16, name="wo")(nn.silu(nn.Dense(32, name="wi")(x))), None


class Model(nn.Module):
    remat: bool = False
    state_axis: bool = True

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16, name="embed")(tokens)
        block = nn.remat(Block) if self.remat else Block
        axes = {"params": 0} | ({OWG: 0} if self.state_axis else {})
        stack = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=2)
        x, _ = stack(name="layers")(x, None)
        x = nn.Einsum((16, 2, 8), "bsd,dhk->bshk", name="mix")(x)
        x = nn.DenseGeneral((2, 8), axis=(-2, -1), name="gate")(x).reshape(*x.shape[:2], 16)
        return nn.Dense(32, name="logits")(x)


TOKENS = jnp.arange(16).reshape(2, 8)
QUANTIZED = ["layers/wi", "layers/wo", "mix"]


def init(model, *inputs, seed=3):
    """Initialize under jit: op by op, a quantized model compiles every op on its own."""
    return jax.jit(model.init)(jax.random.key(seed), *inputs)


def loss_of(model):
    return lambda params, quant: (model.apply(state.merge(params, quant), TOKENS) ** 2).mean()


def dots(model, variables):
    params, quant = state.split(variables)
    text = jax.jit(jax.grad(loss_of(model), argnums=(0, 1))).lower(params, quant).as_text()
    return [line for line in text.splitlines() if "stablehlo.dot_general" in line]


@pytest.fixture(scope="module")
def plain():
    """The float model: parameters, loss, gradients."""
    params = init(Model(), TOKENS)["params"]
    return params, *jax.jit(jax.value_and_grad(loss_of(Model())))(params, {})


@pytest.mark.parametrize("quantization", NATIVE)
def test_same_seed_same_parameters_and_a_step_that_comes_close(quantization, plain):
    plain_params, exact, exact_grads = plain
    model = maybe_quantize_model(Model(), native(quantization), TOKENS)
    params, quant = state.split(init(model, TOKENS))
    assert jax.tree.structure(params) == jax.tree.structure(plain_params)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(plain_params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert bool(quant) == RECIPES[quantization].recipe.is_stateful
    value, (grads, _) = jax.jit(jax.value_and_grad(loss_of(model), argnums=(0, 1)))(params, quant)
    assert value != exact
    four_bits = "4" in quantization.replace("e4m3", "")
    assert float(value) == pytest.approx(float(exact), rel=0.25 if four_bits else 0.08)
    cosine = optax.tree.vdot(grads, exact_grads) / (optax.tree.norm(grads) * optax.tree.norm(exact_grads))
    assert float(cosine) > (0.9 if four_bits else 0.98)


def test_remat_changes_no_bit_and_records_once():
    results = []
    for remat in (False, True):
        model = maybe_quantize_model(Model(remat=remat), native("fp8"), TOKENS)
        params, quant = state.split(init(model, TOKENS))
        results.append(jax.jit(jax.value_and_grad(loss_of(model), argnums=(0, 1)))(params, quant))
    for ours, theirs in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    seen = results[1][1][1]["layers"]["wi"]["Fp8DirectDotGeneralOp_0"]
    assert (seen["input_amax_bins"][..., 0, : NON_FINITE_BIN + 1].sum(-1) == 1).all()


def test_the_remat_policy_keeps_one_byte_an_element():
    policy = jaxquant.save_quantized
    x = jnp.ones((8, 64), jnp.bfloat16)
    dense = nn.remat(nn.Dense, policy=policy)(64, use_bias=False, dtype=jnp.bfloat16)
    model = maybe_quantize_model(dense, native("fp8_current"), x)
    variables = init(model, x)

    def saved(f):
        leaves = jax.tree.leaves(jax.eval_shape(lambda v, a: jax.vjp(f, v, a)[1], variables, x))
        return [leaf for leaf in leaves if leaf.dtype.name.startswith("float8")]

    assert sum(leaf.size for leaf in saved(lambda v, a: model.apply(v, a))) == 8 * 64 + 64 * 64


def test_which_layers_and_why():
    reports = {r.path: r for r in describe_layers(Model(), native("int8"), TOKENS)}
    assert [path for path, r in reports.items() if r.recipe] == QUANTIZED
    assert (reports["layers/wi"].fwd, reports["layers/wi"].dlhs, reports["layers/wi"].drhs) == ("int8 × int8",) * 3
    assert "output head" in reports["logits"].reason
    assert "router" in reports["gate"].reason
    assert [layer.kernel_shape for layer in linear_layers(Model(), TOKENS)][:3] == [(16, 32), (32, 16), (16, 2, 8)]
    model = maybe_quantize_model(Model(), native("int8"), TOKENS)
    lines = dots(model, init(model, TOKENS))
    assert sum("xi8>" in line for line in lines) == 3 * 3
    assert sum("xi8>" not in line for line in lines) == 3 * 2  # the head and the router


def test_attention_quantizes_its_projections_and_not_its_scores():
    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(x, x)

    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    paths = ["attention/query", "attention/key", "attention/value", "attention/out"]
    assert [r.path for r in describe_layers(Attention(), native("int8"), x) if r.recipe] == paths
    model = maybe_quantize_model(Attention(), native("int8"), x)
    text = jax.jit(model.apply).lower(init(model, x), x).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    # Query, key and value share one lowered function; out is another; the two score products stay float.
    assert [sum("xi8>" in line for line in lines), sum("xf32>, tensor" in line for line in lines)] == [2, 2]


def test_rules_choose_by_path_first_match_wins():
    rules = [{"path": ".*/wi", "recipe": "fp8_e4m3"}, {"path": "layers/.*", "recipe": None}]
    reports = {r.path: r.recipe for r in describe_layers(Model(), native("int8", rules=rules), TOKENS)}
    assert reports["layers/wi"] == "fp8_e4m3"
    assert reports["layers/wo"] is None
    assert reports["mix"] == "int8"


def test_a_rule_that_matches_nothing():
    rules = [{"path": "layers/mlp/.*", "recipe": None}]
    with pytest.raises(ValueError, match=r"layers/mlp/\.\*"):
        maybe_quantize_model(Model(), native("int8", rules=rules), TOKENS)
    late = maybe_quantize_model(Model(), native("int8", rules=rules))
    with pytest.raises(ValueError, match=r"layers/mlp/\.\*"):
        init(late, TOKENS)


def test_a_model_in_which_nothing_would_be_quantized():
    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="logits")(x)

    for call in (
        lambda: maybe_quantize_model(Head(), native("int8"), jnp.ones((2, 4))),
        lambda: maybe_quantize_model(Head(), native("int8")).init(jax.random.key(0), jnp.ones((2, 4))),
    ):
        with pytest.raises(ValueError, match=r"would quantize no layer of this model.*logits: output head"):
            call()


def test_an_activation_of_a_kernels_shape():
    x = jax.random.normal(jax.random.key(0), (8, 8))
    model = maybe_quantize_model(nn.Sequential([nn.Dense(8), nn.Dense(8)]), native("int8"), x)
    variables = init(model, x)
    expected = nn.Sequential([nn.Dense(8), nn.Dense(8)]).apply(variables, x)
    out = model.apply(variables, x)
    assert (out != expected).any()
    np.testing.assert_allclose(out, expected, atol=0.05)


@pytest.mark.parametrize("float_first", [True, False])
def test_jit_caches_do_not_leak_between_float_and_quantized(float_first):
    """nn.jit caches by module and shapes; a float and a quantized model of one class share that cache."""

    class Jitted(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.jit(nn.Dense)(16, name="inner")(x)

    x = jax.random.normal(jax.random.key(0), (4, 16))
    variables = Jitted().init(jax.random.key(1), x)
    model = maybe_quantize_model(Jitted(), native("int8"))
    runs = [lambda: Jitted().apply(variables, x), lambda: model.apply(variables, x)]
    plain, quantized = [run() for run in runs] if float_first else [run() for run in reversed(runs)][::-1]
    kernel, bias = (variables["params"]["inner"][name] for name in ("kernel", "bias"))
    np.testing.assert_allclose(plain, x @ kernel + bias, rtol=1e-5, atol=1e-6)
    assert (jnp.abs(quantized - plain) > 1e-4).any()


class JittedBlock(nn.Module):
    @nn.jit
    @nn.compact
    def __call__(self, x):
        return nn.jit(nn.Dense)(16, name="inner")(x)


class JittedLayers(nn.Module):
    """Layers that look alike under nn.jit, bare and inside of blocks that look alike."""

    @nn.compact
    def __call__(self, x):
        dense = nn.jit(nn.Dense)
        for name in ("a", "b", "c"):
            x = dense(16, name=name)(x)
        return JittedBlock(name="second")(JittedBlock(name="first")(x))


@pytest.mark.parametrize("backend", ["native", "aqt", "qwix"])
def test_layers_that_look_alike_under_jit_keep_their_own_recipes(backend):
    x = jax.random.normal(jax.random.key(0), (4, 16))
    paths = ["a", "b", "c", "first/inner", "second/inner"]
    assert [layer.path for layer in linear_layers(JittedLayers(), x)] == paths
    variables = JittedLayers().init(jax.random.key(1), x)
    keys = {"quant": jax.random.key(2)}
    alone = {}
    for path in paths:
        config = {"quant_backend": backend, "rules": [{"path": path, "recipe": "int8"}]}
        model = maybe_quantize_model(JittedLayers(), config, x)
        found = jaxquant.coverage(lambda v, x, model=model: model.apply(v, x, rngs=keys), variables, x)
        low = [row.path for row in found.rows if row.is_low]
        assert low == [path]
        alone[path] = np.asarray(model.apply(variables, x, rngs=keys))
    outs = list(alone.values())
    assert all((outs[i] != outs[j]).any() for i in range(5) for j in range(i))


def test_one_layer_called_twice_keeps_one_state_and_records_the_maximum():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(16, name="shared")
            return dense(x) + dense(9 * x)

    x = jax.random.normal(jax.random.key(0), (4, 16))
    model = maybe_quantize_model(Twice(), native("fp8"), x)
    params, quant = state.split(init(model, x))
    assert list(quant["shared"]) == ["Fp8DirectDotGeneralOp_0"]
    seen = jax.jit(jax.grad(lambda s: (model.apply(state.merge(params, s), x) ** 2).sum()))(quant)
    history = state.update(quant, seen)["shared"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    true = float(jnp.abs(9 * x).max())
    assert float(history[0]) == true


def test_other_methods_and_embedding_in_a_larger_model():
    class Coder(nn.Module):
        def setup(self):
            self.up, self.down = nn.Dense(32), nn.Dense(16)

        def encode(self, x):
            return self.up(x)

        def __call__(self, x):
            return self.down(self.encode(x))

    x = jax.random.normal(jax.random.key(0), (4, 16))
    model = maybe_quantize_model(Coder(), native("int8"), x)
    variables = init(model, x)
    encoded = model.apply(variables, x, method="encode")
    assert (encoded != Coder().apply(variables, x, method="encode")).any()

    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="own")(self.inner(x))

    rules = [{"path": "up", "recipe": None}]
    inner = maybe_quantize_model(Coder(), native("int8", rules=rules), x)
    outer = Outer(inner)
    variables = outer.init(jax.random.key(1), x)
    text = jax.jit(outer.apply).lower(variables, x).as_text()
    assert sum("xi8>" in line for line in text.splitlines() if "stablehlo.dot_general" in line) == 1


def test_state_must_be_carried():
    message = r"'fp8' at 'layers/wi' keeps state in the collection '_overwrite_with_gradient'.*pass the collection to"
    model = maybe_quantize_model(Model(), native("fp8"), TOKENS)
    variables = init(model, TOKENS)
    with pytest.raises(ValueError, match=message):
        model.apply({"params": variables["params"]}, TOKENS)


def test_a_scan_needs_to_know_nothing_of_state():
    """With ``variable_axes`` for the state, as flax's own ops need them, and without: the same state, the same bits."""
    results = []
    for state_axis in (True, False):
        model = maybe_quantize_model(Model(state_axis=state_axis), native("fp8"))
        params, quant = state.split(init(model, TOKENS))
        results.append((quant, jax.jit(jax.grad(loss_of(model), argnums=(0, 1)))(params, quant)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_state_is_not_made_anew_by_a_mutable_call():
    model = maybe_quantize_model(Model(), native("fp8"), TOKENS)
    params, _ = state.split(init(model, TOKENS))
    with pytest.raises(ValueError, match=r"this call has no 'input_.*' there"):
        model.apply({"params": params}, TOKENS, mutable=True)


def test_two_ops_of_one_layer_have_a_state_each():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.ones, (4, 4))
            einsum = native_backend.linen_op("einsum", RECIPES["fp8"].recipe)
            return einsum()("ab,bc->ac", x, kernel) + einsum()("ab,cb->ac", x, kernel)

    variables = jax.jit(Two().init)(jax.random.key(0), jnp.ones((2, 4)))
    assert sorted(variables[OWG]) == ["Fp8Einsum_0", "Fp8Einsum_1"]


class Doubled(nn.Einsum):
    """An einsum with a call of its own."""

    @nn.compact
    def __call__(self, *args):
        return 2 * super().__call__(*args)


class Named(nn.Einsum):
    """An einsum with a field of its own, and nn.Einsum's call."""

    purpose: str = "values"


class OneEinsum(nn.Module):
    kind: type[nn.Einsum]

    @nn.compact
    def __call__(self, x):
        return self.kind((16, 8), "bd,df->bf", name="mix")(nn.Dense(16, name="dense")(x))


@pytest.mark.parametrize("transform", [lambda kind: kind, nn.remat, nn.jit], ids=["", "remat", "jit"])
@pytest.mark.parametrize("kind", [Doubled, Named])
def test_an_einsum_of_another_class_keeps_its_call_and_is_quantized(transform, kind):
    x = jax.random.normal(jax.random.key(1), (4, 16))
    plain = OneEinsum(transform(kind))
    model = maybe_quantize_model(plain, native("int8"))
    variables = init(model, x)
    run = jax.jit(model.apply)
    assert len(re.findall("dot_general.*xi8>", run.lower(variables, x).as_text())) == 2
    exact = plain.apply(variables, x)
    np.testing.assert_allclose(run(variables, x), exact, atol=0.03 * float(jnp.abs(exact).max()))


def test_a_model_that_is_one_layer():
    x = jnp.ones((4, 16))
    for kind in (nn.Einsum, Doubled):
        program = jax.jit(maybe_quantize_model(kind((16, 8), "bd,df->bf"), native("int8")).init_with_output)
        assert "xi8>" in program.lower(jax.random.key(0), x).as_text()


def test_methods_that_need_no_scope():
    class Sized(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x)

        def size(self):
            return 4

        @nn.nowrap
        def initialize_carry(self):
            return 5

    model = maybe_quantize_model(Sized(), native("int8"))
    assert (model.size(), model.initialize_carry()) == (4, 5)


def test_settings_that_are_not_of_layers_are_refused():
    with pytest.raises(
        NotImplementedError, match=r"quantize_kvcache true is not a property of linear layers; give the"
    ):
        maybe_quantize_model(Model(), {"quantize_kvcache": True})
    with pytest.raises(NotImplementedError, match=r"save_quantized_params_path 'here' is not written while a model is"):
        maybe_quantize_model(Model(), {"save_quantized_params_path": "here"})


def test_flax_train_state_keeps_the_state_out_of_the_optimizer():
    model = maybe_quantize_model(Model(), native("fp8"), TOKENS)
    variables = init(model, TOKENS)
    train_state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-3))
    params, quant = state.split(variables)
    whole = jax.jit(jax.grad(lambda v: (model.apply(v, TOKENS) ** 2).mean()))
    of_state = jax.jit(jax.grad(loss_of(model), argnums=1))
    for _ in range(3):
        grads = whole(train_state.params)
        train_state = train_state.apply_gradients(grads=grads)
        quant = state.update(quant, of_state(params, quant))
        params = train_state.params["params"]
    theirs = state.split(train_state.params)[1]["layers"]["wi"]["Fp8DirectDotGeneralOp_0"]
    ours = quant["layers"]["wi"]["Fp8DirectDotGeneralOp_0"]
    for name in ("kernel_scale", "kernel_amax_history", "input_scale", "input_amax_history"):
        np.testing.assert_array_equal(theirs[name], ours[name])
    assert float(ours["input_amax_history"][0, 2]) == 0 and float(ours["input_amax_history"][0, -1]) > 0  # noqa: PT018


@pytest.mark.parametrize(
    ("model", "config", "error", "message"),
    [
        (lambda x: x, native("int8"), TypeError, "takes a Flax module, got function"),
    ],
)
def test_refusals(model, config, error, message):
    with pytest.raises(error, match=message):
        maybe_quantize_model(model, config).init(jax.random.key(0), jnp.ones((2, 4)))


class Stubborn(nn.Dense):
    """A layer class that does not use the op that flax's layers take."""

    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", self.kernel_init, (x.shape[-1], self.features))


@pytest.mark.parametrize("model", [Stubborn(4), nn.Dense(4, dot_general=jax.lax.dot_general)], ids=["class", "op"])
def test_a_layer_with_a_way_of_its_own_is_quantized(model):
    x = jax.random.normal(jax.random.key(1), (2, 4))
    quantized = maybe_quantize_model(model, native("int8"))
    variables = init(quantized, x)
    assert "xi8>" in jax.jit(quantized.apply).lower(variables, x).as_text()


class SpectralNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.SpectralNorm(nn.Dense(4, name="normed"), name="norm")(x, update_stats=False)
        return nn.Dense(4, name="plain")(x)


def test_a_layer_that_is_out_of_reach_is_described_as_float():
    """Its kernel is divided by what data estimates."""
    x = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    reports = {report.path: report for report in describe_layers(SpectralNorm(), native("fp8"), x)}
    assert reports["normed"].recipe is None
    assert reports["normed"].reason.startswith("its parameter was mixed with data")
    assert reports["plain"].recipe == "fp8"
    variables = jax.eval_shape(maybe_quantize_model(SpectralNorm(), native("fp8"), x).init, jax.random.key(0), x)
    assert list(variables[OWG]) == ["plain"]


def test_no_quantization_gives_the_model_back():
    model = Model()
    assert maybe_quantize_model(model, {"quantization": ""}) is model


class Decoder(nn.Module):
    """Attention that decodes, which flax initializes on whole sequences and calls on one token."""

    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(num_heads=2, decode=True, name="attention")(x)
        return nn.Dense(4, name="out")(x)


class Sized(nn.Module):
    """A model whose calls take another shape than the one on which it is initialized, and say so."""

    @nn.compact
    def __call__(self, x):
        if self.is_initializing():
            self.put_variable("memory", "last", jnp.zeros((1, 8)))
        else:
            assert x.shape == self.get_variable("memory", "last").shape
        return nn.Dense(4, name="out")(x)


class Late(nn.Module):
    """A model that makes its parameter while it is initialized and multiplies it later."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.ones, (8, 8))
        self.variable("memory", "last", jnp.zeros, (8,))
        return x if self.is_initializing() else x @ kernel


@pytest.mark.parametrize("has_examples", [True, False])
@pytest.mark.parametrize(
    ("kind", "first", "later", "count"),
    [(Decoder, (2, 5, 8), (2, 1, 8), 5), (Sized, (5, 8), (1, 8), 1), (Late, (1, 8), (1, 8), 1)],
)
def test_what_init_runs_may_differ_from_what_apply_runs(kind, first, later, count, has_examples):
    x = jnp.ones(first)
    config = {"quantization": "fp8", "quant_backend": "native"}
    model = jaxquant.maybe_quantize_model(kind(), config, *([x] if has_examples else []))
    out, variables = model.init_with_output(jax.random.key(0), x)
    state = variables.pop("_overwrite_with_gradient")
    assert out.shape == kind().init_with_output(jax.random.key(0), x)[0].shape
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, kind().init(jax.random.key(0), x))
    assert sum("input_scale" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)) == count
    variables["_overwrite_with_gradient"] = state
    made = jax.eval_shape(lambda x: model.apply(variables, x, mutable=["cache", "memory"]), jnp.ones(later))
    assert made[0].shape == kind().apply(variables, jnp.ones(later), mutable=["cache", "memory"])[0].shape
