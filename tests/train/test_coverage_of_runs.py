"""A run prints the coverage of its step at the start, and strict raises an error if it differs from the config."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxquant.audit.coverage import of_trace
from jaxquant.training.data import make_iterators
from jaxquant.training.loop import prepare
from jaxquant.training.report import load_runs, render
from jaxquant.training.step import build, check_step

LAYERS = 2
LINEAR = ["self_attention/query", "self_attention/key", "self_attention/value", "self_attention/out"] + [
    f"mlp/{name}" for name in ("wi_0", "wi_1", "wo")
]


def test_coverage_json_has_every_matmul_of_the_step(finished):
    coverage = json.loads((finished("fp8") / "coverage.json").read_text())
    layers = {layer["path"]: layer for layer in coverage["layers"]}
    assert set(layers) == {f"layers/{name}" for name in LINEAR} | {"layers/self_attention", "token_embedder"}
    for name in LINEAR:
        layer = layers[f"layers/{name}"]
        assert layer["times"] == 3 * LAYERS
        assert layer["fwd"] == "float8_e4m3fn × float8_e4m3fn"
        assert layer["dlhs"] == "float8_e5m2 × float8_e4m3fn"
        assert layer["drhs"] == "float8_e4m3fn × float8_e5m2"
        assert layer["scales"] == "per tensor, delayed"
    assert layers["layers/self_attention"]["reason"] == "no parameter: activation × activation"
    assert layers["layers/self_attention"]["times"] == 2 * 3 * LAYERS
    tied = "tied embedding (also used as a lookup table), left in float by default"
    assert layers["token_embedder"]["reason"] == tied
    assert coverage["missing"] == []


def _coverage(config):
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)
    traced = check_step(program, next(data.held_out()))
    return of_trace(traced)


@pytest.mark.parametrize(
    ("string", "fields"),
    [
        ("fp8", {"remat_policy": "full"}),
        ("fp8", {"remat_policy": "quantized", "num_experts": 4}),
        ("fp8", {"remat_policy": "matmuls", "num_experts": 4, "scan_layers": False}),
        ("fp8_block", {"remat_policy": "matmuls"}),
        ("nvfp4", {}),
    ],
)
def test_neither_rematerialization_nor_tiles_are_taken_for_another_recipe(tiny, string, fields):
    _coverage(dataclasses.replace(tiny, quantization=string, **fields)).check()


def test_the_report_shows_it(finished):
    page = render(load_runs([finished(""), finished("fp8")]))
    assert "Matmuls of the traced step" in page
    assert "no parameter: activation × activation" in page
    assert json.loads((finished("fp8") / "coverage.json").read_text())["summary"] in page


@pytest.mark.parametrize("logits_via_embedding", [True, False])
def test_strict_accepts_the_integer_products_of_exact_numerics(tiny, tmp_path, logits_via_embedding):
    changes = {"numerics": "exact", "quantization": "int8", "logits_via_embedding": logits_via_embedding}
    prepare(dataclasses.replace(tiny, run_dir=str(tmp_path / "run"), strict=True, **changes), print)


def test_strict_refuses_before_anything_is_written(tiny, tmp_path):
    # Layers with blocks of fewer than 128 elements.
    blocks = {"quantization": "int8", "quant_backend": "qwix", "quantization_local_shard_count": 2}
    config = dataclasses.replace(tiny, run_dir=str(tmp_path / "run"), strict=True, **blocks)
    with pytest.raises(ValueError, match=r"strict: layers/.* drhs: int8 × int8 is expected .* was found"):
        prepare(config, print)
    assert not (tmp_path / "run").exists()
