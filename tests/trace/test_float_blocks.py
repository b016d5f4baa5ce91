"""First and last blocks in float: counted by numbered path parts, for every recipe; refused without any."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxquant import describe_layers, maybe_quantize_model
from jaxquant.compat.maxtext import configure_quantization
from jaxquant.config.quant_config import QuantConfig
from tests.models import chain
from tests.serving.models import D, Linen
from tests.trace.functions import float8_dots, layers, shape

ENDS = {"quantization": "fp8_current", "float_first_blocks": 1, "float_last_blocks": 2}
WHY = "left in float by float_first_blocks 1 and float_last_blocks 2"


def decide(paths, first, last, rules=()):
    fields = {"float_first_blocks": first, "float_last_blocks": last, "rules": list(rules)}
    resolver = QuantConfig.from_any({"quantization": "int8", "quant_backend": "native", **fields}).resolver()
    assert resolver is not None
    return resolver.float_blocks(paths)


def test_blocks_are_counted_by_their_numbers_and_not_by_their_order():
    paths = [f"decoder/layers_{n}/mlp/wi_{k}" for n in (10, 2, 0, 1, 9) for k in (0, 1)]
    floats = decide([*paths, "lm_head"], 1, 1)
    assert set(floats) == {f"decoder/layers_{n}/mlp/wi_{k}" for n in (0, 10) for k in (0, 1)}
    assert floats["decoder/layers_0/mlp/wi_1"].startswith(
        "block decoder/layers_0, left in float by float_first_blocks 1"
    )
    assert set(decide([f"blocks/{n}/attn/q" for n in range(12)], 2, 0)) == {"blocks/0/attn/q", "blocks/1/attn/q"}


def test_the_outermost_number_of_several_is_the_block_s():
    paths = [f"Decoder_0/Block_{n}/Mlp_0/Dense_{k}" for n in range(3) for k in range(2)]
    assert set(decide(paths, 1, 0)) == {"Decoder_0/Block_0/Mlp_0/Dense_0", "Decoder_0/Block_0/Mlp_0/Dense_1"}
    experts = [f"layers_{n}/experts_{k}/w" for n in range(3) for k in range(4)]
    assert set(decide(experts, 0, 1)) == {f"layers_2/experts_{k}/w" for k in range(4)}
    towers = [f"{tower}/layers_{n}/w" for tower, count in (("encoder", 2), ("decoder", 4)) for n in range(count)]
    assert set(decide(towers, 0, 1)) == {"encoder/layers_1/w", "decoder/layers_3/w"}


def test_a_rule_comes_first():
    rules = [{"path": "layers_0/q", "recipe": "int8"}]
    assert set(decide([f"layers_{n}/{name}" for n in range(3) for name in "qk"], 1, 0, rules)) == {"layers_0/k"}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["layers/mlp/wi_0", "layers/mlp/wi_1"], r"have none \(layers/mlp/wi_0, .*scanned layers share one path"),
        (
            ["Dense_0", "Dense_1"],
            r"parts above the layers' own names, .* have none \(Dense_0, .* numbered layer in flo",
        ),
        (["layers_0/w", "layers_1/w"], r"leave none of the 2 blocks layers_\* quantized; lower them"),
    ],
)
def test_where_there_are_no_blocks_or_none_are_left(paths, message):
    with pytest.raises(ValueError, match=message):
        decide(paths, 1, 1)


def test_a_negative_number_of_blocks_is_refused():
    with pytest.raises(ValueError, match="float_first_blocks -1 must not be negative"):
        QuantConfig.from_any({"quantization": "int8", "float_first_blocks": -1})


def apply(params, x):
    for n in range(len(params["layers"])):
        x = x + jnp.tanh(x @ params["layers"][n]["up"]) @ params["layers"][n]["down"]
    return x @ params["out"]


@pytest.mark.parametrize("quantization", ["nvfp4", {"fwd": "fp8", "dlhs": "mxfp8"}])
def test_a_function_s_blocks(quantization):
    params = {"layers": [{"up": shape(64, 64), "down": shape(64, 64)} for _ in range(5)], "out": shape(64, 64)}
    found = layers(apply, params, shape(64, 64), config=ENDS | {"quantization": quantization})
    string = QuantConfig.from_any({"quantization": quantization}).quantization
    for n in range(5):
        wanted = string if n in (1, 2) else f"block layers/{n}, {WHY}"
        assert {found[f"layers/{n}/{name}"] for name in ("up", "down")} == {wanted}
    assert found["out"] == string


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for n in range(4):
            x = x + chain(f"layers_{n}", wi=2 * D, wo=D)(x)
        return nn.Dense(8, name="out")(x)


X = jnp.ones((2, 8, D))


def test_linen_report_and_numbers():
    model = Stack()
    rows = {row.path: row for row in describe_layers(model, ENDS, X)}
    assert [path for path, row in rows.items() if row.recipe] == ["layers_1/wi", "layers_1/wo", "out"]
    assert rows["layers_3/wo"].reason == f"block layers_3, {WHY}"
    quantized = maybe_quantize_model(model, ENDS, X)
    assert float8_dots(quantized.apply, quantized.init(jax.random.key(0), X), X) == 3


def test_scanned_layers_are_refused():
    with pytest.raises(ValueError, match=r"scanned layers share one path and one recipe: give each a path of its own"):
        describe_layers(maybe_quantize_model(Linen(), ENDS, X), ENDS, X)


def test_a_handle_does_not_know_the_other_layers():
    with pytest.raises(NotImplementedError, match="need the paths of all layers, and here some are decided"):
        configure_quantization(ENDS)
