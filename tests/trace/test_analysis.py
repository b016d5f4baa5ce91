"""Names of leaves and layers, the contractions that are layers, and reasons for the others; nothing is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import exact
from jaxquant.trace import paths
from tests.states import nested
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
    assert [row.reason for row in report][2:4] == ["neither input is computed only from parameters"] * 2
    assert str(report).endswith("3 of 5 contractions are quantized")
    assert "q     dot_general  6x8  8x8  fp8_current  quantization 'fp8_current'\n" in str(report)


def test_a_weight_that_the_function_closes_over_is_told():
    weight, why = jnp.ones((8, 8)), "one input is an array that the function closes over; pass the array as a parameter"
    with pytest.raises(ValueError, match=rf"\(dot_general of \(\(6, 8\), \(8, 8\)\): {why}\)"):
        jaxquant.quantize(lambda p, x: x @ weight * p["b"], CURRENT).init({"b": shape(8)}, X)


def constant(p, x):
    return jax.lax.scan(lambda c, _: ((jnp.tanh(c[0] @ c[1]), c[1]), None), (x, p["w"]), None, length=3)[0][0]


def fast(p, x):
    def body(c, _):
        y = c[0] @ c[1]
        return (jnp.tanh(y), c[1] + c[0].T @ y), None

    return jax.lax.scan(body, (x, p["w"]), None, length=3)[0][0] @ p["out"]


def learned_queries(again):
    """Queries with a bias or after another layer; their attention scores are not a layer."""

    def fn(p, x):
        y = p["q"] @ p["wq"]
        return jax.nn.softmax((y @ p["again"] if again else y + p["b"]) @ (x @ p["wk"]).T) @ x @ p["out"]

    return fn


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (lambda p, x: x @ (p["w"] + p["a"] @ p["c"]), "w"),
        (lambda p, x: x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0) * p["b"]), "w"),
        (lambda p, x: x @ jax.lax.stop_gradient(p["w"]), "w"),
        (lambda p, x: x @ p["w"][np.array([1, 0, 2, 3, 4, 5, 6, 7])], "w"),  # constants select the experts
        (learned_queries(True), "wk out"),
        (learned_queries(False), "wk out"),
        (constant, "w"),
        (fast, "out"),  # the data changes the other parameter
    ],
)
def test_which_weights_are_made_of_parameters(fn, found):
    p = {"a": shape(8, 2), "c": shape(2, 8), "b": shape(8), "q": shape(2, 8)}
    p |= dict.fromkeys(("w", "wq", "wk", "again", "out"), SQUARE)
    assert [row.path for row in jaxquant.quantize(fn, CURRENT).report(p, X).quantized] == found.split()


def test_state_is_stacked_over_the_scans_that_slice_the_weight():
    def fn(p, x):  # a is sliced by both loops, b by the outer loop, c by no loop; a counter selects d
        def outer(h, slices):
            def inner(h, a):
                return jnp.tanh(h @ a + h @ slices["b"]) + h @ p["c"]["kernel"], None

            return jax.lax.scan(inner, h, slices["a"], reverse=True)[0], None

        x = jax.lax.scan(outer, x, {"a": p["a"]["kernel"], "b": p["b"]["kernel"]})[0] @ p["b"]["kernel"][0]
        picked = lambda h, i: (h @ jax.lax.dynamic_index_in_dim(p["d"]["kernel"], i, keepdims=False), None)  # noqa: E731
        return jax.lax.scan(picked, x, jnp.arange(2))[0]

    sizes = {"a": (2, 3, 8, 8), "b": (2, 8, 8), "c": (8, 8), "d": (2, 8, 8)}
    p = {name: {"kernel": shape(*size)} for name, size in sizes.items()}
    state = jax.eval_shape(jaxquant.quantize(fn, FP8).init, p, X)
    found = {name: fields["scale"].shape for name, fields in jaxquant.state.rows_of(state).items() if "input" in name}
    wanted = {"a": (2, 3, 1), "b/2": (2, 1), "b/whole": (1,), "c": (1,), "d": (1,)}
    assert found == {f"{name}/input": size for name, size in wanted.items()}


def test_a_path_is_not_an_identity():
    """Two fused weights under one module, as in flax's OptimizedLSTMCell."""

    def cell(p, x, h):
        fuse = lambda names: jnp.concatenate([p["cell"][name]["kernel"] for name in names], axis=-1)  # noqa: E731
        return x @ fuse(("ii", "if")) + h @ fuse(("hi", "hf"))

    p = {"cell": {name: {"kernel": SQUARE} for name in ("ii", "if", "hi", "hf")}}
    state = jax.eval_shape(jaxquant.quantize(cell, FP8).init, p, X, X)
    assert set(nested(state)["cell"]) == {"if_kernel+ii_kernel", "hf_kernel+hi_kernel"}


