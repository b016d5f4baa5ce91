"""The recipe of each layer, and the reason for it."""

import re

import pytest

from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import HEADS, Decision, Rule
from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec


def resolver(*rules, quantization="int8", **fields):
    rules = tuple(Rule(path, recipe) for path, recipe in rules)
    return QuantConfig(quantization=quantization, rules=rules, **fields).resolver()


def test_base():
    recipe = QuantConfig(quantization="int8").recipe()
    assert resolver()("any/thing at all", 8) == Decision(recipe, "quantization 'int8'", None)
    assert resolver()("", 8).recipe == recipe  # a model that is one layer
    assert QuantConfig().resolver() is None
    assert QuantConfig(rules=(Rule(".*", None),)).resolver() is None


def test_heads_stay_float():
    assert HEADS == ("head", "lm_head", "logits", "logits_dense", "embed_out", "output")
    decide = resolver()
    for head in HEADS:
        for path in (head, f"decoder/{head}"):
            assert decide(path, 8) == Decision(None, f"output head ({head!r}), left in float by default", None)
        assert all(decide(path, 8).recipe is not None for path in (f"{head}/query", f"x_{head}s", f"{head}s"))


def test_routers_stay_float():
    decide = resolver()
    for path, part in (
        ("layers/moe/router", "router"), ("moe/moe_gate", "moe_gate"), ("moe/Gate", "Gate"),
        ("moe/Router/Dense_0", "Router"), ("mlp/gate/linear", "gate"),
    ):  # fmt: skip
        reason = f"router ({part!r} with 256 outputs), left in float by default"
        assert decide(path, 256) == Decision(None, reason, None)
        assert decide(path, 257).recipe is not None
    assert decide("mlp/gate_proj", 8).recipe is not None


def test_first_match_wins_and_rules_beat_exclusions():
    decide = resolver((".*/out", None), (".*/self_attention/.*", "int4"), ("lm_head", "int8"), quant_backend="native")
    assert decide("l/self_attention/out", 8) == Decision(None, "left in float by rules[0].path '.*/out'", ".*/out")
    assert decide("l/self_attention/query", 8).recipe == QuantConfig(quantization="int4").recipe()
    assert decide("l/self_attention/query", 8).reason == "rules[1].path '.*/self_attention/.*'"
    assert decide("lm_head", 8).recipe == QuantConfig(quantization="int8").recipe()
    assert decide("l/mlp/wo", 8).rule is None


def test_the_whole_path_must_match():
    decide = resolver(("mlp", None))
    assert decide("mlp", 8).recipe is None
    assert decide("layers/mlp", 8).recipe is not None
    assert decide("mlp/wo", 8).recipe is not None


def test_rules_without_a_base():
    config = QuantConfig(rules=(Rule("a", "int8"),))
    assert config.resolved_backend == "native"
    assert config.recipe() is None
    assert config.resolver()("a", 8).recipe == QuantConfig(quantization="int8").recipe()
    assert config.resolver()("b", 8) == Decision(None, "left in float by quantization ''", None)
    assert QuantConfig(rules=(Rule("a", "int8"), Rule("b", "int4"))).resolved_backend == "native"
    with pytest.raises(ValueError, match="rules with 'int8', 'aqt_fp8'; set quant_backend to 'aqt' or 'native'"):
        QuantConfig(rules=(Rule("a", "int8"), Rule("b", "aqt_fp8")))


def test_check_used():
    paths = ["layers/mlp/wi_0", "layers/mlp/wo", "lm_head"]
    resolver((".*/wo", "int8"), (".*/mlp/.*", None)).check_used(paths)
    with pytest.raises(
        ValueError, match=re.escape("rules[1].path '.*/w0' matches no layer; the model's layers are lay")
    ):
        resolver((".*/wo", None), (".*/w0", None)).check_used(paths)
    message = "rules[1].path '.*/wo' has no effect, because earlier rules match the same layers, such as layers"
    with pytest.raises(ValueError, match=re.escape(message)):
        resolver((".*/mlp/.*", None), (".*/wo", "int8")).check_used(paths)
    resolver().check_used([])
    with pytest.raises(ValueError, match="the model's layers are none"):
        resolver(("a", None)).check_used([])


ON_AQT = {"quantization": "int8", "quant_backend": "aqt"}
ON_QWIX = {"quantization": "int4", "use_qwix_quantization": True}
BAD_RULES = [
    ({"path": "(", "recipe": None}, {}, "rule path '(' is not a regular expression: "),
    ({"path": "a", "recipe": "int9"}, {}, "rules[0].recipe 'int9' is not a known recipe; did you mean"),
    ({"path": "a", "recipe": "intmp"}, {}, "rules[0].recipe 'intmp' is not supported in a rule"),
    ({"path": 3, "recipe": None}, {}, "rules[0].path must be str, got 3 (int)"),
    ({"path": "a", "recipe": "fp8"}, {}, "(selected by 'auto' for 'aqt_fp8'); set quant_backend to 'native'"),
    ({"path": "a", "recipe": "int4"}, ON_AQT, "'aqt'; set quant_backend to 'qwix' or 'native'"),
    ({"path": "a", "recipe": "aqt_fp8"}, ON_QWIX, "does not run on use_qwix_quantization true; set quant_backend to"),
]


def test_bad_rules():
    for rule, fields, message in BAD_RULES:
        for make in (QuantConfig.from_any, lambda fields: QuantConfig(**fields)):
            with pytest.raises((TypeError, ValueError), match=re.escape(message)):
                make({"quantization": "aqt_fp8", "rules": [rule]} | fields)


MINE = Recipe("mine", MatmulSpec(TensorSpec("int8"), TensorSpec("int4")))


def test_a_rule_may_carry_a_recipe_of_ones_own():
    config = QuantConfig(rules=(Rule("mlp/.*", MINE), Rule(".*/query", "fp8_current")))
    assert config.strings == ["fp8_current"]
    decide = config.resolver()
    assert decide("mlp/wi", 8) == Decision(MINE, "rules[0].path 'mlp/.*'", "mlp/.*")
    assert decide("other", 8).recipe is None
    assert hash(config.rules) == hash(QuantConfig(rules=config.rules).rules)
    backends = {"": "native", "int8": "native", "aqt_fp8": "aqt"}  # native supports every recipe
    for string, backend in backends.items():
        assert QuantConfig(rules=(Rule(".*", MINE),), quantization=string).resolved_backend == backend
