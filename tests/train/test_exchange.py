"""A run is exported and imported again: the same parameters, the same bytes."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

from jaxquant import serving
from jaxquant.cli import main
from jaxquant.config.loader import load_yaml
from jaxquant.config.rules import Rule
from jaxquant.core.paths import leaves_by_path
from jaxquant.core.qtensor import dequantize, is_tensor
from jaxquant.export import (
    STATIC_INPUTS,
    HfFolder,
    SafetensorsFile,
    Source,
    export,
    layout_of,
    named_tensors,
    open_gguf,
)
from jaxquant.export.gguf_file import GgufFile
from jaxquant.export.vocabulary import byte_vocabulary
from jaxquant.training import checkpoint
from jaxquant.training.conversion import convert_run, open_parameters
from jaxquant.training.exporting import decoder_source, export_run, open_source
from jaxquant.training.importing import import_to_run, import_to_serve, initial_state
from jaxquant.training.model import Decoder
from jaxquant.training.serving import open_served
from jaxquant.training.start import read_config
from jaxquant.training.step import build, decoder_of
from jaxquant.training.sums import compare_configs, config_of
from tests.export.models import shape_of
from tests.numerics import RECIPROCAL

FIELDS = {"sequence_length": 32, "batch_size": 2, "tensorboard": False, "dtype": "float32"}


@pytest.fixture(scope="module")
def run(finished):
    return finished("")


def quiet(text): ...


def parameters(folder):
    stored = open_parameters(folder, say=quiet)
    return stored.step, {path: stored.read(f"params/{path}") for path in leaves_by_path(stored.shapes["params"])}


def data_of(run):
    config = load_yaml(Path(run) / "config.yml")
    return FIELDS | {name: config[name] for name in ("dataset", "dataset_path")}


@pytest.mark.parametrize(
    "changes",
    [{}, {"quantization": "fp8", "optimizer_state": "int8_dynamic"}, {"optimizer_state": "fp8_coat", "seed": 1}],
)
def test_moments_of_an_import_take_no_memory_and_have_the_initial_values(tiny, changes):
    program = build(dataclasses.replace(tiny, **changes), 259)
    made, wanted = initial_state(program), program.init()._replace(params=program.abstract_state.params)
    assert jax.tree.structure(made) == jax.tree.structure(wanted)
    made, wanted = (leaves_by_path(state._replace(params=None)) for state in (made, wanted))
    for path, array in wanted.items():
        assert (made[path].shape, made[path].dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(np.asarray(made[path]), array)
    held = sum(x.nbytes for x in made.values() if any(getattr(x, "strides", (1,))))
    assert held < sum(x.nbytes for path, x in wanted.items() if path.startswith("opt_state")) / 4


def test_a_float_run_comes_back_as_it_was(run, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 4096)  # so that an import writes arrays in several parts
    monkeypatch.setattr(checkpoint, "SLICE_BYTES", 1024)
    export_run(run, tmp_path / "hf", "hf", dtype="float32", shard_bytes=30_000, say=quiet)
    before = parameters(run)[1]
    made = import_to_run(tmp_path / "hf", tmp_path / "again", data_of(run) | {"quantization": "ggml_q8_0"})
    step, after = parameters(tmp_path / "again")
    assert (step, made.quantization, made.learning_rate) == (0, "ggml_q8_0", 1e-5)
    assert (set(after), Path(made.tokenizer_path).name) == (set(before), "tokenizer.json")
    stores = open_parameters(tmp_path / "again", say=quiet).stores
    chunks = {path: store.spec().to_json()["metadata"]["chunks"][0] for path, store in stores.items()}
    split = [path for path in chunks if path.startswith("params/") and chunks[path] < stores[path].shape[0]]
    assert {"/layers/" in path for path in split} == {True, False}
    sparse = {
        "quantization": "fp8_full",
        "weight_sparsity_n": 2,
        "weight_sparsity_m": 4,
        "weight_sparsity_start_step": 0,
    }
    with pytest.raises(ValueError, match="weight_sparsity_start_step 0 would compute the masks from random weights"):
        import_to_run(tmp_path / "hf", tmp_path / "sparse", data_of(run) | sparse)
    for path, array in before.items():
        np.testing.assert_array_equal(after[path], array)
    # The byte tokenizer was written to a file, and has the same text.
    tokens = open_served(tmp_path / "again").tokenizer
    assert tokens.encode_prompt("é a\n").tolist() == [256, 0xC3, 0xA9, 32, 97, 10]
    assert tokens.decode([0xC3, 0xA9, 32, 97, 10]) == "é a\n"
    with pytest.raises(FileExistsError, match="exists; choose another name"):
        import_to_run(tmp_path / "hf", tmp_path / "again")
    convert_run(tmp_path / "again", tmp_path / "served", say=quiet)
    moved = (tmp_path / "again").rename(tmp_path / "moved")  # with its own tokenizer, like a converted checkpoint
    config = read_config(str(moved / "config.yml"), [f"run_dir={moved}"])
    assert compare_configs(config_of(moved / "checkpoints/0"), config, "", "").keys() <= {"steps"}
    convert_run(moved, tmp_path / "second", say=quiet)
    assert open_served(tmp_path / "served").tokenizer.encode_prompt("é").tolist() == [256, 0xC3, 0xA9]


@pytest.mark.parametrize(
    ("format", "string", "asked"),
    [
        ("fp8_block", "fp8_block", {}),
        ("ct_fp8_static", "fp8", {}),
        ("ct_nvfp4a16", "nvfp4w", {}),
        ("fbgemm_fp8", "fp8_full", {"quantization": "fp8_full"}),
    ],
)
def test_elements_and_scales_are_served_as_they_are(run, tmp_path, format, string, asked):
    export_run(run, tmp_path / "hf", format, say=quiet)
    refused = f"computes; {string}, .* would keep" if asked else "has no static scale of its input, but 'fp8' requires"
    if string != "fp8":
        fields = FIELDS if asked else FIELDS | {"quantization": "fp8"}
        with pytest.raises(ValueError, match=refused):
            import_to_serve(tmp_path / "hf", tmp_path / "served", fields)
    made = import_to_serve(tmp_path / "hf", tmp_path / "served", FIELDS | asked)
    assert made.quantization == string
    read, served = HfFolder(tmp_path / "hf"), open_served(tmp_path / "served").params
    leaves = leaves_by_path(served, is_leaf=is_tensor)
    for module, path in (("mlp.down_proj", "mlp/wo"), ("self_attn.o_proj", "self_attention/out")):
        kernel = leaves[f"layers/{path}/kernel"]
        for layer in (0, 1):
            name = f"model.layers.{layer}.{module}"
            stored, weight = read.layer(name), read.read(f"{name}.weight")
            one = jax.tree.map(lambda part, layer=layer: part[layer], kernel)
            back = np.asarray(dequantize(one)).reshape(weight.shape[::-1]).T
            np.testing.assert_allclose(back, weight, rtol=RECIPROCAL if string == "nvfp4w" else 0)
            elements = np.asarray(one.qvalue).reshape(weight.shape[::-1]).T
            np.testing.assert_array_equal(elements.view(np.uint8), stored.elements.view(np.uint8))
            if string == "fp8":
                scale = float(kernel.input_scale[layer].reshape(()))
                assert scale == read.tensors(name)[".input_scale"].reshape(())


def test_traced_parameters_of_a_run_have_the_tensors_of_its_exports(run, tmp_path):
    convert_run(run, tmp_path / "served", {"quantization": "int8"}, say=quiet)
    served = open_served(run)
    _, shape, tokens = decoder_of(served.config)

    @jax.jit
    def refit(params):
        converted = serving.convert(Decoder(shape), {"params": params}, "int8", tokens)["params"]
        sources = (decoder_source(served.config, *trees) for trees in ((params, params), (converted, converted)))
        return [named_tensors(source, "ct_int8") for source in sources]

    for folder, found in zip((run, tmp_path / "served"), refit(served.params), strict=True):
        export_run(folder, out := tmp_path / f"hf-{Path(folder).name}", "ct_int8", say=quiet)
        file = SafetensorsFile(out / "model.safetensors")
        assert found.keys() == file.keys()
        for name, array in file.items():
            assert np.asarray(found[name]).tobytes() == array.tobytes(), name


def test_a_weight_of_another_format_gets_its_own_scale_under_a_delayed_recipe(run, tmp_path):
    export_run(run, tmp_path / "hf", "modelopt_nvfp4", say=quiet)
    import_to_serve(tmp_path / "hf", tmp_path / "served", FIELDS | {"quantization": "fp8"})
    kernel = open_served(tmp_path / "served").params["layers"]["mlp"]["wo"]["kernel"]
    for layer in (0, 1):
        weight = HfFolder(tmp_path / "hf").read(f"model.layers.{layer}.mlp.down_proj.weight")
        np.testing.assert_allclose(kernel.scale[layer].ravel(), np.abs(weight).max() / 448, rtol=2**-7)


def test_bytes_of_a_format_go_to_gguf_and_back(run, tmp_path):
    string = "ggml_q4_0"
    convert_run(run, tmp_path / "served", {"quantization": string}, say=quiet)
    export_run(tmp_path / "served", tmp_path / "m.gguf", f"gguf_{string.removeprefix('ggml_')}", say=quiet)
    made = import_to_serve(tmp_path / "m.gguf", tmp_path / "again", FIELDS)
    assert made.quantization == string
    here, there = (
        leaves_by_path(serving.load(tmp_path / name).params, is_leaf=is_tensor) for name in ("served", "again")
    )
    kinds = set()
    for path, leaf in here.items():
        if is_tensor(leaf):
            kinds.add((leaf.qvalue.dtype.name, leaf.codec))
            np.testing.assert_array_equal(np.asarray(leaf.qvalue), np.asarray(there[path].qvalue))
            assert (leaf.block, leaf.shape) == (there[path].block, there[path].shape)
    assert kinds == {("uint8", string.removeprefix("ggml_"))}
    # An export of the run itself has the same bytes.
    export_run(run, tmp_path / "direct.gguf", f"gguf_{string.removeprefix('ggml_')}", say=quiet)
    name = "model.layers.1.self_attn.q_proj"
    both = [open_gguf(tmp_path / file).quantized(name).qvalue for file in ("m.gguf", "direct.gguf")]
    np.testing.assert_array_equal(*map(np.asarray, both))


def test_a_mixed_file_is_served_with_its_own_bytes(tmp_path):
    layout, path, rng = layout_of(shape_of(320, 256, 256, 3, 4, 2, 64)), tmp_path / "m.gguf", np.random.default_rng(0)
    weights = {name: rng.normal(size=size).astype(np.float32) for name, size in layout.tensors.items()}
    export(Source(layout, weights.__getitem__, byte_vocabulary(320)), path, "gguf_q4_k_m")
    with pytest.raises(ValueError, match=r"layers/self_attention/value in several types, .*; leave out scan_layers"):
        import_to_serve(path, tmp_path / "served", FIELDS | {"scan_layers": True})
    made = import_to_serve(path, tmp_path / "served", FIELDS)
    rule = Rule("layers_2/self_attention/value|layers_2/mlp/wo|logits_dense", "ggml_q6_k")
    assert (made.quantization, made.rules, made.scan_layers) == ("ggml_q4_k", (rule,), False)
    export_run(tmp_path / "served", tmp_path / "again.gguf", "gguf_q4_k_m", say=quiet)
    first, second = GgufFile(path), GgufFile(tmp_path / "again.gguf")
    assert first.tensors == second.tensors
    served = open_source(tmp_path / "served")
    for module in (*layout.linears, "lm_head"):
        np.testing.assert_array_equal(served.quantized(module).qvalue, open_gguf(path).quantized(module).qvalue)
    for name in first.tensors.keys() - {"token_embd.weight"}:  # the embedding is decoded and encoded again
        np.testing.assert_array_equal(first.raw(name), second.raw(name))


def test_an_imported_model_speaks_its_own_tokens(tmp_path, capsys):
    words = ["<s>", "</s>", "<unk>", *(f"w{number}" for number in range(321))]  # 324 is not a multiple of 64
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Whitespace(), tokenizers.decoders.WordPiece()
    made.add_special_tokens(words[:3])
    layout, path = layout_of(shape_of(len(words), 32, 64, 1, 2, 1, 16)), tmp_path / "in" / "m.gguf"
    weights = {name: np.full(size, 0.5, np.float32) for name, size in layout.tensors.items()}
    export(Source(layout, weights.__getitem__), path, "gguf_q8_0")
    rows = []
    for more in ([], ["--serve"]):
        assert main(["import", str(path), "--out", str(tmp_path / "none"), *more]) == 2
        assert "m.gguf has no tokenizer; set tokenizer_path=FILE to a tokenizer.json" in capsys.readouterr().err
    assert import_to_serve(path, tmp_path / "bytes", FIELDS | {"tokenizer_path": ""}, rows.append).tokenizer_path == ""
    assert rows[0][:2] == ("tokenizer", "bytes")
    made.save(str(path.with_name("tokenizer.json")))
    path.with_name("chat_template.jinja").write_text("{{ messages }}")
    import_to_serve(path, tmp_path / "served", FIELDS)
    (tmp_path / "served").rename(tmp_path / "moved")  # with its tokenizer
    served = open_served(tmp_path / "moved")
    assert served.tokenizer.decode(served.tokenizer.encode_prompt("w7 w300 w2")) == "w7 w300 w2"
    export_run(tmp_path / "moved", tmp_path / "hf", "hf", say=quiet)
    assert HfFolder(tmp_path / "hf").vocabulary().tokens == tuple(words)
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == "{{ messages }}"
    given = FIELDS | {"quantization": "int8w", "tokenizer_path": str(tmp_path / "large.json")}
    made.add_tokens(["more"])
    made.save(str(tmp_path / "large.json"))
    with pytest.raises(ValueError, match=r"has 325 tokens, but the embedding of .* has 324 rows; set tokenizer_path="):
        import_to_serve(path, tmp_path / "none", given)


WRITTEN = (
    ("fp8_block", "fp8_block"),
    ("nvfp4w", "ct_nvfp4a16"),
    ("nvfp4", "modelopt_nvfp4"),
    ("int8", "ct_int8"),
    ("mxfp4w", "ct_mxfp4"),
)


@pytest.mark.parametrize(("string", "format"), WRITTEN)
def test_what_is_exported_is_what_the_forward_pass_multiplied(run, tmp_path, string, format):
    """A converted checkpoint and the run itself export the same bytes, which decode to the converted kernels."""
    export_run(run, tmp_path / "float", "hf", dtype="float32", say=quiet)
    trained = tmp_path / "run"
    given = data_of(run) | {"quantization": string, "dtype": "bfloat16", "quant_backend": "native"}
    import_to_run(tmp_path / "float", trained, given)
    convert_run(trained, tmp_path / "served", say=quiet)
    leaves = leaves_by_path(serving.load(tmp_path / "served").params, is_leaf=is_tensor)
    export_run(trained, tmp_path / "direct", format, say=quiet)
    folders = [HfFolder(tmp_path / "direct")]
    if format not in STATIC_INPUTS:
        export_run(tmp_path / "served", tmp_path / "converted", format, say=quiet)
        folders.append(HfFolder(tmp_path / "converted"))
    for module, path in (("self_attn.o_proj", "self_attention/out"), ("mlp.gate_proj", "mlp/wi_0")):
        for layer in (0, 1):
            name = f"model.layers.{layer}.{module}"
            one = jax.tree.map(lambda part, layer=layer: part[layer], leaves[f"layers/{path}/kernel"])
            for folder in folders:
                weight, stored = folder.read(f"{name}.weight"), folder.layer(name)
                elements = np.asarray(one.qvalue).reshape(weight.shape[::-1]).T
                np.testing.assert_array_equal(stored.elements.view(np.uint8), elements.view(np.uint8))
                expected = np.asarray(dequantize(one)).reshape(weight.shape[::-1]).T
                if format == "ct_nvfp4a16":  # this format divides by a stored reciprocal
                    np.testing.assert_allclose(weight, expected, rtol=RECIPROCAL)
                    scales = np.asarray(one.scale).reshape(-1, weight.shape[0]).T
                    np.testing.assert_array_equal(folder.tensors(name)[".weight_scale"], scales)
                else:
                    np.testing.assert_array_equal(weight, expected)
    # After an import and a conversion with the same string, the decoded values equal those of the file.
    import_to_run(tmp_path / "direct", tmp_path / "again", data_of(run) | {"quantization": string, "dtype": "bfloat16"})
    convert_run(tmp_path / "again", tmp_path / "twice", say=quiet)
    for path, leaf in leaves_by_path(serving.load(tmp_path / "twice").params, is_leaf=is_tensor).items():
        if is_tensor(leaf):
            bound = RECIPROCAL if format == "ct_nvfp4a16" else 0
            np.testing.assert_allclose(dequantize(leaf), dequantize(leaves[path]), rtol=bound)


def test_a_run_with_delayed_scales_is_exported_with_them(finished, tmp_path):
    convert_run(finished("fp8"), tmp_path / "served", say=quiet)
    kernel = leaves_by_path(serving.load(tmp_path / "served").params, is_leaf=is_tensor)["layers/mlp/wo/kernel"]
    for folder, name in ((finished("fp8"), "direct"), (tmp_path / "served", "converted")):
        export_run(folder, tmp_path / name, "fp8_block", say=quiet)
        for layer in (0, 1):
            expected = np.asarray(dequantize(jax.tree.map(lambda part, layer=layer: part[layer], kernel))).T
            found = HfFolder(tmp_path / name).read(f"model.layers.{layer}.mlp.down_proj.weight")
            np.testing.assert_array_equal(found, expected, err_msg=name)


def test_what_does_not_map_is_refused(run, tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=r"has no config.yml or jaxquant.json; pass a"):
        open_source(tmp_path)
    serving.save(tmp_path / "other", {"kernel": np.ones((4, 4), np.float32)}, {})
    with pytest.raises(ValueError, match="has no decoder of a"):
        open_source(tmp_path / "other")
    assert main(["export", str(run), "--out", str(tmp_path / "a"), "--format", "ct_w4a16"]) == 2
    assert "q_proj contracts 32 elements, but the block size 128 of ct_w4a16" in capsys.readouterr().err
    assert main(["export", str(run), "--out", str(tmp_path / "a"), "--format", "ct_int8"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"model\.layers\.\*\.mlp\.down_proj\.weight \(2\) +ct_int8  ", shown)
    (tmp_path / "a/SHA256SUMS").unlink()  # the config is changed on purpose
    config = json.loads((tmp_path / "a/config.json").read_text())
    for key, value, message in (
        ("architectures", ["MambaForCausalLM"], "['MambaForCausalLM']; supported architectures are LlamaForCausalLM, "),
        ("rope_scaling", {"rope_type": "longrope", "factor": 8.0}, "rope_type 'longrope'"),
        ("num_hidden_layers", 3, "has no tensors of model.layers.2"),
        ("vocab_size", 321, "model.embed_tokens.weight has shape (320, 32), but its config requires (321, 32)"),
    ):
        (tmp_path / "a/config.json").write_text(json.dumps(config | {key: value}))
        words = ["import", str(tmp_path / "a"), "--out", str(tmp_path / "b"), "--serve"]
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
