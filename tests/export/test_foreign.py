"""Checkpoints of other tools: each scheme is decoded exactly or refused by name, and nothing in a folder is dropped."""

import json
import os
import re
import sys
import time

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxquant.compat.max_parse import parse_quant_config
from jaxquant.config.loader import load_yaml
from jaxquant.export import HfFolder, LlamaShape, Source, export, open_gguf
from jaxquant.export.gguf_file import OWN, TYPES, GgufFile
from jaxquant.export.hf import read_quantization
from jaxquant.export.safetensors import SafetensorsFile, SafetensorsWriter
from jaxquant.export.stored import read_layer

SMALL = LlamaShape(320, 128, 256, 1, 2, 1, 64, max_length=16)
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
    "W8A8": ("int-quantized", args(8, "int", "channel"), TOKENI8),
    "W8A16": (PACKED, G8, None),
    "W8A16 of channels": (PACKED, args(8, "int", "channel"), None),
    "W4A16": (PACKED, G4, None),
    "W4A16_ASYM": (PACKED, G4 | {"symmetric": False, "observer": "minmax", "observer_kwargs": {"a": 1}}, None),
    "W4A16_ASYM of channels": (PACKED, args(4, "int", "channel", symmetric=False), None),
    "W8A8 asymmetric": ("int-quantized", args(8, "int", "channel", symmetric=False), TOKENI8),
    "W4A8": ("int-quantized", G4, TOKENI8),
    "W4AFP8": ("int-quantized", G4, TOKEN8),
    "MXFP4A16": ("mxfp4-pack-quantized", MX4, None),
    "MXFP4": ("mxfp4-pack-quantized", MX4, MX4 | {"dynamic": True}),
    "MXFP8": ("mxfp8-quantized", MX8, MX8 | {"dynamic": True}),
    "NVFP4": ("nvfp4-pack-quantized", NV, NV | {"dynamic": "local"}),
    "NVFP4A16": ("nvfp4-pack-quantized", NV, None),
}
REFUSED = {
    "W3A16": (PACKED, G4 | {"num_bits": 3}, None, "num_bits 3 with type 'int'"),
    "MXFP6A16": ("mxfp6-pack-quantized", MX4 | {"num_bits": 6}, None, "num_bits 6 with type 'float'"),
    "MXFP4XFP8": (
        "mxfp4-pack-quantized",
        MX4,
        args(8, "float", "group", group_size=128, dynamic=True),
        "input_activations must have the type and group_size of the weights for MXFP4",
    ),
    "actorder": (PACKED, G4 | {"actorder": "group"}, None, "actorder 'group' is not supported"),
    "an argument of tomorrow": (PACKED, G4 | {"rotation": "hadamard"}, None, "weights.rotation 'hadamard' is not read"),
    "a block and no strategy": (PACKED, G4 | {"block_structure": [128, 128]}, None, "weights.block_structure"),
    "mixed types": ("float-quantized", NV, TOKEN8, "must have the type and group_size of the weights for NVFP4"),
}


def config(format, weights, inputs, **rest):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    about = {"quantization_status": "compressed", "global_compression_ratio": None, "version": "0.20.0"}
    whole = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, **about}
    return {"quantization_config": whole | {"ignore": ["lm_head"], "kv_cache_scheme": None, **rest}}


