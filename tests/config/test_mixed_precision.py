"""``intmp`` files: inheritance, last match, clipping, tiles, errors, and the three shipped files."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from jaxquant.config.mixed_precision import load_mixed_precision
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Decision
from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec

ROOT = Path(__file__).parents[2]
NAMES = {"self_attention": ("query", "key", "value", "out"), "mlp": ("wi_0", "wi_1", "wo")}
PATHS = [f"decoder/layers/{block}/{name}" for block, names in NAMES.items() for name in names]


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
    entries = {
        ".*/query": {"a_bits": 4},
        "__default__": {"w_bits": 8, "w_scale": 0.5, "tile_size": 16},
        ".*/self_attention/.*": {"tile_size": -1},
        ".*/out": {"w_bits": None},
    }
    path = write(tmp_path, entries)
    decide = resolver(path)
    assert decide("x/mlp/wo", 8).recipe == Recipe("intmp", MatmulSpec(None, weight(8, 0.5, 16)))
    # The last match wins: the general entry is after the entry for the query.
    assert decide("x/self_attention/query", 8).recipe == Recipe("intmp", MatmulSpec(None, weight(8, 0.5)))
    assert decide("x/self_attention/query", 8).rule == ".*/self_attention/.*"
    assert decide("y/query", 8).recipe == Recipe("intmp", MatmulSpec(spec(4, 1.0, 16), weight(8, 0.5, 16), "int32"))
    assert decide("y/out", 8) == Decision(None, f"left in float by {path}: entry '.*/out'", ".*/out")
    assert decide("y/logits_dense", 8).recipe is None  # a default exclusion is checked before the file's default


def test_yaml_and_json_with_tabs_are_the_same(tmp_path):
    texts = {
        "m.json": '{"__default__": {"w_bits": 8}, ".*/query": {"w_scale": 0.9}}',
        "m.yml": "__default__: {w_bits: 8}\n.*/query: {w_scale: 9e-1}\n",
        "tabs.json": '{\n\t"__default__":\t{"w_bits": 8},\n\t".*/query": {"w_scale": 0.9}\n}',
    }
    read = [load_mixed_precision(write(tmp_path, text, name)) for name, text in texts.items()]
    assert all((each.entries, each.default) == (read[0].entries, read[0].default) for each in read[1:])


def test_shipped_files():
    found = {}
    for name in ("weight_only_scale", "subchannel"):
        path = f"{ROOT}/configs/intmp/dense_llm_{name}.json"
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


ERRORS = [
    ({".*/q": {"w_bit": 8}}, "'.*/q' has no field 'w_bit'; did you mean 'w_bits'?"),
    ({"__default__": {"w_bits": 5}}, "'__default__'.w_bits must be 4, 8 or null, got 5"),
    ({".*": {"w_bits": 8, "w_scale": 0}}, "'.*'.w_scale must be above 0 and finite, got 0"),
    ({".*": {"a_scale": 0.5}}, "'.*'.a_scale 0.5 has no effect, because a_bits is null; set a_bits"),
    ({".*": {"tile_size": 0}}, "'.*'.tile_size must be -1 (no tiles) or at least 1, got 0"),
    ({"(": {}}, "entry '(' is not a regular expression: "),
    ([], "m.json must be a mapping of names to values, got list"),
    ('{"a": {}, "a": {}}', "m.json line 1: key 'a' is already on line 1; remove one of the two"),
    ('{"a": \n]', "m.json line 2: expected the node content"),
]
PLACES = {
    "nowhere.json": "quant_cfg_path 'nowhere.json' cannot be read: No such file or directory; check the path",
    "": "quantization 'intmp' needs a file; set quant_cfg_path to the path of a JSON or YAML file",
    "x.txt": "quant_cfg_path 'x.txt' must end in .json, .yml or .yaml",
}


def test_errors(tmp_path):
    written = [(write(tmp_path, content, f"{n}m.json"), message) for n, (content, message) in enumerate(ERRORS)]
    for path, message in [*written, *PLACES.items()]:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            QuantConfig(quantization="intmp", quant_cfg_path=path)


def test_an_entry_that_matches_nothing(tmp_path):
    path = write(tmp_path, {"__default__": {"w_bits": 8}, ".*/qkv_proj": {"w_bits": 4}})
    with pytest.raises(ValueError, match=r"m\.json: entry '\.\*/qkv_proj' matches no layer; the model's layers are de"):
        resolver(path).check_used(PATHS)
    # MaxText writes general entries first, so a later entry may override an earlier one.
    resolver(write(tmp_path, {".*/query": {"w_bits": 8}, ".*/self_.*": {"w_bits": 4}})).check_used(PATHS)
