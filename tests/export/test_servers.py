"""Formats in which servers compute a checkpoint: rules, conditions, and the command ``jaxquant servers``."""

import dataclasses
import fnmatch
import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from jaxquant import cli
from jaxquant.export import FORMATS, SCHEMES, DecoderShape, SafetensorsFile, Source, export
from jaxquant.export.servers import (
    CHIPS,
    DIFFERS,
    NOT_KNOWN,
    REFUSED,
    RULES,
    SAME,
    SERVERS,
    Layer,
    read_layers,
    served_layers,
    surviving_strings,
    worst_result,
)
from tests.export.models import shape_of
from tests.export.test_families import FAMILY_SHAPES, source_of

FLOAT = {"bfloat16", "float16", "float32"}
SHAPE = shape_of(320, 128, 256, 2, 2, 1, 64)


def model(shape: DecoderShape = SHAPE) -> Source:
    made = source_of(shape)
    return dataclasses.replace(made, input_amax=dict.fromkeys(made.layout.linears, 4.0))


@functools.cache
def exported(name: str) -> Path:
    out = Path(tempfile.mkdtemp()) / name
    export(model(FAMILY_SHAPES["GptOssForCausalLM"] if name == "mxfp4" else SHAPE), out, name)
    return out


def results(name: str, server: str, chip: str) -> dict[str, str]:
    """Return the result of each layer without its index, by name; layers of one name must agree."""
    served = served_layers(read_layers(exported(name)), server, chip)
    return {each.layer.name.rpartition(".")[2]: each.result for each in served}


def patch(folder: Path, end: str, values: float) -> None:
    """Set every element of the float32 tensors whose names end in ``end``."""
    path = folder / "model.safetensors"
    entries = {name: entry for name, entry in SafetensorsFile(path).entries.items() if name.endswith(end)}
    assert entries
    with path.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        for entry in entries.values():
            file.seek(start + entry.start)
            file.write(np.full(entry.shape, values, np.float32).tobytes())


@pytest.mark.parametrize("name", SCHEMES)
def test_every_format_of_a_folder_has_a_row_for_each_layer(name: str):
    layers = read_layers(exported(name))
    stored = {layer.stored for layer in layers}
    assert stored - FLOAT == ({name} - {"hf"})
    assert {layer.name for layer in layers} >= {"lm_head"}
    assert not any("embed_tokens" in layer.name or "norm" in layer.name for layer in layers)
    for server in SERVERS:
        for chip in CHIPS:
            for each in served_layers(layers, server, chip):
                is_same = (each.weight, each.input) == (each.layer.weight, each.layer.input)
                assert (each.result == SAME) is is_same
                assert bool(each.source) is (each.result != NOT_KNOWN)
                assert each.how or each.result not in (DIFFERS, REFUSED)


def test_rules_name_what_exists():
    stored = {*SCHEMES, *FORMATS, *FLOAT, "fp8_block scale_fmt=ue8m0", "gguf_bf16", "gguf_nvfp4"}
    stored |= {f"gguf_q{bits}" for bits in ("4_1", "5_0", "5_1")}
    for rule in RULES:
        assert rule.server in SERVERS
        assert {*rule.chips} <= {*CHIPS.values()}
        assert rule.layers in ("linear", "experts", "all")
        assert rule.unless in ("", "equal fused scales", "powers of two")
        assert all(fnmatch.filter(stored, pattern) for pattern in rule.stored), rule.stored
        assert not (rule.refused and (rule.weight or rule.input or rule.how))
        assert "@" in rule.source


def test_known_changes():
    assert results("fp8_block", "tpu-inference", "v6e")["q_proj"] == DIFFERS
    assert results("fp8_block", "sglang", "h200")["q_proj"] == SAME
    assert {*results("ct_int8", "tpu-inference", "v6e").values()} == {SAME}
    assert results("ct_int8", "vllm", "b200")["q_proj"] == REFUSED
    experts = results("mxfp4", "tpu-inference", "v7x")
    assert (experts["gate_up_proj"], experts["q_proj"]) == (DIFFERS, SAME)
    assert results("fp8_block", "mlc", "v5e")["q_proj"] == NOT_KNOWN