def words(codes, bits):
    """Lay codes one behind the other along the last axis, the first in the lowest bits, in words of 32."""
    found = np.zeros((len(codes), -(-codes.shape[1] * bits // 32)), np.uint32)
    for column in range(codes.shape[1]):
        word, place = divmod(column * bits, 32)
        found[:, word] |= codes[:, column].astype(np.uint32) << np.uint32(place)
    return found.view(np.int32)


def made(format, weights, rng):
    """Return the tensors of a layer as compressed-tensors stores them, and the weight that they mean."""
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
        is_packed = format == PACKED  # along the rows there
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
        with pytest.raises(ValueError, match=f"needs .*{missing[1:]}"):
            read_layer(spec, {key: value for key, value in tensors.items() if key != missing}, (ROWS, COLUMNS))


def test_zero_points_that_a_symmetric_config_ships_are_zero():
    format, weights, inputs = READ["W8A8"]
    tensors, weight = made(format, weights, np.random.default_rng(0))
    spec = read_quantization(config(format, weights, inputs)).spec("a")
    points = np.zeros((ROWS, 1), np.int8)
    found = read_layer(spec, tensors | {".weight_zero_point": points}, (ROWS, COLUMNS))
    np.testing.assert_array_equal(found.decode(), weight.astype(np.float32))
    with pytest.raises(ValueError, match="weight_zero_point is not 0, and its config says symmetric"):
        read_layer(spec, tensors | {".weight_zero_point": points + np.int8(1)}, (ROWS, COLUMNS))


@pytest.mark.parametrize("name", REFUSED)
def test_other_schemes_are_refused_by_name(name):
    *parts, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        read_quantization(config(*parts))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sparsity_config", {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}),
        ("transform_config", {"config_groups": {"u": {"type": "hadamard"}}}),
        ("a_field_of_tomorrow", 3),
        ("moe_sparsity_config", {"experts": [1]}),
    ],
)
def test_a_field_that_changes_values_and_is_not_read_is_an_error(field, value):
    with pytest.raises(NotImplementedError, match=rf"quantization_config\.{field}"):
        read_quantization(config(*READ["FP8_DYNAMIC"], **{field: value}))
    empty = {"config_groups": {}} if isinstance(value, dict) else None
    assert read_quantization(config(*READ["FP8_DYNAMIC"], **{field: empty})) is not None


def test_quantized_outputs_are_not_dropped():
    whole = config(*READ["FP8_DYNAMIC"])
    whole["quantization_config"]["config_groups"]["group_0"]["output_activations"] = TOKEN8
    with pytest.raises(NotImplementedError, match=r"group_0\.output_activations"):
        read_quantization(whole)


@pytest.fixture
def write(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SMALL.tensors().items()}
    source = Source(SMALL, tensors.__getitem__, None, dict.fromkeys(SMALL.linears(), 2.0))

    def write(format, more=None, quantization=None, folder="m"):
        """Export a folder, and put tensors and fields of its config in place."""
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
    return {name: found.read(name) for name in found.shape.tensors()}


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("format", "name", "array"),
    [
        ("ct_w4a16", f"{Q}.weight_g_idx", np.arange(128, dtype=np.int32)),
        ("ct_fp8_dynamic", f"{Q}.input_scale", ONE),
        ("ct_fp8_dynamic", "model.layers.0.self_attn.k_scale", ONE),
        ("ct_fp8_dynamic", f"{Q}.k_scale", ONE),
        ("ct_fp8_static", f"{Q}.input_zero_point", ONE),
        ("ct_int8", f"{Q}.bitmask", np.ones(3, np.uint8)),
        ("fp8_block", f"{Q}.weight_scale", ONE),
        ("modelopt_fp8", f"{Q}.pre_quant_scale", ONE),
        ("ct_fp8_dynamic", "lm_head.weight_scale", ONE),
        ("hf", f"{Q}.qzeros", np.ones(3, np.int32)),
    ],
)
def test_a_tensor_that_nothing_reads_is_an_error(write, format, name, array):
    with pytest.raises(ValueError, match=re.escape(name.rpartition(".")[2])):
        read_all(write(format, {name: array}))


