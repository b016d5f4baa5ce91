"""Which contractions are layers, and why the others are not; nothing is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from tests.trace.functions import CURRENT, FP8, layers, shape

X = shape(6, 8)
SQUARE = shape(8, 8)
QUANTIZED = "fp8_current"


def test_every_contraction_is_listed_with_shapes():
    def attend(p, x):
        query, key = x @ p["q"]["kernel"], x @ p["k"]["kernel"]
        return jax.nn.softmax(query @ key.T) @ x @ p["o"]["kernel"]

    p = {name: {"kernel": SQUARE} for name in "qko"}
    report = jaxquant.quantize(attend, CURRENT).report(p, X)
    assert [(row.path, row.lhs, row.rhs, row.recipe) for row in report] == [
        ("q", (6, 8), (8, 8), QUANTIZED),
        ("k", (6, 8), (8, 8), QUANTIZED),
        ("", (6, 8), (8, 6), None),
        ("", (6, 6), (6, 8), None),
        ("o", (6, 8), (8, 8), QUANTIZED),
    ]
    assert [row.reason for row in report][2:4] == ["no operand is made of parameters alone"] * 2
    assert str(report).endswith("3 of 5 contractions are quantized")
    assert "q     dot_general  6x8  8x8  fp8_current  quantization 'fp8_current'\n" in str(report)


def test_a_weight_that_the_function_closes_over_is_told():
    weight, why = jnp.ones((8, 8)), "an operand is an array that the function closes over; make that a parameter"
    with pytest.raises(ValueError, match=rf"\(dot_general of \(\(6, 8\), \(8, 8\)\): {why}\)"):
        jaxquant.quantize(lambda p, x: x @ weight * p["b"], CURRENT).init({"b": shape(8)}, X)


@pytest.mark.parametrize("merged", ["kernel + a @ b", "normed", "stopped"])
def test_weights_made_of_several_parameters_stay_their_layer(merged):
    def fn(p, x):
        p = p["l"]
        weight = {
            "kernel + a @ b": lambda: p["kernel"] + p["a"] @ p["b"],
            "normed": lambda: p["kernel"] / jnp.linalg.norm(p["kernel"], axis=0) * p["g"],
            "stopped": lambda: jax.lax.stop_gradient(p["kernel"]),
        }[merged]()
        return x @ weight + p["g"]

    p = {"l": {"kernel": SQUARE, "a": shape(8, 2), "b": shape(2, 8), "g": shape(8)}}
    assert layers(fn, p, X) == {"l": QUANTIZED}


@pytest.mark.parametrize("made", ["biased", "multiplied again"])
def test_what_is_made_of_a_product_of_two_parameters_is_no_weight(made):
    """Learned queries with a bias, a norm's scale or another layer on them: their scores are no layer of these."""

    def learned_queries(p, x):
        y = p["queries"] @ p["wq"]
        y = y + p["b"] if made == "biased" else y @ p["again"]
        return jax.nn.softmax(y @ (x @ p["wk"]).T) @ x @ p["out"]

    p = {"queries": shape(2, 8), "b": shape(8)} | dict.fromkeys(("wq", "wk", "again", "out"), SQUARE)
    assert layers(learned_queries, p, X) == {"wk": QUANTIZED, "out": QUANTIZED}


def test_state_is_stacked_over_the_scans_that_slice_the_weight():
    def fn(p, x):  # a is sliced twice, b by the outer loop, c by none
        def outer(h, slices):
            def inner(h, a):
                return jnp.tanh(h @ a + h @ slices["b"]) + h @ p["c"]["kernel"], None

            return jax.lax.scan(inner, h, slices["a"], reverse=True)[0], None

        return jax.lax.scan(outer, x, {"a": p["a"]["kernel"], "b": p["b"]["kernel"]})[0]

    p = {"a": {"kernel": shape(2, 3, 8, 8)}, "b": {"kernel": shape(2, 8, 8)}, "c": {"kernel": SQUARE}}
    state = jax.eval_shape(jaxquant.quantize(fn, FP8).init, p, X)
    assert {name: value["input_scale"].shape for name, value in state.items()} == {
        "a": (2, 3, 1),
        "b": (2, 1),
        "c": (1,),
    }


