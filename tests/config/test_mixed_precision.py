"""``intmp`` files: inheritance, last match, clipping, tiles, errors, and the three that are shipped."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from jaxquant.config.mixed_precision import load_mixed_precision
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec

PATHS = [f"decoder/layers/{name}" for name in (
    "self_attention/query", "self_attention/key", "self_attention/value", "self_attention/out",
    "mlp/wi_0", "mlp/wi_1", "mlp/wo",
)]  # fmt: skip


def spec(bits, factor=1.0, tile=None):
    return TensorSpec(
        f"int{bits}",
        "per_tile" if tile else "per_channel",
        Calibration("absmax", factor),
        tile_size=tile,
        reciprocal=True,
        tiling="each_axis" if tile else "nested",
    )


def weight(*numbers, **rest):
    return dataclasses.replace(spec(*numbers, **rest), keeps_grid=True)


def write(tmp_path, content, name="m.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def resolver(path):
    return QuantConfig(quantization="intmp", quant_cfg_path=path).resolver()


def test_inheritance_and_last_match(tmp_path):
    path = write(
        tmp_path,
        {
            ".*/query": {"a_bits": 4},
            "__default__": {"w_bits": 8, "w_scale": 0.5, "tile_size": 16},
            ".*/self_attention/.*": {"tile_size": -1},
            ".*/out": {"w_bits": None},
        },
    )
    decide = resolver(path)
    assert decide("x/mlp/wo", 8).recipe == Recipe("intmp", MatmulSpec(None, weight(8, 0.5, 16)))
    # The last match wins: the broad entry is written after the one for the query.
    assert decide("x/self_attention/query", 8).recipe == Recipe("intmp", MatmulSpec(None, weight(8, 0.5)))
    assert decide("x/self_attention/query", 8).rule == ".*/self_attention/.*"
    assert decide("y/query", 8).recipe == Recipe("intmp", MatmulSpec(spec(4, 1.0, 16), weight(8, 0.5, 16), "int32"))
    assert decide("y/out", 8).recipe is None
    assert decide("y/out", 8).reason == f"left in float by {path}: entry '.*/out'"
    assert decide("y/logits_dense", 8).recipe is None  # a default exclusion comes before the file's default


def test_yaml_is_the_same(tmp_path):
    text = "__default__: {w_bits: 8}\n.*/query: {w_scale: 9e-1}\n"
    as_json = write(tmp_path, {"__default__": {"w_bits": 8}, ".*/query": {"w_scale": 0.9}})
    as_yaml = write(tmp_path, text, "m.yml")
    assert load_mixed_precision(as_yaml).entries == load_mixed_precision(as_json).entries
    assert load_mixed_precision(as_yaml).default == load_mixed_precision(as_json).default
    by_tabs = write(tmp_path, '{\n\t"__default__":\t{"w_bits": 8},\n\t".*/query": {"w_scale": 0.9}\n}', "tabs.json")
    assert load_mixed_precision(by_tabs).entries == load_mixed_precision(as_json).entries


def test_shipped_files():
    found = {}
    for name in ("weight_only_scale", "subchannel"):
        path = f"configs/intmp/dense_llm_{name}.json"
        assert len(json.loads(Path(path).read_text())) == 7
        decide = resolver(path)
        decide.check_used(PATHS)
        found[name] = load_mixed_precision(path).default.fwd, [decide(path, 512).recipe.fwd for path in PATHS]
    default, fwds = found["weight_only_scale"]
    assert default == MatmulSpec(None, weight(8))
    assert all(fwd.lhs is None and fwd.rhs.calibration.factor < 1 for fwd in fwds)
    assert fwds[0].rhs.dtype == "int4"
    default, fwds = found["subchannel"]
    assert default == MatmulSpec(spec(8), weight(8), "int32")
    assert fwds[0] == MatmulSpec(spec(8, tile=128), weight(4, tile=128), "int32")
    assert fwds[2] == MatmulSpec(spec(8), weight(4), "int32")


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ({".*/q": {"w_bit": 8}}, ValueError, "'.*/q' has no field 'w_bit'; did you mean 'w_bits'?"),
        ({"__default__": {"w_bits": 5}}, ValueError, "'__default__'.w_bits must be 4, 8 or null, got 5"),
        ({".*": {"w_bits": 8, "w_scale": 0}}, ValueError, "'.*'.w_scale must be above 0 and finite, got 0"),
        ({".*": {"a_scale": 0.5}}, ValueError, "'.*'.a_scale 0.5 has no effect while a_bits is null"),
        ({".*": {"tile_size": 0}}, ValueError, "'.*'.tile_size must be -1 (untiled) or at least 1, got 0"),
        ({"(": {}}, ValueError, "entry '(' is not a regular expression: "),
        ([], TypeError, "m.json: top level must be a mapping, got list"),
        ('{"a": {}, "a": {}}', ValueError, "m.json line 1: key 'a' is given twice"),
        ('{"a": \n]', ValueError, "m.json line 2: expected the node content"),
    ],
)
def test_errors(tmp_path, content, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        QuantConfig(quantization="intmp", quant_cfg_path=write(tmp_path, content))


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"quant_cfg_path 'nowhere\.json' cannot be read: No such file or directory"):
        QuantConfig(quantization="intmp", quant_cfg_path="nowhere.json")
    with pytest.raises(ValueError, match=r"quantization 'intmp' needs quant_cfg_path, the file of its regexes, got ''"):
        QuantConfig(quantization="intmp")
    with pytest.raises(ValueError, match=r"quant_cfg_path 'x\.txt' must end in \.json, \.yml or \.yaml"):
        QuantConfig(quantization="intmp", quant_cfg_path="x.txt")


def test_an_entry_that_matches_nothing(tmp_path):
    path = write(tmp_path, {"__default__": {"w_bits": 8}, ".*/qkv_proj": {"w_bits": 4}})
    with pytest.raises(ValueError, match=r"m\.json: entry '\.\*/qkv_proj' matches no layer; the model's layers are de"):
        resolver(path).check_used(PATHS)
    # An entry that a later one covers is MaxText's general-first style, and fine.
    resolver(write(tmp_path, {".*/query": {"w_bits": 8}, ".*/self_.*": {"w_bits": 4}})).check_used(PATHS)
