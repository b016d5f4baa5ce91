"""Families of checkpoints: published configs, folders and GGUF files of each, and what is refused by name."""

import dataclasses
import json
import math
import re
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxquant.export import HfFolder, Source, export, layout_of, open_gguf
from jaxquant.export.families import families, family_of, shape_of_config, to_config
from jaxquant.export.gguf_file import GgufFile
from jaxquant.export.gguf_reader import read_shape
from tests.export.models import shape_of

ROOT = Path(__file__).parents[2]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALED_WINDOWS = {"full_attention": {}, "sliding_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 8.0}}
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def published(name, sizes, **keys):
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {"architectures": [name], **dict(zip((*names, "num_key_value_heads"), sizes, strict=True)), **keys}


# Configs as published, and the number of parameters that the model cards or the index files give.
PUBLISHED = {
    "Llama-3.1-8B": (
        published("LlamaForCausalLM", (128256, 4096, 14336, 32, 32, 8), rope_scaling={"rope_type": "llama3", **LLAMA3}),
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (
        published("MistralForCausalLM", (32000, 4096, 14336, 32, 32, 8), sliding_window=4096),
        7_241_732_096,
    ),
    "Qwen2.5-7B": (
        published(
            "Qwen2ForCausalLM", (152064, 3584, 18944, 28, 28, 4), use_sliding_window=False, sliding_window=131072
        ),
        7_615_616_512,
    ),
    "Qwen3-8B": (published("Qwen3ForCausalLM", (151936, 4096, 12288, 36, 32, 8), head_dim=128), 8_190_735_360),
    "gemma-2-2b": (published("Gemma2ForCausalLM", (256000, 2304, 9216, 26, 8, 4), hidden_act="gelu"), 2_614_341_888),
    "gemma-3-1b": (published("Gemma3ForCausalLM", (262144, 1152, 6912, 26, 4, 1), sliding_window=512), 999_885_952),
    "Mixtral-8x7B-v0.1": (
        published(
            "MixtralForCausalLM",
            (32000, 4096, 14336, 32, 32, 8),
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
        ),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        published(
            "Qwen3MoeForCausalLM",
            (151936, 2048, 6144, 48, 32, 4),
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        30_532_122_624,
    ),
    "gpt-oss-20b": (
        published(
            "GptOssForCausalLM",
            (201088, 2880, 2880, 24, 64, 8),
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            sliding_window=128,
            attention_bias=True,
            rope_scaling=YARN,
            layer_types=["sliding_attention", "full_attention"] * 12,
        ),
        20_914_757_184,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_the_published_number_of_parameters(name):
    config, count = PUBLISHED[name]
    shape = shape_of_config(config)
    assert sum(map(math.prod, layout_of(shape).tensors.values())) == count
    assert to_config(shape)["architectures"] == config["architectures"]
    assert shape_of_config(json.loads(json.dumps(to_config(shape)))) == shape
    if shape.rope_local_theta:  # as transformers 5 writes it
        rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 5000.0}}
        assert shape_of_config({**config, "rope_parameters": rope}).rope_local_theta == 5000.0


def test_guide_and_readme_list_all_families():
    guide = (ROOT / "docs/guide/exchange.md").read_text()
    rows = re.findall(r"^\| `(\w+ForCausalLM)` \|.*\| `([\w-]+)`.* \|$", guide, re.M)
    assert rows == [(family.architecture, family.gguf) for family in families()]
    listed = re.search(r"exchange.md\) of ([\w, ]+), \[formats", (ROOT / "README.md").read_text())[1]
    assert set(re.split(", | and ", listed)) == {name.removesuffix("ForCausalLM") for name, _ in rows}


SMALL = (320, 64, 96, 4, 4, 2, 32)
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2}
YARN_FIELDS = {"rope_type": "yarn", "rope_factor": 32.0, "original_max_position_embeddings": 64}
NO_YARN = {"rope_type": "default", "rope_factor": 1.0, "original_max_position_embeddings": 0, "rope_truncate": True}
FAMILY_SHAPES = {
    "LlamaForCausalLM": {
        **{"rope_type": "llama3", "rope_factor": 8.0, "original_max_position_embeddings": 8192},
        **{"attention_bias": "all", "mlp_bias": True},
    },
    "MistralForCausalLM": {"sliding_window_size": 8},
    "Qwen2ForCausalLM": {"attention_bias": "qkv", **YARN_FIELDS},
    "Qwen3ForCausalLM": {"use_qk_norm": True, "rope_type": "linear", "rope_factor": 2.0},
    "Gemma2ForCausalLM": {
        **{"attn_logits_soft_cap": 50.0, "final_logits_soft_cap": 30.0, "sliding_window_size": 8},
        "logits_via_embedding": True,
    },
    "Gemma3ForCausalLM": {"sliding_window_size": 8, "global_attention_every": 6, "rope_local_theta": 10000.0},
    "MixtralForCausalLM": EXPERTS,
    "Qwen3MoeForCausalLM": EXPERTS,
    "GptOssForCausalLM": {**EXPERTS, "sliding_window_size": 8, **YARN_FIELDS, "rope_truncate": False},
}
FAMILY_SHAPES = {
    family.architecture: shape_of(*SMALL, **{**family.fixed, **FAMILY_SHAPES[family.architecture]})
    for family in families()
}


def source_of(shape, seed=0):
    rng, layout = np.random.default_rng(seed), layout_of(shape)
    tensors = {name: rng.normal(size=size).astype(ml_dtypes.bfloat16) for name, size in layout.tensors.items()}
    quantized = lambda module: None if f"{module}.weight" in tensors else tensors[module]["no layer"]  # noqa: E731
    return Source(layout, lambda name: tensors[name].astype(np.float32), quantized=quantized)


@pytest.mark.parametrize("name", FAMILY_SHAPES)
def test_a_folder_and_a_gguf_file_of_each_family_read_as_written(tmp_path, name):
    shape = FAMILY_SHAPES[name]
    source, layout = source_of(shape), layout_of(shape)
    assert family_of(shape).architecture == name
    export(source, tmp_path / "hf", "hf", dtype="float32")
    folder = HfFolder(tmp_path / "hf")
    assert folder.layout.shape == shape
    for tensor in layout.tensors:
        np.testing.assert_array_equal(folder.read(tensor), source.read(tensor))
    path = tmp_path / "m.gguf"
    if shape.sliding_window_size and family_of(shape).gguf == "llama":
        with pytest.raises(NotImplementedError, match=r"llama\.cpp computes llama with sliding_window_size 0"):
            export(source, path, "gguf_f16")
        return
    export(source, path, "gguf_f16")
    theirs, back = gguf.GGUFReader(path), open_gguf(path)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == family_of(shape).gguf)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    for tensor in theirs.tensors:
        parts = tensor.name.rpartition(".")[0].split(".")
        assert ".".join([*parts[:1], "{bid}", *parts[2:]] if parts[0] == "blk" else parts) in known, tensor.name
    assert back.layout.shape == shape
    for tensor in layout.tensors:
        np.testing.assert_allclose(back.read(tensor), source.read(tensor), rtol=1e-3, atol=1e-6)


def test_the_number_of_fused_experts_is_that_of_the_config(tmp_path):
    export(source_of(FAMILY_SHAPES["GptOssForCausalLM"]), tmp_path / "hf", "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"num_local_experts": 2}))
    with pytest.raises(ValueError, match="has 3 experts, but its config has 2"):
        HfFolder(tmp_path / "hf")


@pytest.mark.parametrize("name", FAMILY_SHAPES)
def test_routers_norms_and_biases_stay_in_float(tmp_path, name):
    source = source_of(FAMILY_SHAPES[name])
    if name == "GptOssForCausalLM":
        with pytest.raises(NotImplementedError, match="GptOssForCausalLM cannot be stored as ct_fp8_dynamic; use"):
            export(source, tmp_path / "out", "ct_fp8_dynamic")
    else:
        with pytest.raises(NotImplementedError, match=f"{name} cannot be stored as mxfp4"):
            export(source, tmp_path / "out", "mxfp4")
    for scheme in ("mxfp4",) if name == "GptOssForCausalLM" else ("ct_fp8_dynamic", "fp8_block", "modelopt_fp8"):
        amax = dict.fromkeys(source.layout.linears, 2.0)
        export(dataclasses.replace(source, input_amax=amax), tmp_path / scheme, scheme)
        folder = HfFolder(tmp_path / scheme)
        quantized = {module for module in source.layout.linears if folder.spec(module)}
        wanted = {module for module in source.layout.linears if scheme != "mxfp4" or ".experts." in module}
        assert quantized == wanted
        for tensor in source.layout.tensors:
            if (module := tensor.removesuffix(".weight")) in quantized:
                error = np.abs(folder.read(tensor) - source.read(tensor)).mean()
                assert 0 < error < (0.2 if scheme == "mxfp4" else 0.05), module
            else:
                np.testing.assert_array_equal(folder.read(tensor), source.read(tensor))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen3-8B", {"architectures": ["MambaForCausalLM"]}, "has architectures .*Mamba.*; supported .* are Llama"),
        ("Qwen3-8B", {"use_sliding_window": True}, "has use_sliding_window True; for Qwen3ForCausalLM only False"),
        ("Qwen3-8B", {"hidden_act": "relu"}, "has hidden_act 'relu'; for Qwen3ForCausalLM only 'silu'"),
        ("gemma-2-2b", {"hidden_activation": "gelu"}, "has hidden_activation 'gelu'; for .* only 'gelu_pytorch_tanh'"),
        ("Llama-3.1-8B", {"rope_scaling": {"type": "longrope"}}, "has rope_type 'longrope'; supported are default, l"),
        ("Qwen3-8B", {"rope_scaling": {"type": "yarn", "mscale": 0.7}}, "has mscale 0.7 in rope_scaling"),
        ("gemma-3-1b", {"rope_parameters": SCALED_WINDOWS}, "has rope_type 'linear' in sliding_attention"),
        ("gemma-3-1b", {"rope_parameters": {"rope_theta": 1e6}}, "has rope_parameters without .* sliding_attention"),
        ("Qwen3-8B", {"rope_scaling": {"type": "yarn"}}, "factor must be a number above 0, got None"),
        ("Qwen3-8B", {"rope_scaling": {"rope_type": ["yarn"]}}, r"has rope_type \['yarn'\]; supported are default"),
        (
            "gpt-oss-20b",
            {"rope_parameters": {"rope_theta": 1e4}},
            "has rope_scaling besides other rope_parameters; keep",
        ),
        ("gemma-2-2b", {"layer_types": "full_attention"}, "has layer_types 'full_attention'"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}, r"has mlp_only_layers \[0\]; for Qwen3MoeForCausalLM only \[\]"),
        ("gpt-oss-20b", {"swiglu_limit": 9.0}, "has swiglu_limit 9.0; for GptOssForCausalLM only 7.0"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"] * 3}, r"has layer_types .* and sliding_window 128"),
        ("Mixtral-8x7B-v0.1", {"num_local_experts": None}, "num_local_experts must be a whole number from 1 to"),
        ("Mistral-7B-v0.1", {"attention_bias": True}, "has attention_bias True; for MistralForCausalLM only False"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name_from_its_config_alone(tmp_path, name, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name][0] | changes))
    with pytest.raises((ValueError, NotImplementedError), match=f"config.json.* {message}"):
        HfFolder(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "again", "why_no_gguf"),
    [
        ("Gemma2ForCausalLM", {"sliding_window_size": 0}, {}, "with sliding_window, but the model has none"),
        ("Gemma2ForCausalLM", {"attn_logits_soft_cap": 0.0}, {}, "with attn_logit_softcapping, but the model has none"),
        ("Gemma3ForCausalLM", {"global_attention_every": 0}, {"global_attention_every": 5}, "global_attention_every 6"),
        ("Gemma3ForCausalLM", {"rope_local_theta": 0.0}, {"rope_local_theta": 5e5}, "rope_local_theta 10000.0"),
        ("GptOssForCausalLM", {"sliding_window_size": 0}, {}, "with sliding_window, but the model has none"),
        ("GptOssForCausalLM", NO_YARN, {}, None),
        ("Qwen3ForCausalLM", {"attention_bias": "all"}, {}, "attention_bias none, but the model has all"),
    ],
)
def test_an_option_that_is_off_stays_off(tmp_path, name, changes, again, why_no_gguf):
    source = source_of(shape := dataclasses.replace(FAMILY_SHAPES[name], **changes))
    export(source, tmp_path / "hf", "hf")
    assert HfFolder(tmp_path / "hf").layout.shape == dataclasses.replace(shape, **again)
    if why_no_gguf:
        with pytest.raises(NotImplementedError, match=why_no_gguf):
            export(source, tmp_path / "m.gguf", "gguf_f16")
    else:
        export(source, tmp_path / "m.gguf", "gguf_f16")
        assert open_gguf(tmp_path / "m.gguf").layout.shape == shape