HEAD, ROUTER, NOT_FLOAT = "output head", "router", "its inputs are not float"


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


def _exact_router(p, x):
    return jax.lax.top_k(exact.dot("bi,io->bo", x @ p["a"]["kernel"], p["b"]["kernel"]), 2)


def _scaled_head(p, x):
    return jax.nn.log_softmax(x @ p["a"]["kernel"] * jnp.einsum("bi,i->bi", x, p["b"]["kernel"][0]))


def _gated_head(p, x):
    gate = exact.sigmoid(exact.dot("bi,io->bo", x, p["b"]["kernel"]))
    return jax.lax.top_k(x @ p["a"]["kernel"] * gate, 2)


@jax.custom_jvp
def _integer_product(x, kernel):
    scale = jnp.abs(x).max() / 127
    product = jnp.round(x / scale).astype("int8") @ jnp.round(kernel).astype("int8")
    return jnp.where(scale > 0, product / (1 / scale), 0)


_integer_product.defjvps(None, None)


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
        (_exact_router, QUANTIZED, NOT_FLOAT),
        (_gated_head, HEAD, NOT_FLOAT),
        (_scaled_head, HEAD, "contracts no axis"),
        (
            lambda p, x: jax.lax.top_k(_integer_product(x @ p["a"]["kernel"], p["b"]["kernel"]), 2),
            QUANTIZED,
            NOT_FLOAT,
        ),
    ],
)
def test_heads_and_routers_by_structure(fn, a, b):
    found = layers(fn, {"a": {"kernel": SQUARE}, "b": {"kernel": SQUARE}}, X)
    assert found["a"].startswith(a)
    assert found["b"].startswith(b)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, kernel: exact.dot("bi,io->bo", x, kernel),
        lambda x, kernel: jnp.einsum("bi,i->bi", x, kernel[0]),
    ],
)
def test_strict_allows_products_that_are_not_float_matmuls(product):
    def init(product):
        fn = jaxquant.quantize(lambda p, x: product(x @ p["a"], p["b"]), CURRENT | {"strict": True})
        jax.eval_shape(fn.init, {"a": SQUARE, "b": SQUARE}, X)

    init(product)
    with pytest.raises(NotImplementedError, match="b: its inputs are not float"):
        init(lambda x, kernel: (x @ kernel.astype("complex64")).real)


def _of_groups(scores, bias):
    """Select experts like DeepSeek-V3 and Kimi K2: add a bias, select groups by their two best, then experts."""
    biased = jax.nn.sigmoid(scores.astype("float32")) + bias
    groups = jax.lax.top_k(biased.reshape(-1, 8, 48), 2)[0].sum(-1)
    kept = jax.nn.one_hot(jax.lax.top_k(groups, 4)[1], 8).sum(1)
    return jax.lax.top_k(jnp.where(jnp.repeat(kept, 48, axis=1) > 0, biased, -jnp.inf), 8)[1]


@pytest.mark.parametrize(
    "choose",
    [
        _of_groups,
        lambda scores, bias: jax.jit(lambda s: jnp.argsort(-s, axis=-1)[:, :8])(scores),
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


def test_a_tied_embedding_stays_float():
    def tied(p, tokens):
        x = p["emb"]["embedding"][tokens]
        return x @ p["d"]["kernel"] @ p["emb"]["embedding"].T

    p = {"emb": {"embedding": shape(16, 8)}, "d": {"kernel": SQUARE}}
    found = layers(jax.jit(tied), p, shape(5, dtype="int32"))
    assert found["d"] == QUANTIZED
    assert found["emb"].startswith("tied embedding")


def test_generic_names_are_left_out():
    cases = {
        "dense/bias dense": {"dense": {"kernel": 0, "bias": 0}},
        "moe/wi_0 moe/wo": {"moe": {"wi_0": 0, "wo": 0}},
        "kernel": {"kernel": 0},
        "attention/key attention/value": {"attention": {"key": 0, "value": 0}},
        "dense": {"dense": {"value": 0}},
    }
    for names, tree in cases.items():
        assert ["/".join(name) for name in paths.layer_names(paths.leaf_names(tree))] == names.split()


def test_the_path_of_several_leaves_is_what_they_share():
    assert paths.layer_path([("a", "q"), ("a", "k")]) == "a"
    assert paths.layer_path([("a", "q"), ("b", "q")]) == "a/q+b/q"
    assert paths.layer_path([("a", "q"), ("a", "q")]) == "a/q"
