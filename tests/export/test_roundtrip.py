"""Every export format: write a model, parse its config, read it; compared with the format's own package."""

import dataclasses
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxquant.config.recipes import RECIPES
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.tensor_spec import TensorSpec, keep_grid
from jaxquant.export import FORMATS, SCHEMES, HfFolder, Source, export, layout_of, open_gguf
from jaxquant.export.gguf import rows_to_gguf, rows_to_hf, stored_tensors, tensor_kind
from jaxquant.export.gguf_file import GgufFile
from jaxquant.export.hf import read_quantization
from jaxquant.export.hf.recipe import to_recipe
from jaxquant.export.layouts import decode_blocks, encode_blocks
from jaxquant.export.source import ScaledElements, fused_with
from jaxquant.formats import codec
from tests.export.models import LAYOUT, SHAPE, shape_of, source, tensors
from tests.export.test_families import FAMILY_SHAPES, source_of
from tests.numerics import LAST_BITS, SCALE_AGAIN

EXPERTS_ONLY = ("mxfp4", "gguf_mxfp4")
FOLDERS = tuple(name for name in SCHEMES if name not in EXPERTS_ONLY)
# SQNR in dB of normal weights in each format, from the relative RMSE of the format, less 0.7 dB because several layers
# share a scale: e4m3 0.0265, int8 with 256 neighbours 0.0073, int4 with 128 0.11, MXFP4 0.1154, NVFP4 0.0950.
FLOORS = {
    "hf": 50, "ct_fp8_dynamic": 31, "ct_fp8_static": 30, "ct_int8": 41, "ct_w4a16": 18.3, "ct_nvfp4": 19.7,
    "ct_mxfp4": 18.0, "fp8_block": 31, "fbgemm_fp8": 31, "modelopt_fp8": 30, "modelopt_nvfp4": 19.7,
    "ct_nvfp4a16": 19.7,
}  # fmt: skip
Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    return folder, {name: export(source(), folder / name, name, shard_bytes=3 * 10**5) for name in FOLDERS}


def sqnr(x, back):
    return 10 * np.log10(np.sum(np.square(x, dtype=np.float64)) / np.sum(np.square(x - back, dtype=np.float64)))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_reads_as_it_was_written(written, name):
    folder, rows = written[0] / name, {row.tensor: row for row in written[1][name]}
    read = HfFolder(folder)
    assert read.layout.shape == SHAPE
    back = read.source()
    assert (back.vocabulary.tokens[256], back.vocabulary.ids) == (
        "<|begin_of_text|>",
        {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258},
    )
    assert list(rows) == list(LAYOUT.tensors)
    for tensor, weight in tensors().items():
        found = read.read(tensor)
        if tensor.removesuffix(".weight") in LAYOUT.linears:
            assert sqnr(weight, found) >= FLOORS[name]
            assert sqnr(weight, found) == pytest.approx(rows[tensor].sqnr, abs=1e-4)
        else:
            np.testing.assert_array_equal(found, weight.astype(ml_dtypes.bfloat16).astype(np.float32))


SHARED = {
    "ct_fp8_static": (".weight_scale", ".input_scale"),
    "ct_nvfp4": (".weight_global_scale", ".input_global_scale"),
    "ct_nvfp4a16": (".weight_global_scale",),
    "modelopt_fp8": (".weight_scale", ".input_scale"),
    "modelopt_nvfp4": (".weight_scale_2", ".input_scale"),
}


@pytest.mark.parametrize("name", [name for name in FOLDERS if name != "hf"])
def test_a_config_says_what_was_written_and_fused_layers_have_equal_scales(written, name):
    folder = written[0] / name
    rules, read = read_quantization(json.loads((folder / "config.json").read_text())), HfFolder(folder)
    assert all(rules.spec(module) for module in LAYOUT.linears)
    assert rules.spec("lm_head") is None
    assert rules == read.quantization
    if name.startswith("modelopt"):
        sidecar = read_quantization({}, None, json.loads((folder / "hf_quant_config.json").read_text()))
        assert all(sidecar.spec(module) == rules.spec(module) for module in LAYOUT.linears)
    layers = {module: read.tensors(module) for module in LAYOUT.linears}
    for end in SHARED.get(name, ()):
        scales = {module: float(found[end].reshape(())) for module, found in layers.items()}
        for module in layers:
            assert {scales[other] for other in fused_with(module)} == {scales[module]}
        assert len({*scales.values()}) == 8  # in both layers: q, k, v; gate, up; o; down