def test_a_local_rotary_embedding_without_its_own_wavelengths_is_not_exported_with_scaling():
    scaled = {"rope_local_theta": 0.0, "rope_type": "linear", "rope_factor": 2.0}
    with pytest.raises(NotImplementedError, match="scales no local rotary embedding; set rope_local_theta"):
        to_config(dataclasses.replace(FAMILY_SHAPES["Gemma3ForCausalLM"], **scaled))


def test_a_factor_without_a_type_is_linear_scaling_as_in_llama_cpp(tmp_path):
    shape = FAMILY_SHAPES["Qwen3ForCausalLM"]
    export(source_of(shape), tmp_path / "m.gguf", "gguf_f16")
    del (file := GgufFile(tmp_path / "m.gguf")).metadata["qwen3.rope.scaling.type"]
    assert read_shape(file) == shape


@pytest.mark.parametrize(
    ("name", "key", "field", "value"),  # values of the config classes of transformers 5.24
    [
        ("Mistral-7B-v0.1", "sliding_window", "sliding_window_size", 4096),
        ("Mixtral-8x7B-v0.1", "rope_theta", "rope_theta", 1e6),
        ("Mixtral-8x7B-v0.1", "rms_norm_eps", "norm_epsilon", 1e-5),
        ("gpt-oss-20b", "sliding_window", "sliding_window_size", 128),
    ],
)
def test_a_missing_key_has_the_default_of_transformers(name, key, field, value):
    config = {each: given for each, given in PUBLISHED[name][0].items() if each != key}
    assert getattr(shape_of_config(config), field) == value


def test_rope_parameters_replace_rope_scaling_as_transformers_5_writes_them():
    config, _ = PUBLISHED["gpt-oss-20b"]
    newer = {key: value for key, value in config.items() if key != "rope_scaling"}
    for rope in (config["rope_scaling"], {"rope_type": "default"}):
        found = shape_of_config(newer | {"rope_parameters": rope | {"rope_theta": config.get("rope_theta", 150000.0)}})
        assert found == shape_of_config(config | {"rope_scaling": rope})


def test_a_shape_of_no_family_names_what_the_nearest_cannot_have():
    with pytest.raises(NotImplementedError, match="the nearest, Qwen3ForCausalLM, cannot have attention_sinks True"):
        layout_of(shape_of(*SMALL, use_qk_norm=True, attention_sinks=True))