def test_gguf_rows_have_the_type_of_each_tensor():
    layers = read_layers(exported("gguf_q4_0"))
    assert {layer.stored for layer in layers} == {"gguf_q4_0", "gguf_f16"}
    assert worst_result(served_layers(layers, "llama.cpp", "cpu")) == DIFFERS
    assert worst_result(served_layers(layers, "vllm", "h200")) == REFUSED


def test_a_partly_quantized_folder_is_compared_layer_by_layer(tmp_path: Path):
    whole = model()
    linears = {name: shape for name, shape in whole.layout.linears.items() if not name.endswith("down_proj")}
    layout = dataclasses.replace(whole.layout, linears=linears)
    export(dataclasses.replace(whole, layout=layout), tmp_path / "out", "ct_fp8_dynamic")
    served = served_layers(read_layers(tmp_path / "out"), "vllm", "a100")
    found = {each.layer.name.rpartition(".")[2]: (each.layer.stored, each.result) for each in served}
    assert found["down_proj"] == found["lm_head"] == ("bfloat16", SAME)
    assert found["up_proj"] == ("ct_fp8_dynamic", DIFFERS)


def test_a_float_tensor_is_float_even_if_the_config_quantizes_it(tmp_path: Path):
    export(model(), tmp_path / "out", "hf")
    config = json.loads((tmp_path / "out/config.json").read_text())
    config["quantization_config"] = SCHEMES["ct_int8"].config
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    assert {layer.stored for layer in read_layers(tmp_path / "out")} == {"bfloat16"}


def test_layers_are_requantized_only_if_their_scales_require_it(tmp_path: Path):
    export(model(), tmp_path / "static", "ct_fp8_static")
    served = lambda name: {  # noqa: E731
        each.layer.name.rpartition(".")[2]: each for each in served_layers(read_layers(tmp_path / name), "vllm", "h200")
    }
    assert {each.result for each in served("static").values()} == {SAME}
    patch(tmp_path / "static", "gate_proj.weight_scale", 1.0)
    assert {name for name, each in served("static").items() if each.result != SAME} == {"gate_proj", "up_proj"}
    export(model(), tmp_path / "blocks", "fp8_block")
    before = served("blocks")["q_proj"]
    assert before.weight != before.layer.weight
    patch(tmp_path / "blocks", "weight_scale_inv", 0.25)
    after = served("blocks")["q_proj"]
    assert after.weight == after.layer.weight
    assert after.input != after.layer.input


def test_surviving_strings_are_computed_unchanged():
    assert "int8 as ct_int8" in surviving_strings("tpu-inference", "v6e")
    assert "int8 as ct_int8" not in surviving_strings("sglang-jax", "v6e")
    assert "mxfp4w as mxfp4" in surviving_strings("vllm", "h200")
    assert "fp8_block as fp8_block" not in surviving_strings("vllm", "b200")
    assert not surviving_strings("llama.cpp", "cpu")


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main(["servers", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_command(capsys: pytest.CaptureFixture[str]):
    folder, vllm = exported("fp8_block"), ("--server", "vllm", "--chip", "h200")
    code, out, _ = run(capsys, folder)
    assert code == 0
    assert all(server in out for server in SERVERS)
    code, out, err = run(capsys, folder, *vllm)
    assert (code, err) == (0, "")
    assert "q_proj (2)" in out
    code, _, err = run(capsys, folder, *vllm, "--strict")
    assert code == 1
    assert err.startswith("error: ")
    assert "model.layers.0.self_attn.q_proj" in err
    assert run(capsys, exported("ct_fp8_dynamic"), *vllm, "--strict")[0] == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--server", "vlm"), "'vllm'"),
        (("--server", "zzz"), ", ".join(SERVERS)),
        (("--server", "vllm", "--chip", "zzz"), ", ".join(CHIPS)),
        (("--strict",), "--server and --chip"),
    ],
)
def test_errors_name_what_is_known(words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, exported("ct_int8"), *words)
    assert code == 2
    assert named in err


def test_a_layer_of_an_unknown_format_is_not_known():
    layers = [Layer("mlp.up_proj", "", "int4 per 1x32", "not quantized")]
    assert {each.result for chip in CHIPS for each in served_layers(layers, "vllm", chip)} == {NOT_KNOWN}