@pytest.mark.parametrize(
    ("string", "format", "is_alone"),
    [("fp8_blockw", "fp8_block", False), ("mxfp4w", "ct_mxfp4", False), ("nvfp4w", "modelopt_nvfp4", True)],
)
def test_strings_of_weights_are_what_is_written_and_read(written, string, format, is_alone):
    """An exported float model has the string's numbers, and its config describes them; fused layers share a scale."""
    folder, spec = HfFolder(written[0] / format), RECIPES[string].recipe.fwd.rhs
    for module in LAYOUT.linears:
        assert to_recipe(dataclasses.replace(folder.spec(module), input=None), "").fwd.rhs == spec
        if is_alone and len(fused_with(module)) > 1:
            continue
        tensor = jax.jit(lambda x: quantize(x, spec, (1,)))(tensors()[f"{module}.weight"])
        stored = folder.layer(module)
        np.testing.assert_array_equal(stored.scale, np.asarray(tensor.full_scale()))
        differs = stored.elements.view(np.uint8) != np.asarray(tensor.qvalue).view(np.uint8)
        middle = (stored.decode() + np.asarray(dequantize(tensor))) / 2
        # A quotient near a rounding boundary may round either way, because XLA may multiply by the reciprocal.
        np.testing.assert_allclose(tensors()[f"{module}.weight"][differs], middle[differs], rtol=LAST_BITS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_second_export_has_the_values_of_the_first(tmp_path, name):
    """Only decoded float values are compared, not inputs; docs/guide/exchange.md has the table."""
    model, opened = source_of(FAMILY_SHAPES["GptOssForCausalLM"]) if name in EXPERTS_ONLY else source(), []
    for given in (model, None):
        read = given or dataclasses.replace(opened[0], input_amax=source().input_amax, quantized=lambda module: None)
        export(read, out := tmp_path / str(len(opened)), name)
        opened.append(HfFolder(out).source() if name in SCHEMES else open_gguf(out))
    first, second = opened
    both = [(first.read(tensor), second.read(tensor)) for tensor in model.layout.tensors]
    moved = max(np.linalg.norm(y - x) / np.linalg.norm(x) for x, y in both)
    page = (Path(__file__).parents[2] / "docs/guide/exchange.md").read_text()
    assert moved < 0.01
    words = "the same" if not moved else "the last bit" if moved < SCALE_AGAIN else "less than 1 %"
    assert re.search(rf"^\| `{name}` \|.*\| {words} \|$", page, re.M), words


@pytest.mark.parametrize(
    ("name", "dtype"), [("ct_int8", "int8"), ("ct_w4a16", "int4"), ("ct_fp8_dynamic", "float8_e4m3fn")]
)
def test_a_converted_kernel_keeps_its_elements_and_scales(tmp_path, name, dtype):
    """Each group of the format gets the scale of its row, in bfloat16 if the format stores bfloat16 scales."""
    once = jax.jit(lambda x: quantize(x, keep_grid(TensorSpec(dtype)), (1,)))
    kernels = {module: jax.tree.map(np.asarray, once(tensors()[f"{module}.weight"])) for module in LAYOUT.linears}
    export(source(quantized=kernels.__getitem__), tmp_path / "out", name)
    folder = HfFolder(tmp_path / "out")
    for module, kernel in kernels.items():
        np.testing.assert_array_equal(folder.layer(module).decode(), dequantize(kernel))
        is_short = name == "ct_w4a16" and (kernel.scale == kernel.scale.astype("bfloat16")).all()
        assert folder.tensors(module)[".weight_scale"].dtype == ("bfloat16" if is_short else "float32")


def test_a_scale_of_a_larger_block_stands_for_each_of_a_format():
    rng = np.random.default_rng(2)
    fp8, nvfp4 = (SCHEMES[name].spec.weight for name in ("fp8_block", "ct_nvfp4"))

    def tensor(shape, counts, block=None):
        scale = rng.normal(size=counts).astype(np.float32)
        return QTensor(rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn), scale, block=block)

    for given in (tensor((300, 260), (1, 1)), tensor((300, 260), (2, 2), (256, 256)), tensor((256, 512), (2, 1))):
        elements, scale, outer, is_exact = ScaledElements.from_qtensor(given, fp8)
        assert (elements.shape, outer.tolist(), is_exact) == (given.shape, 1, True)
        rows, columns = given.shape
        expected = np.kron(given.scale, np.ones(given.blocks))[:rows, :columns]
        np.testing.assert_array_equal(np.kron(scale, np.ones((128, 128)))[:rows, :columns], expected)
        assert ScaledElements.from_qtensor(given, nvfp4) is None
    for given in (tensor((256, 256), (4, 4)), tensor((384, 256), (4, 2), (96, 128))):
        assert not ScaledElements.from_qtensor(given, fp8).is_exact


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K"])
def test_gguf_is_what_its_own_reader_reads(tmp_path, kind):
    rows = {row.tensor: row for row in export(source(), tmp_path / "m.gguf", f"gguf_{kind.lower()}")}
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    names = {tensor.name: tensor for tensor in theirs.tensors}
    assert len(names) == len(rows)
    value = lambda key: theirs.fields[key].contents()  # noqa: E731
    assert (value("general.architecture"), value("llama.attention.head_count_kv")) == ("llama", 2)
    assert value("llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)
    tokens = value("tokenizer.ggml.tokens")
    assert (len(tokens), tokens[65], tokens[32], tokens[257]) == (320, "A", "Ġ", "<|end_of_text|>")
    attention = names["blk.1.attn_q.weight"]
    assert attention.tensor_type == gguf.GGMLQuantizationType[kind]
    decoded = gguf.quants.dequantize(attention.data, attention.tensor_type)
    back = open_gguf(tmp_path / "m.gguf")
    assert back.layout.shape == SHAPE
    np.testing.assert_array_equal(decoded, rows_to_gguf(back.weight(Q), 4))
    for name, weight in tensors().items():
        found = sqnr(weight, back.read(name)) if not name.endswith("norm.weight") else np.inf
        assert found == pytest.approx(rows[name].sqnr, abs=1e-3)
    if kind != "F16":
        # Reading and writing again keeps all bytes: there is no second rounding.
        export(back, tmp_path / "again.gguf", f"gguf_{kind.lower()}")
        assert back.quantized(Q).shape == (256, 256)
        np.testing.assert_array_equal(np.asarray(dequantize(back.quantized(Q))), back.weight(Q))
        again = gguf.GGUFReader(tmp_path / "again.gguf")
        assert all(np.array_equal(tensor.data, names[tensor.name].data) for tensor in again.tensors)


@pytest.mark.parametrize(("kind", "instead"), [("Q4_K", "Q5_0"), ("Q4_0", "Q4_0")])
def test_rows_that_no_block_divides_are_written_as_llama_cpp_writes_them(tmp_path, kind, instead):
    layout = layout_of(shape_of(320, 96, 200, 1, 4, 4, 64))  # 96, 200 and 256 columns
    rng = np.random.default_rng(3)
    weights = {name: rng.normal(size=size).astype(np.float32) for name, size in layout.tensors.items()}
    rows = export(Source(layout, weights.__getitem__), tmp_path / "m.gguf", f"gguf_{kind.lower()}")
    found, back = GgufFile(tmp_path / "m.gguf"), open_gguf(tmp_path / "m.gguf")
    for part, own in (("mlp.up_proj", instead), ("mlp.down_proj", "F16"), ("self_attn.o_proj", kind)):
        name = f"model.layers.0.{part}.weight"
        stored = next(each for each, names in stored_tensors(layout.shape).items() if names == [name])
        tensor = found.tensors[stored]
        assert tensor.kind == own
        assert next(row.format for row in rows if row.tensor == name) == own
        if own[-1] != "K":
            data = gguf.quants.quantize(weights[name], gguf.GGMLQuantizationType[own]).view(np.uint8)
            np.testing.assert_array_equal(found.raw(stored), data)
            decoded = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[own])
            np.testing.assert_array_equal(back.read(name), decoded)


