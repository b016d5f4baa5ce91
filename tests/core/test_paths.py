"""Paths of leaves and layers as text."""

from jaxquant.core.paths import at_layer, float_rule, layer_name


def test_names_in_errors():
    assert (layer_name("a/b"), layer_name("")) == ("layer 'a/b'", "the root layer")
    assert (at_layer("a/b"), at_layer("")) == ("'a/b'", "the root layer")
    assert float_rule("a/b") == "add the rule {path: a/b, recipe: null}"
    assert float_rule("") == "add the rule {path: '', recipe: null}"
