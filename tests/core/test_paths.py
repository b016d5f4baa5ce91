"""Paths of leaves and layers as text."""

import jax
import jax.numpy as jnp

from jaxquant.core.paths import at_layer, float_rule, join_path, layer_name
from jaxquant.core.trees import leaves_by_path


def test_every_kind_of_key():
    tree = {"a": [jnp.ones(1), {"b": jnp.ones(1)}], "c": (jnp.ones(1),)}
    assert list(leaves_by_path(tree)) == ["a/0", "a/1/b", "c/0"]
    assert join_path(["layers", 3, "mlp"]) == "layers/3/mlp"
    assert join_path(jax.tree_util.tree_flatten_with_path(tree)[0][1][0]) == "a/1/b"
    assert join_path(()) == ""


def test_names_in_errors():
    assert (layer_name("a/b"), layer_name("")) == ("layer 'a/b'", "the root layer")
    assert (at_layer("a/b"), at_layer("")) == ("'a/b'", "the root layer")
    assert float_rule("a/b") == "add the rule {path: a/b, recipe: null}"
    assert float_rule("") == "add the rule {path: '', recipe: null}"
