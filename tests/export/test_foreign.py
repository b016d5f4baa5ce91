"""Checkpoints of other tools: each scheme is decoded exactly or is an error, and no tensor of a folder is ignored."""

import json
import os
import re
import sys

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxquant.compat.max_parse import parse_quant_config
from jaxquant.config.loader import load_yaml
from jaxquant.export import HfFolder, Source, export, layout_of, open_gguf
from jaxquant.export.gguf_file import OWN, TYPES, GgufFile
from jaxquant.export.hf import read_quantization
from jaxquant.export.safetensors import SafetensorsFile, SafetensorsWriter
from jaxquant.export.stored import read_layer
from tests.export.models import shape_of

SMALL = layout_of(shape_of(320, 128, 256, 1, 2, 1, 64))
Q = "model.layers.0.self_attn.q_proj"
ROWS, COLUMNS = 24, 256
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def args(bits, kind, strategy, **rest):
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **rest}


TOKEN8, TOKENI8 = args(8, "float", "token", dynamic=True), args(8, "int", "token", dynamic=True)
NV = args(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
MX4 = args(4, "float", "group", group_size=32, scale_dtype="torch.uint8", zp_dtype=None)
MX8 = MX4 | {"num_bits": 8}
G4, G8 = args(4, "int", "group", group_size=128), args(8, "int", "group", group_size=128)
BLOCK = args(8, "float", "block", block_structure=[128, 128])
PACKED = "pack-quantized"
# The presets of llm-compressor: format, weights, inputs.
READ = {
    "FP8": ("float-quantized", args(8, "float", "tensor", observer="minmax"), args(8, "float", "tensor")),
    "FP8_DYNAMIC": ("float-quantized", args(8, "float", "channel"), TOKEN8 | {"observer": None}),
    "FP8_BLOCK": ("float-quantized", BLOCK, args(8, "float", "group", group_size=128, dynamic=True)),
    "W8A16 of channels": (PACKED, args(8, "int", "channel"), None),
    "W4A16": (PACKED, G4, None),
    "W4A16_ASYM of channels": (PACKED, args(4, "int", "channel", symmetric=False), None),
    "W8A8 asymmetric": ("int-quantized", args(8, "int", "channel", symmetric=False), TOKENI8),
    "W4AFP8": ("int-quantized", G4, TOKEN8),
    "MXFP4": ("mxfp4-pack-quantized", MX4, MX4 | {"dynamic": True}),
    "MXFP8": ("mxfp8-quantized", MX8, MX8 | {"dynamic": True}),
    "NVFP4": ("nvfp4-pack-quantized", NV, NV | {"dynamic": "local"}),
}


def config(format, weights, inputs, **rest):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    about = {"quantization_status": "compressed", "global_compression_ratio": None, "version": "0.20.0"}
    whole = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, **about}
    return {"quantization_config": whole | {"ignore": ["lm_head"], "kv_cache_scheme": None, **rest}}


