"""First and last blocks in float: counted by numbered path parts, for every recipe; an error without such parts."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxquant.config.quant_config import QuantConfig
from tests.trace.functions import layers, shape

ENDS = {"quantization": "fp8_current", "float_first_blocks": 1, "float_last_blocks": 2}
WHY = "left in float by float_first_blocks 1 and float_last_blocks 2"


def decide(paths, first, last, rules=()):
    fields = {"float_first_blocks": first, "float_last_blocks": last, "rules": list(rules)}
    resolver = QuantConfig.from_any({"quantization": "int8", "quant_backend": "native", **fields}).resolver()
    assert resolver is not None
    return resolver.float_blocks(paths)


LAYERS = [f"decoder/layers_{n}/wi_{k}" for n in (10, 2, 0, 1, 9) for k in (0, 1)]
NESTED = [f"layers_{n}/experts_{k}/Dense_0" for n in range(3) for k in range(4)]
TOWERS = [f"{tower}/layers_{n}/w" for tower, count in (("encoder", 2), ("decoder", 4)) for n in range(count)]


@pytest.mark.parametrize(
    ("paths", "first", "last", "floats"),
    [
        ([*LAYERS, "lm_head"], 1, 1, {path for path in LAYERS if "_0/" in path or "_10/" in path}),
        ([f"blocks/{n}/q" for n in range(12)], 2, 0, {"blocks/0/q", "blocks/1/q"}),
        (NESTED, 1, 0, set(NESTED[:4])),  # of several numbers, the outermost is the number of the block
        (TOWERS, 0, 1, {"encoder/layers_1/w", "decoder/layers_3/w"}),
    ],
)
def test_blocks_are_counted_by_their_numbers_and_not_by_their_order(paths, first, last, floats):
    assert set(decide(paths, first, last)) == floats


def test_a_rule_comes_first():
    rules = [{"path": "layers_0/q", "recipe": "int8"}]
    assert set(decide([f"layers_{n}/{name}" for n in range(3) for name in "qk"], 1, 0, rules)) == {"layers_0/k"}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["layers/mlp/wi_0", "layers/mlp/wi_1"], "has layers/mlp/wi_0, layers/mlp/wi_1; if the layers are scanned"),
        (["Dense_0", "Dense_1"], "need several numbered blocks, such as layers_3/ or blocks/7/, in the paths"),
        (["layers_0/w", "layers_1/w"], r"leave all 2 blocks layers_\* in float; lower one number"),
    ],
)
def test_where_there_are_no_blocks_or_none_are_left(paths, message):
    with pytest.raises(ValueError, match=message):
        decide(paths, 1, 1)


def apply(params, x):
    for n in range(len(params["layers"])):
        x = x + jnp.tanh(x @ params["layers"][n]["up"]) @ params["layers"][n]["down"]
    return x @ params["out"]


def test_a_function_s_blocks():
    params = {"layers": [{"up": shape(64, 64), "down": shape(64, 64)} for _ in range(5)], "out": shape(64, 64)}
    found = layers(apply, params, shape(64, 64), config=ENDS)
    string = ENDS["quantization"]
    for n in range(5):
        wanted = string if n in (1, 2) else f"block layers/{n}, {WHY}"
        assert {found[f"layers/{n}/{name}"] for name in ("up", "down")} == {wanted}
    assert found["out"] == string