MOE = {"num_experts": 8, "num_experts_per_tok": 2}
# Numbers of tensors of each type in files that llama.cpp's quantizer wrote from our F16 files.
MIXED = [
    (16, 256, 2, {}, "Q4_K_M", {"Q4_K": 97, "Q6_K": 17, "F32": 33}),
    (9, 256, 2, {"logits_via_embedding": True}, "Q5_K_M", {"Q5_K": 53, "Q6_K": 11, "F32": 19}),
    (11, 256, 2, MOE, "Q4_K_M", {"Q4_K": 40, "Q5_K": 11, "Q6_K": 6, "Q8_0": 22, "F32": 34}),
    (80, 256, 2, {}, "Q4_K_M", {"Q4_K": 441, "Q5_K": 40, "Q6_K": 81, "F32": 161}),
    (80, 256, 4, {}, "Q4_K_M", {"Q4_K": 481, "Q6_K": 81, "F32": 161}),
    (80, 256, 4, {"attention_bias": "qkv"}, "Q4_K_M", {"Q4_K": 441, "Q5_K": 40, "Q6_K": 81, "F32": 401}),
    (4, 96, 4, {}, "Q5_K_M", {"Q5_1": 19, "Q5_K": 6, "Q6_K": 2, "Q8_0": 3, "F32": 9}),
]