def words(codes, bits):
    """Pack codes along the last axis into words of 32 bits; the first code has the lowest bits."""
    found = np.zeros((len(codes), -(-codes.shape[1] * bits // 32)), np.uint32)
    for column in range(codes.shape[1]):
        word, place = divmod(column * bits, 32)
        found[:, word] |= codes[:, column].astype(np.uint32) << np.uint32(place)
    return found.view(np.int32)


def made(format, weights, rng):
    """Return the tensors of a layer as compressed-tensors stores them, and the decoded weight."""
    bits, kind, strategy = weights["num_bits"], weights["type"], weights["strategy"]
    size = weights.get("group_size") or COLUMNS
    block = {"tensor": (ROWS, COLUMNS), "channel": (1, COLUMNS), "block": (128, 128)}.get(strategy, (1, size))
    counts = (-(-ROWS // block[0]), COLUMNS // block[1])
    spread = lambda x: np.kron(x.astype(np.float32), np.ones(block, np.float32))[:ROWS]  # noqa: E731
    if bits == 4 and kind == "float":
        nibbles = rng.integers(0, 16, (ROWS, COLUMNS), np.uint8)
        tensors, values = {".weight_packed": nibbles[:, ::2] | nibbles[:, 1::2] << 4}, E2M1[nibbles]
    elif kind == "float":
        stored = rng.normal(size=(ROWS, COLUMNS)).astype(ml_dtypes.float8_e4m3fn)
        tensors, values = {".weight": stored}, stored.astype(np.float32)
    else:
        codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (ROWS, COLUMNS))
        values = codes.astype(np.float32)
        if format == PACKED:
            tensors = {".weight_packed": words(codes + 2 ** (bits - 1), bits), ".weight_shape": np.array(codes.shape)}
        else:
            tensors = {".weight": codes.astype(np.int8)}
    if strategy == "tensor_group":
        scale, outer = rng.uniform(1, 400, counts).astype(ml_dtypes.float8_e4m3fn), np.float32([1234.5])
        tensors |= {".weight_scale": scale, ".weight_global_scale": outer}
        return tensors, values * spread(scale.astype(np.float32) / outer)
    if format.startswith("mxfp"):
        tensors[".weight_scale"] = rng.integers(100, 140, counts, np.uint8)
        return tensors, values * spread(2.0 ** (tensors[".weight_scale"].astype(np.float32) - 127))
    scale = rng.uniform(0.01, 0.1, counts).astype(np.float32 if kind == "float" else ml_dtypes.bfloat16)
    tensors[".weight_scale"] = scale.reshape(-1) if strategy == "tensor" else scale
    if not weights["symmetric"]:
        points = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), counts)
        is_packed = format == PACKED  # packed along the rows in this format
        tensors[".weight_zero_point"] = (
            np.ascontiguousarray(words((points + 2 ** (bits - 1)).T, bits).T) if is_packed else points.astype(np.int8)
        )
        values = values - spread(points)
    return tensors, values * spread(scale)


@pytest.mark.parametrize("name", READ)
def test_schemes_of_llm_compressor_decode_exactly(name):
    format, weights, inputs = READ[name]
    tensors, weight = made(format, weights, np.random.default_rng(len(name)))
    if name == "FP8":
        tensors[".input_scale"] = np.float32([0.5])
    if name == "NVFP4":
        tensors[".input_global_scale"] = np.float32([10.0])
    spec = read_quantization(config(format, weights, inputs)).spec("a")
    np.testing.assert_array_equal(read_layer(spec, tensors, (ROWS, COLUMNS)).decode(), weight.astype(np.float32))
    for more in ("weight_g_idx", "bitmask", "input_zero_point", "weight_zero_point"):
        if f".{more}" not in tensors:
            with pytest.raises(ValueError, match=more):
                read_layer(spec, tensors | {f".{more}": np.ones(3, np.int32)}, (ROWS, COLUMNS))
    for missing in tensors.keys() - {".weight_shape", ".input_scale", ".input_global_scale"}:
        with pytest.raises(ValueError, match=f"requires .*{missing[1:]}"):
            read_layer(spec, {key: value for key, value in tensors.items() if key != missing}, (ROWS, COLUMNS))


REFUSED = [
    ((PACKED, G4 | {"num_bits": 3}, None), {}, "num_bits 3 with type 'int'"),
    (
        ("mxfp4-pack-quantized", MX4, args(8, "float", "group", group_size=128, dynamic=True)),
        {},
        "input_activations must have the same type and group_size as the weights",
    ),
    ((PACKED, G4 | {"actorder": "group"}, None), {}, "actorder 'group' is not supported"),
    ((PACKED, G4 | {"rotation": "hadamard"}, None), {}, "weights.rotation 'hadamard' is not supported"),
    (READ["FP8_DYNAMIC"], {"sparsity_config": {"format": "sparse-24-bitmask"}}, "quantization_config.sparsity_config"),
    (
        READ["FP8_DYNAMIC"],
        {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        "quantization_config.transform_config",
    ),
    (READ["FP8_DYNAMIC"], {"a_field_of_tomorrow": 3}, "quantization_config.a_field_of_tomorrow"),
]


def test_what_changes_values_and_is_not_read_is_refused_by_name():
    for parts, fields, message in REFUSED:
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            read_quantization(config(*parts, **fields))
        nothing = {name: {"config_groups": {}} if isinstance(value, dict) else None for name, value in fields.items()}
        assert not fields or read_quantization(config(*parts, **nothing)) is not None
    whole = config(*READ["FP8_DYNAMIC"])
    whole["quantization_config"]["config_groups"]["group_0"]["output_activations"] = TOKEN8
    with pytest.raises(NotImplementedError, match=r"group_0\.output_activations"):
        read_quantization(whole)


@pytest.fixture
def write(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SMALL.tensors.items()}
    source = Source(SMALL, tensors.__getitem__, None, dict.fromkeys(SMALL.linears, 2.0))

    def write(format, more=None, quantization=None, folder="m"):
        """Export a folder, and replace tensors and fields of its config."""
        place = tmp_path / folder
        export(source, place, format)
        if place.is_dir() and more is not None:
            held = {**SafetensorsFile(place / "model.safetensors")}
            writer = SafetensorsWriter(place / "new", 200, {})
            for name, array in {**held, **more}.items():
                writer.add(name, array)
            writer.close()
            (place / "new").rename(place / "model.safetensors")
        if quantization is not None:
            about = json.loads((place / "config.json").read_text())
            about["quantization_config"] |= quantization
            (place / "config.json").write_text(json.dumps(about))
        return place

    return write


def read_all(folder):
    found = HfFolder(folder)
    return {name: found.read(name) for name in found.layout.tensors}


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("format", "name", "array"),
    [
        ("ct_w4a16", f"{Q}.weight_g_idx", np.arange(128, dtype=np.int32)),
        ("ct_fp8_dynamic", f"{Q}.input_scale", ONE),
        ("ct_fp8_dynamic", "model.layers.0.self_attn.k_scale", ONE),
        ("ct_int8", f"{Q}.bitmask", np.ones(3, np.uint8)),
        ("ct_int8", f"{Q}.weight_zero_point", ONE),  # its config states symmetric
        ("modelopt_fp8", f"{Q}.pre_quant_scale", ONE),
        ("ct_fp8_dynamic", "lm_head.weight_scale", ONE),
    ],
)
def test_a_tensor_that_nothing_reads_is_an_error(write, format, name, array):
    with pytest.raises(ValueError, match=re.escape(name.rpartition(".")[2])):
        read_all(write(format, {name: array}))


def test_what_a_folder_has_beside_its_model_is_equal_or_an_error(write):
    folder = write("hf")
    embedding = SafetensorsFile(folder / "model.safetensors")["model.embed_tokens.weight"].copy()
    about = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    for number, head in enumerate((embedding, 2 * embedding, embedding[1:], embedding.view(np.uint16))):
        tied = write("hf", {"lm_head.weight": head}, folder=f"tied{number}")
        (tied / "config.json").write_text(json.dumps(about))
        if head is embedding:
            assert HfFolder(tied).layout.shape.logits_via_embedding
            continue
        with pytest.raises(ValueError, match=r"lm_head\.weight and model\.embed_tokens\.weight with different values"):
            HfFolder(tied)
    (folder / "consolidated.safetensors").write_bytes(b"")  # the same model in Mistral's own format
    HfFolder(folder)
    (folder / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is not listed in the index"):
        HfFolder(folder)
    with pytest.raises(NotImplementedError, match=r"quantizes its KV cache \(float8_e4m3fn\), whose scales"):
        HfFolder(write("ct_int8", quantization={"kv_cache_scheme": args(8, "float", "tensor")}, folder="cache"))


@pytest.mark.parametrize(
    ("format", "end", "value"),
    [
        ("ct_fp8_dynamic", "weight", np.nan),
        ("ct_int8", "weight_scale", -np.inf),
        ("fp8_block", "weight_scale_inv", np.nan),
        ("ct_mxfp4", "weight_scale", 255),
        ("ct_mxfp4", "weight_scale", 254),  # the scale is finite, but its products are not
        ("ct_nvfp4", "weight_global_scale", 0),
        ("modelopt_nvfp4", "weight_scale_2", np.inf),
        ("hf", "weight", np.inf),
    ],
)
def test_what_decodes_to_no_finite_values_is_an_error(write, format, end, value):
    array = SafetensorsFile(write(format) / "model.safetensors")[f"{Q}.{end}"].copy()
    array.reshape(-1)[slice(None) if value == 254 else -1] = value
    with pytest.raises(ValueError, match=r"self_attn\.q_proj.*(not finite|no?t a finite|finite number)"):
        read_all(write(format, {f"{Q}.{end}": array}, folder="again"))


@pytest.mark.parametrize(("kind", "bits"), [("q8_0", 0x7C00), ("f16", 0x7E00)])
def test_a_gguf_of_no_finite_values_is_an_error(write, kind, bits):
    path = write(f"gguf_{kind}")
    place = GgufFile(path).tensors["blk.0.attn_v.weight"]
    data = bytearray(path.read_bytes())
    data[place.start : place.start + 2] = bits.to_bytes(2, "little")
    path.write_bytes(data)
    for read in (open_gguf(path).weight, *([open_gguf(path).quantized] if kind != "f16" else [])):
        with pytest.raises(ValueError, match=r"attn_v\.weight' decodes to values that are not finite"):
            read("model.layers.0.self_attn.v_proj")


def written(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: kind.name)
def test_every_type_of_ggml_is_read_or_refused_by_name(tmp_path, kind, monkeypatch):
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng, path = np.random.default_rng(int(kind)), tmp_path / "m.gguf"
    data = rng.integers(0, 0x3C, (4, 512 // elements * size), np.uint8)  # small scales: every value is finite
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    written(writer)
    if kind.name not in TYPES:
        with pytest.raises(NotImplementedError):  # the package cannot decode the type either
            gguf.quants.dequantize(data, kind)
        with pytest.raises(NotImplementedError, match=rf"'x' is of type {kind.name}, .* supported; quantize to"):
            GgufFile(path)
        return
    expected = gguf.quants.dequantize(data, kind).view(np.float32)
    np.testing.assert_array_equal(GgufFile(path).read("x"), expected)
    monkeypatch.setitem(sys.modules, "gguf", None)
    if kind.name not in OWN and kind.name != "F32":
        with pytest.raises(NotImplementedError, match=f"type {kind.name} needs the package gguf; install it"):
            GgufFile(path)


def test_a_gguf_with_more_than_a_llama_is_refused(write, tmp_path):
    read = gguf.GGUFReader(write("gguf_f16"))

    def copy(keys, names):
        writer = gguf.GGUFWriter(tmp_path / "copy.gguf", "llama")
        for field in read.fields.values():
            if field.name.startswith("llama.") and field.name not in keys:
                writer.add_key_value(field.name, field.contents(), field.types[0])
        for key, value in keys.items():
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
        for tensor in read.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for name in names:
            writer.add_tensor(name, np.ones(4, np.float32))
        written(writer)
        return tmp_path / "copy.gguf"

    assert open_gguf(copy({}, ())).layout.tensors == SMALL.tensors
    for keys, names, message in (
        ({"llama.logit_scale": 2.0}, (), r"has llama\.logit_scale 2\.0, which is not supported"),
        ({"llama.attention.head_count": 0}, (), "has 0 attention heads"),
        ({"llama.rope.dimension_count": 32}, (), "llama.rope.dimension_count 32, but keys of size 64"),
        ({}, ("blk.0.attn_q_norm.weight",), r"'blk\.0\.attn_q_norm\.weight', which no llama of its metadata has"),
        ({}, ("blk.0.attn_q.bias",), r"tensor blk\.0\.attn_q\.bias must have shape \(128,\)"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            open_gguf(copy(keys, names))


def test_pipes_are_refused_wherever_a_path_is_opened(write, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "hf_quant_config.json")
    readers = (load_yaml, open_gguf, SafetensorsFile)
    for read in (*readers, lambda path: parse_quant_config({"_name_or_path": str(path.parent)}, {}, "uint8")):
        with pytest.raises(ValueError, match="is a pipe; pass the path of a regular file"):
            read(tmp_path / "pipe")
    folder = write("ct_fp8_dynamic")
    for name in ("model.safetensors.index.json", "config.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(ValueError, match=rf"{re.escape(name)}' is a pipe; pass the path of a regular file"):
            HfFolder(folder)
