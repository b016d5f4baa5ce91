"""maybe_quantize_model on Linen models that do not use jaxquant."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jaxquant import coverage, describe_layers, maybe_quantize_model, state
from tests.models import Block, chain
from tests.states import nested

OWG = state.OVERWRITE_WITH_GRADIENT


def native(quantization, **fields):
    return {"quantization": quantization, "quant_backend": "native", **fields}


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16, name="embed")(tokens)
        stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = stack(32, name="layers")(x, None)
        x = nn.Einsum((16, 2, 8), "bsd,dhk->bshk", name="mix")(x)
        x = nn.DenseGeneral((2, 8), axis=(-2, -1), name="gate")(x).reshape(*x.shape[:2], 16)
        return nn.Dense(32, name="logits")(x)


TOKENS = jnp.arange(16).reshape(2, 8)
QUANTIZED = ["layers/wi", "layers/wo", "mix"]


def init(model, *inputs, seed=3):
    """Initialize under jit; without jit, every op of a quantized model would be compiled separately."""
    return jax.jit(model.init)(jax.random.key(seed), *inputs)


def loss_of(model):
    return lambda params, quant: (model.apply(state.merge(params, quant), TOKENS) ** 2).mean()


def dots(model, variables):
    params, quant = state.split(variables)
    text = jax.jit(jax.grad(loss_of(model), argnums=(0, 1))).lower(params, quant).as_text()
    return [line for line in text.splitlines() if "stablehlo.dot_general" in line]


def test_which_layers_and_why():
    reports = {r.path: r for r in describe_layers(Model(), native("int8"), TOKENS)}
    assert [path for path, r in reports.items() if r.recipe] == QUANTIZED
    assert (reports["layers/wi"].fwd, reports["layers/wi"].dlhs, reports["layers/wi"].drhs) == ("int8 × int8",) * 3
    assert "output head" in reports["logits"].reason
    assert "router" in reports["gate"].reason
    shapes = [layer.kernel_shape for layer in describe_layers(Model(), "", TOKENS)]
    assert shapes[:3] == [(16, 32), (32, 16), (16, 2, 8)]
    model = maybe_quantize_model(Model(), native("int8"), TOKENS)
    lines = dots(model, init(model, TOKENS))
    assert sum("xi8>" in line for line in lines) == 3 * 3
    assert sum("xi8>" not in line for line in lines) == 3 * 2  # the head and the router
    assert str(model).splitlines()[1:4] == [f"  {path}: int8" for path in QUANTIZED]


class LM(nn.Module):
    head: str

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(50, 32)
        x = embed(tokens) + sum(nn.Embed(rows, 32)(tokens % rows) for rows in (10, 32))
        x = nn.Dense(32, name="down")(nn.gelu(nn.Dense(50, name="up")(x)))
        x = embed.attend(x) if self.head == "tied" else x
        return x if self.head in ("tied", "none") else nn.Dense(10 if self.head == "classes" else 50, name=self.head)(x)


@pytest.mark.parametrize("head", ["out_proj_final", "lm_head", "classes", "tied", "none"])
def test_a_layer_that_is_probably_the_head_is_marked(head):
    """All reports propose a rule; other layers also have as many outputs as a table has rows."""
    rules, plain = [{"path": head, "recipe": None}] * (head == "out_proj_final"), LM(head)
    model, rows = maybe_quantize_model(plain, "int8", TOKENS), describe_layers(plain, "int8", TOKENS)
    args = jax.eval_shape(model.init, jax.random.key(0), TOKENS), TOKENS
    for report in (model, rows, coverage(model.apply, *args), coverage(plain.apply, *args, config="int8")):
        hints = str(report).split("; probably the head: add the rule ")[1:]
        assert [yaml.safe_load(hint.partition(" to keep it in float")[0]) for hint in hints] == rules
    assert [row.path for row in rows.quantized][2:] == [head] * (head in ("classes", "out_proj_final"))
    ruled = describe_layers(plain, {"quantization": "int8", "rules": rules}, TOKENS)
    assert [row.path for row in ruled.quantized] == ["up", "down"] + ["classes"] * (head == "classes")


def test_a_rule_that_matches_nothing_and_a_model_in_which_nothing_would_be_quantized():
    rules = [{"path": "layers/mlp/.*", "recipe": None}]
    with pytest.raises(ValueError, match=r"layers/mlp/\.\*"):
        maybe_quantize_model(Model(), native("int8", rules=rules), TOKENS)
    model = maybe_quantize_model(chain(logits=4), native("int8"))
    with pytest.raises(ValueError, match=r"quantizes no layer of this model.*logits: output head"):
        model.init(jax.random.key(0), jnp.ones((2, 4)))


def test_state_is_not_made_anew_by_a_mutable_call():
    model = maybe_quantize_model(Model(), native("fp8"), TOKENS)
    params = jax.eval_shape(Model().init, jax.random.key(0), TOKENS)["params"]
    with pytest.raises(ValueError, match=r"this call has no 'input_.*' in that collection; pass all"):
        jax.eval_shape(lambda params: model.apply({"params": params}, TOKENS, mutable=True), params)


class SpectralNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.SpectralNorm(nn.Dense(4, name="normed"), name="norm")(x, update_stats=False)
        return nn.Dense(4, name="plain")(x)


def test_a_layer_that_is_out_of_reach_is_described_as_float():
    """Its kernel is divided by an estimate from data."""
    x = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    reports = {report.path: report for report in describe_layers(SpectralNorm(), native("fp8"), x)}
    assert reports["normed"].recipe is None
    assert reports["normed"].reason.startswith("the parameter is combined with data")
    assert reports["plain"].recipe == "fp8"
    variables = jax.eval_shape(maybe_quantize_model(SpectralNorm(), native("fp8"), x).init, jax.random.key(0), x)
    assert list(nested(variables[OWG])) == ["plain"]


def test_bind_draws_the_random_numbers_of_apply_and_further_ones_in_a_second_call():
    x, rngs = jnp.ones((4, 16)), {"dropout": jax.random.key(1)}
    model = maybe_quantize_model(nn.Sequential([nn.Dense(16), nn.Dropout(0.5, deterministic=False)]), native("fp8"), x)
    variables = init(model, x)
    bound = model.bind(variables, rngs=rngs)
    np.testing.assert_array_equal(bound(x), model.apply(variables, x, rngs=rngs))
    assert (bound(x) != model.apply(variables, x, rngs=rngs)).any()


class Decoder(nn.Module):
    """Attention with decoding, which flax initializes on whole sequences and calls on one token."""

    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(num_heads=2, decode=True, name="attention")(x)
        return nn.Dense(4, name="out")(x)


class Late(nn.Module):
    """A model that creates its parameter in ``init`` and multiplies it in later calls."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.ones, (8, 8))
        self.variable("memory", "last", jnp.zeros, (8,))
        return x if self.is_initializing() else x @ kernel


@pytest.mark.parametrize(
    ("kind", "first", "later", "count", "has_examples"),
    [(Decoder, (2, 5, 8), (2, 1, 8), 5, True), (Late, (1, 8), (1, 8), 1, False)],
)
def test_what_init_runs_may_differ_from_what_apply_runs(kind, first, later, count, has_examples):
    x = jnp.ones(first)
    model = maybe_quantize_model(kind(), native("fp8"), *([x] if has_examples else []))
    out, variables = model.init_with_output(jax.random.key(0), x)
    assert out.shape == kind().init_with_output(jax.random.key(0), x)[0].shape
    assert sum(name.endswith("input") for name in state.rows_of(variables[OWG])) == count
    plain = {name: value for name, value in variables.items() if name != OWG}
    assert jax.tree.map(jnp.shape, plain) == jax.tree.map(jnp.shape, kind().init(jax.random.key(0), x))
    made = jax.eval_shape(lambda x: model.apply(variables, x, mutable=["cache", "memory"]), jnp.ones(later))
    assert made[0].shape == kind().apply(plain, jnp.ones(later), mutable=["cache", "memory"])[0].shape