def test_a_mixture_has_the_types_that_llama_cpp_selects():
    for layers, size, heads, options, kind, counts in MIXED:
        layout = layout_of(shape_of(320, size, 256, layers, 4, heads, 64, **options))
        empty, stored = Source(layout, layout.tensors.__getitem__), stored_tensors(layout.shape)
        kinds = {own: tensor_kind(empty, names[0], kind) for own, names in stored.items()}
        assert Counter(kinds.values()) == counts
        if layers == 16:
            more = {own for own, found in kinds.items() if found == "Q6_K"} - {"output.weight"}
            parts = ("attn_v", "ffn_down")
            assert more == {f"blk.{at}.{part}.weight" for at in (0, 1, 4, 7, 10, 13, 14, 15) for part in parts}


def test_rows_of_heads_turn_and_turn_back():
    weight = np.arange(16 * 3).reshape(16, 3)
    turned = rows_to_gguf(weight, 2)
    assert turned[:8, 0].tolist() == [3 * row for row in (0, 4, 1, 5, 2, 6, 3, 7)]
    np.testing.assert_array_equal(rows_to_hf(turned, 2), weight)


def test_parts_of_a_large_array_are_encoded_alike():
    x = np.random.default_rng(2).normal(size=(3, 2**20)).astype(np.float32)  # several parts, the last one smaller
    whole = np.asarray(codec("q8_0").encode(x)["blocks"])
    np.testing.assert_array_equal(encode_blocks("q8_0", x), whole)
    np.testing.assert_array_equal(decode_blocks("q8_0", whole), np.asarray(codec("q8_0").decode({"blocks": whole})))


def test_what_does_not_fit_is_refused_and_nothing_stays(tmp_path):
    with pytest.raises(ValueError, match=r"'gguf_q3' is not known; use one of hf, ct_fp8"):
        export(source(), tmp_path / "a", "gguf_q3")
    with pytest.raises(ValueError, match=r"input of model.layers.0.self_attn.q_proj has no amax"):
        export(source(input_amax={}), tmp_path / "a", "modelopt_fp8")
    small = source(layout=layout_of(shape_of(320, 256, 320, 2, 4, 2, 64)))
    with pytest.raises(ValueError, match="down_proj contracts 320 elements, but the block size 128 of"):
        export(small, tmp_path / "a", "ct_w4a16")
    broken = dict(tensors())
    broken[f"{Q}.weight"] = np.full((256, 256), np.nan, np.float32)
    for name in ("ct_fp8_dynamic", "gguf_f16"):
        with pytest.raises(ValueError, match=r"q_proj.weight has values that are not finite"):
            export(source(read=broken.__getitem__), tmp_path / "a", name)
    for tensor, value, name, dtype, message in (
        ("model.norm", -3.4e38, "ct_int8", "bfloat16", "has magnitude 3.4e.38, which is too large for bfloat16; "),
        ("lm_head", 65520, "gguf_q8_0", "float32", "has magnitude 65520, which is too large for float16 in every "),
        (Q, 1e5, "gguf_f16", "float32", "100000, which is too large for float16 in GGUF type F16; export to a H"),
        (Q, -1e9, "gguf_q4_k", "float32", "has magnitude 1e.09, which is too large for Q4_K; use another"),
        (Q, 3e38, "ct_mxfp4", "float32", "has magnitude 3e.38, which is too large for ct_mxfp4; use another"),
    ):
        large = tensors() | {f"{tensor}.weight": np.full(LAYOUT.tensors[f"{tensor}.weight"], value, np.float32)}
        with np.errstate(over="raise"), pytest.raises(ValueError, match=rf"^{tensor}.weight .*{message}"):
            export(source(read=large.__getitem__), tmp_path / "a", name, dtype=dtype)
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    for name in ("hf", "gguf_f16"):
        with pytest.raises(FileExistsError, match=r"exists; choose another"):
            export(source(), tmp_path / "a", name)
    assert set(FORMATS) == {
        *SCHEMES,
        *(f"gguf_{kind}" for kind in ("f16", "q4_0", "q8_0", "q4_k", "q4_k_m", "q5_k", "q5_k_m", "q6_k", "mxfp4")),
    }


def test_what_a_folder_of_another_family_has_is_not_dropped(tmp_path, written):
    folder = tmp_path / "hf"
    shutil.copytree(written[0] / "hf", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [257, 258]}))
    assert HfFolder(folder).vocabulary().special["eos"][0] == 257
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    save_file({f"{Q}.bias": np.ones(4, np.float32)}, folder / "biases.safetensors")
    index["weight_map"][f"{Q}.bias"] = "biases.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="bias', which no LlamaForCausalLM of its config has"):
        HfFolder(folder)