def test_a_weight_in_the_carry_is_one_weight_until_data_changes_it():
    def constant(p, x):
        return jax.lax.scan(lambda c, _: ((jnp.tanh(c[0] @ c[1]), c[1]), None), (x, p["w"]), None, length=3)[0][0]

    def fast(p, x):
        def body(c, _):
            y = c[0] @ c[1]
            return (jnp.tanh(y), c[1] + c[0].T @ y), None

        return jax.lax.scan(body, (x, p["w"]), None, length=3)[0][0] @ p["out"]["kernel"]

    p = {"w": SQUARE, "out": {"kernel": SQUARE}}
    assert layers(constant, p, X) == {"w": QUANTIZED}
    assert layers(fast, p, X) == {"out": QUANTIZED}


def test_stacked_weights_indexed_by_a_counter_share_one_state():
    def fn(p, x):
        def body(c, i):
            return jnp.tanh(c @ jax.lax.dynamic_index_in_dim(p["layers"]["kernel"], i, keepdims=False)), None

        return jax.lax.scan(body, x, jnp.arange(4))[0]

    state = jax.eval_shape(jaxquant.quantize(fn, FP8).init, {"layers": {"kernel": shape(4, 8, 8)}}, X)
    assert state["layers"]["kernel_scale"].shape == (1,)


def test_a_path_is_not_an_identity():
    """Two fused weights under one module, as in flax's OptimizedLSTMCell."""

    def cell(p, x, h):
        fuse = lambda names: jnp.concatenate([p["cell"][name]["kernel"] for name in names], axis=-1)  # noqa: E731
        return x @ fuse(("ii", "if")) + h @ fuse(("hi", "hf"))

    p = {"cell": {name: {"kernel": SQUARE} for name in ("ii", "if", "hi", "hf")}}
    assert layers(cell, p, X, X) == {"cell": QUANTIZED}
    state = jax.eval_shape(jaxquant.quantize(cell, FP8).init, p, X, X)
    assert set(state["cell"]) == {"if_kernel+ii_kernel", "hf_kernel+hi_kernel"}


def test_one_parameter_in_two_layouts_has_two_states():
    def both(p, x):
        x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["a"]["kernel"])[0]
        return x @ p["a"]["kernel"][0]

    state = jax.eval_shape(jaxquant.quantize(both, FP8).init, {"a": {"kernel": shape(3, 8, 8)}}, X)
    assert {name: value["input_scale"].shape for name, value in state["a"].items()} == {"3": (3, 1), "whole": (1,)}


def test_a_weight_that_data_was_added_to_is_named():
    fn = lambda p, x, z: x @ p["w"].at[1:3].subtract(z[1:3]) + x @ p["v"]  # noqa: E731
    rows = jaxquant.quantize(fn, FP8).report({"w": SQUARE, "v": SQUARE}, X, SQUARE)
    assert {row.reason for row in rows if row.recipe is None} == {
        "no operand is made of parameters alone (made of 'w' and data)"
    }


def test_two_parameters_of_one_path_are_refused():
    fn = lambda p, x: x @ p["a/b"]["w"] + x @ p["a"]["b"]["w"]  # noqa: E731
    with pytest.raises(ValueError, match="two parameters have the path 'a/b/w'; rename one"):
        jaxquant.quantize(fn, FP8).init({"a/b": {"w": SQUARE}, "a": {"b": {"w": SQUARE}}}, X)


HEAD, ROUTER = "output head", "router"


def _two_layers(p, x):
    return jax.nn.relu(x @ p["a"]["kernel"]) @ p["b"]["kernel"]


def _top_k_router(p, x):
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["a"]["kernel"]), 2)
    return weights[:, :1] * jnp.take_along_axis(x, chosen, 1)[:, :1] * x @ p["b"]["kernel"]


def _cross_entropy(p, x):
    logits = _two_layers(p, x)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[:, 0])


def _attention_pooling(p, x):
    return jax.nn.softmax(x @ p["a"]["kernel"]) * x @ p["b"]["kernel"]


