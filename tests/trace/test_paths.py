"""Names of leaves, layers and states."""

from __future__ import annotations

from flax import nnx

from jaxquant.trace import paths


def test_boxes_of_nnx_are_no_names():
    _, params = nnx.split(nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)))
    assert paths.leaf_names(params) == [("kernel",)]


def test_generic_names_are_left_out():
    cases = {
        "dense/bias dense": {"dense": {"kernel": 0, "bias": 0}},
        "moe/wi_0 moe/wo": {"moe": {"wi_0": 0, "wo": 0}},
        "kernel": {"kernel": 0},
        "attention/key attention/value": {"attention": {"key": 0, "value": 0}},
        "dense": {"dense": {"value": 0}},
    }
    for layers, tree in cases.items():
        assert ["/".join(name) for name in paths.layer_names(paths.leaf_names(tree))] == layers.split()


def test_the_path_of_several_leaves_is_what_they_share():
    assert paths.layer_path([("a", "q"), ("a", "k")]) == "a"
    assert paths.layer_path([("a", "q"), ("b", "q")]) == "a/q+b/q"
    assert paths.layer_path([("a", "q"), ("a", "q")]) == "a/q"