@pytest.mark.parametrize("change", ["none", "values", "rows", "axes", "dtype", "scale"])
def test_a_head_next_to_a_tied_embedding_equals_it(write, change):
    folder = write("hf")
    embedding = SafetensorsFile(folder / "model.safetensors")["model.embed_tokens.weight"].copy()
    heads = {"values": 2 * embedding, "rows": embedding[1:], "axes": embedding[0], "dtype": embedding.view(np.uint16)}
    more = {"lm_head.weight_scale": ONE} if change == "scale" else {}
    more["lm_head.weight"] = heads.get(change, embedding)
    folder.rename(folder.with_name("old"))
    config = json.loads((write("hf", more) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    if change == "none":
        assert HfFolder(folder).shape.tied
        return
    message = r"lm_head\.weight(_scale'| and model\.embed_tokens\.weight with different values)"
    with pytest.raises(ValueError, match=message):
        HfFolder(folder)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_file_of_tensors_that_no_index_names_is_an_error(write, is_sharded):
    folder = write("hf")
    if is_sharded:
        places = dict.fromkeys(SafetensorsFile(folder / "model.safetensors"), "model.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is not read, as no index names it"):
        HfFolder(folder)


@pytest.mark.parametrize("scheme", [args(8, "float", "tensor"), args(8, "float", "tensor", dynamic=True)])
def test_a_quantized_cache_is_not_dropped(write, scheme):
    with pytest.raises(NotImplementedError, match=r"quantizes its KV cache \(float8_e4m3fn\), and its scales"):
        HfFolder(write("ct_fp8_dynamic", quantization={"kv_cache_scheme": scheme}))


@pytest.mark.parametrize(
    ("format", "end", "value"),
    [
        ("ct_fp8_dynamic", "weight_scale", np.nan),
        ("ct_fp8_dynamic", "weight_scale", np.inf),
        ("ct_fp8_dynamic", "weight", np.nan),
        ("ct_int8", "weight_scale", -np.inf),
        ("fp8_block", "weight_scale_inv", np.nan),
        ("ct_mxfp4", "weight_scale", 255),
        ("ct_mxfp4", "weight_scale", 254),  # finite, and its products are not
        ("ct_nvfp4", "weight_scale", np.nan),
        ("ct_nvfp4", "weight_global_scale", 0),
        ("ct_nvfp4", "weight_global_scale", np.nan),
        ("modelopt_nvfp4", "weight_scale_2", np.inf),
        ("hf", "weight", np.inf),
    ],
)
def test_what_decodes_to_no_finite_values_is_an_error(write, format, end, value):
    folder = write(format)
    array = SafetensorsFile(folder / "model.safetensors")[f"{Q}.{end}"].copy()
    if end == "weight_scale" and value == 254:
        array[:] = 254
    array.reshape(-1)[-1] = value
    folder.rename(folder.with_name("old"))
    with pytest.raises(ValueError, match=r"self_attn\.q_proj.*(not finite|no?t a finite|finite number)"):
        read_all(write(format, {f"{Q}.{end}": array}))


@pytest.mark.parametrize(("kind", "bits"), [("q8_0", 0x7C00), ("q4_0", 0xFC00), ("f16", 0x7E00)])
def test_a_gguf_of_no_finite_values_is_an_error(write, kind, bits):
    path = write(f"gguf_{kind}")
    place = GgufFile(path).tensors["blk.0.attn_v.weight"]
    data = bytearray(path.read_bytes())
    data[place.start : place.start + 2] = bits.to_bytes(2, "little")
    path.write_bytes(data)
    module = "model.layers.0.self_attn.v_proj"
    for read in (lambda: open_gguf(path).weight(module), lambda: open_gguf(path).quantized(module)):
        if kind != "f16" or read.__code__.co_names[1] == "weight":
            with pytest.raises(ValueError, match=r"attn_v\.weight' decodes to values that are not finite"):
                read()


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: kind.name)
def test_every_type_of_ggml_is_read_or_refused_by_name(tmp_path, kind, monkeypatch):
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng, path = np.random.default_rng(int(kind)), tmp_path / "m.gguf"
    data = rng.integers(0, 0x3C, (4, 512 // elements * size), np.uint8)  # small scales: every value is finite
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if kind.name not in TYPES:
        with pytest.raises(NotImplementedError, match=rf"'x' is of type {kind.name}, which is not read; quantize to"):
            GgufFile(path)
        return
    expected = gguf.quants.dequantize(data, kind).view(np.float32)
    np.testing.assert_array_equal(GgufFile(path).read("x"), expected)
    monkeypatch.setitem(sys.modules, "gguf", None)
    if kind.name not in OWN and kind.name != "F32":
        with pytest.raises(NotImplementedError, match=f"type {kind.name} needs the package gguf; install it"):
            GgufFile(path)


def test_a_gguf_with_more_than_a_llama_is_refused(write, tmp_path):
    path = write("gguf_f16")
    read = gguf.GGUFReader(path)

    def copy(keys, names):
        writer = gguf.GGUFWriter(tmp_path / "copy.gguf", "llama")
        for field in read.fields.values():
            if field.name.startswith("llama."):
                writer.add_key_value(field.name, field.contents(), field.types[0])
        for key, value in keys.items():
            writer.add_float32(key, value)
        for tensor in read.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for name in names:
            writer.add_tensor(name, np.ones(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "copy.gguf"

    assert open_gguf(copy({}, ())).shape.hidden == SMALL.hidden
    with pytest.raises(NotImplementedError, match=r"has llama\.logit_scale 2\.0, which is not read"):
        open_gguf(copy({"llama.logit_scale": 2.0}, ()))
    with pytest.raises(ValueError, match=r"has the tensor 'blk\.0\.attn_q_norm\.weight', which a Llama"):
        open_gguf(copy({}, ("blk.0.attn_q_norm.weight",)))


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "hf_quant_config.json"]
)
def test_a_pipe_in_a_folder_is_refused_at_once(write, name):
    folder = write("ct_fp8_dynamic")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}' is a pipe, not a file"):
        HfFolder(folder)


def test_pipes_are_refused_wherever_a_path_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "hf_quant_config.json")
    readers = (load_yaml, open_gguf, SafetensorsFile)
    for read in (*readers, lambda path: parse_quant_config({"_name_or_path": str(path.parent)}, {}, "uint8")):
        with pytest.raises(ValueError, match="is a pipe, not a file; copy what it holds to a file"):
            read(tmp_path / "pipe")


def test_a_thousand_layers_take_no_thousand_times_as_long(tmp_path):
    shape = LlamaShape(8, 2, 2, 1000, 1, 1, 2)
    writer = SafetensorsWriter(tmp_path / "model.safetensors", 10_000, {})
    for name, size in shape.tensors().items():
        writer.add(name, np.ones(size, np.float32))
    writer.close()
    layers = [f"model.layers.{layer}.mlp.up_proj" for layer in range(1000)]
    about = shape.to_config("float32", {}) | config(*READ["FP8_DYNAMIC"], ignore=[*shape.linears(), *layers, "lm_head"])
    (tmp_path / "config.json").write_text(json.dumps(about))
    began = time.process_time()
    read = HfFolder(tmp_path)
    assert len([read.read(name) for name in shape.tensors()]) == 9003
    assert time.process_time() - began < 4  # 23 s for the names alone before