@pytest.mark.parametrize(
    ("fn", "a", "b"),
    [
        (_two_layers, QUANTIZED, QUANTIZED),  # a headless encoder
        (lambda p, x: jnp.mean((_two_layers(p, x) - x) ** 2), QUANTIZED, QUANTIZED),
        (lambda p, x: jax.nn.log_softmax(_two_layers(p, x))[:, 0], QUANTIZED, HEAD),
        (_cross_entropy, QUANTIZED, HEAD),
        (lambda p, x: jnp.argmax(_two_layers(p, x), -1), QUANTIZED, HEAD),
        (_top_k_router, ROUTER, QUANTIZED),
        (_attention_pooling, QUANTIZED, QUANTIZED),
    ],
)
def test_heads_and_routers_by_structure(fn, a, b):
    found = layers(fn, {"a": {"kernel": SQUARE}, "b": {"kernel": SQUARE}}, X)
    assert found["a"].startswith(a)
    assert found["b"].startswith(b)


def test_heads_and_routers_in_a_loop():
    def fn(p, x):
        def body(h, w):
            chosen, _ = jax.lax.top_k(h @ w["choice"], 2)
            return h + jnp.tanh(h @ w["up"]) * chosen[:, :1], None

        return jax.nn.log_softmax(jax.lax.scan(body, x, p["layers"])[0] @ p["out"])

    p = {"layers": {"choice": shape(3, 8, 4), "up": shape(3, 8, 8)}, "out": shape(8, 5)}
    found = layers(fn, p, X)
    assert found["layers/up"] == QUANTIZED
    assert found["layers/choice"].startswith(ROUTER)
    assert found["out"].startswith(HEAD)


def _of_groups(scores, bias):
    """Choose experts as DeepSeek-V3 and Kimi K2 do: a bias, the best groups by their two best, the best in these."""
    biased = jax.nn.sigmoid(scores.astype("float32")) + bias
    groups = jax.lax.top_k(biased.reshape(-1, 8, 48), 2)[0].sum(-1)
    kept = jax.nn.one_hot(jax.lax.top_k(groups, 4)[1], 8).sum(1)
    return jax.lax.top_k(jnp.where(jnp.repeat(kept, 48, axis=1) > 0, biased, -jnp.inf), 8)[1]


@pytest.mark.parametrize(
    "choose",
    [
        _of_groups,
        lambda scores, bias: jax.jit(lambda s: jnp.argsort(-s, axis=-1)[:, :8])(scores),
        lambda scores, bias: jnp.argmax(scores + bias, -1)[:, None],
        lambda scores, bias: jax.lax.approx_max_k(scores, 8)[1],
    ],
)
def test_a_router_of_384_experts_is_known_by_structure_under_any_name(choose):
    def fn(p, x):
        chosen = choose(x @ p["wg"]["kernel"], p["wg"]["bias"])
        return (x @ p["up"]["kernel"]) * chosen[:, :1] @ p["down"]["kernel"]

    p = {"wg": {"kernel": shape(8, 384), "bias": shape(384)}, "up": {"kernel": SQUARE}, "down": {"kernel": SQUARE}}
    found = layers(fn, p, X, config={"quantization": "fp8_block"})
    assert found.pop("wg") == "router (its result is ranked), left in float by default"
    assert found == {"up": "fp8_block", "down": "fp8_block"}


def test_a_rule_comes_before_structure():
    rules = CURRENT | {"rules": [{"path": "b", "recipe": "fp8"}]}
    p = {"a": {"kernel": SQUARE}, "b": {"kernel": SQUARE}}
    found = layers(lambda p, x: jax.nn.softmax(_two_layers(p, x)), p, X, config=rules)
    assert found == {"a": QUANTIZED, "b": "fp8"}


def test_a_tied_embedding_stays_float_and_experts_picked_by_constants_do_not():
    def tied(p, tokens):
        x = p["emb"]["embedding"][tokens]
        return x @ p["d"]["kernel"] @ p["emb"]["embedding"].T

    p = {"emb": {"embedding": shape(16, 8)}, "d": {"kernel": SQUARE}}
    found = layers(jax.jit(tied), p, shape(5, dtype="int32"))
    assert found["d"] == QUANTIZED
    assert found["emb"].startswith("tied embedding")
    permuted = lambda p, x: x @ p["d"]["kernel"][np.array([1, 0, 2, 3, 4, 5, 6, 7])]  # noqa: E731
    assert layers(permuted, {"d": {"kernel": SQUARE}}, X) == {"d": QUANTIZED}
