"""Families of decoders in Hugging Face checkpoints: config.json, names and shapes of tensors, one row for each family.

A matrix is stored as [out, in]: heads are concatenated along the rows of q, k and v and the columns of o. Rotary
embeddings rotate the halves of a head. A checkpoint stores each expert's matrices separately, except for gpt-oss
(``jaxquant.export.fused``).

Source: the configuration and modeling files of transformers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxquant.core.typed import show, type_hints
from jaxquant.export.decoder import DecoderShape
from jaxquant.export.source import EMBEDDING, HEAD, Layout

_SIZE, _MAX_LAYERS = 2**24, 10_000


class Tensor(NamedTuple):
    """A tensor of a checkpoint and its place in the decoder.

    Attributes:
      path: path of the parameter in its layer of the decoder, such as ``mlp/wi_0/kernel``.
      shape: shape in the checkpoint; experts' tensors are separate.
      layer, expert: indices, or None for a tensor outside of the layers, or that is not an expert's.
    """

    path: str
    shape: tuple[int, ...]
    layer: int | None = None
    expert: int | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """What the checkpoints of an architecture have in common.

    Attributes:
      architecture, model_type: values in config.json.
      gguf: ``general.architecture`` of GGUF files.
      fixed: fields of ``DecoderShape`` that the architecture implies.
      keys: keys of config.json in addition to ``_KEYS``, with the fields that they set.
      defaults: values of keys that published configs leave out.
      required: keys with the only value that the decoder supports.
      names: names of parameters in checkpoints that differ from ``_NAMES``.
      norm_offset: number that the model adds to the stored weights of norms.
      llama_cpp: fields of ``DecoderShape`` that llama.cpp sets to constants.
    """

    architecture: str
    model_type: str
    gguf: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    norm_offset: float = 0.0
    llama_cpp: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "emb_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_query_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "logits_via_embedding",
    "max_position_embeddings": "max_position_embeddings",
}
"""Keys of config.json that all families have, with the fields of ``DecoderShape``."""
_ROPE = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "rope_factor",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "truncate": "rope_truncate",
        "original_max_position_embeddings": "original_max_position_embeddings",
    },
}
"""Keys of ``rope_scaling`` by type, with the fields that they set."""
_OFF = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
"""Keys whose value null turns an option off."""
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "clipped_swiglu": "silu"}
_NAMES = {
    "pre_self_attention_layer_norm/scale": "input_layernorm.weight",
    **{
        f"self_attention/{ours}/{kind}": f"self_attn.{theirs}_proj.{end}"
        for ours, theirs in {"query": "q", "key": "k", "value": "v", "out": "o"}.items()
        for kind, end in (("kernel", "weight"), ("bias", "bias"))
    },
    "self_attention/query_norm/scale": "self_attn.q_norm.weight",
    "self_attention/key_norm/scale": "self_attn.k_norm.weight",
    "self_attention/sinks": "self_attn.sinks",
    "post_self_attention_layer_norm/scale": "post_attention_layernorm.weight",
    **{
        f"mlp/{ours}/{kind}": f"mlp.{theirs}_proj.{end}"
        for ours, theirs in {"wi_0": "gate", "wi_1": "up", "wo": "down"}.items()
        for kind, end in (("kernel", "weight"), ("bias", "bias"))
    },
    "mlp/gate/kernel": "mlp.gate.weight",
    "mlp/gate/bias": "mlp.gate.bias",
    **{
        f"mlp/{ours}{kind}": f"mlp.experts.{{}}.{theirs}_proj.{end}"
        for ours, theirs in {"wi_0": "gate", "wi_1": "up", "wo": "down"}.items()
        for kind, end in (("", "weight"), ("_bias", "bias"))
    },
    "token_embedder/embedding": f"{EMBEDDING}.weight",
    "decoder_norm/scale": "model.norm.weight",
    "logits_dense/kernel": f"{HEAD}.weight",
}
"""Names in most checkpoints, by path of the parameter in its layer; ``{}`` is the index of an expert."""
_GEMMA_NAMES = {
    "self_attention_output_norm/scale": "post_attention_layernorm.weight",
    "post_self_attention_layer_norm/scale": "pre_feedforward_layernorm.weight",
    "mlp_output_norm/scale": "post_feedforward_layernorm.weight",
}
_GEMMA = {"use_post_norms": True, "scale_embedding": True, "mlp_activation": "gelu_tanh"}
_GEMMA_KEYS = {
    "sliding_window": "sliding_window_size",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attn_logit_softcapping": "attn_logits_soft_cap",
    "final_logit_softcapping": "final_logits_soft_cap",
}
_GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_EXPERTS = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"}
_NO_WINDOW = {"sliding_window_size": 0}

FAMILIES = (
    Family("LlamaForCausalLM", "llama", "llama", keys={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}),
    Family(
        "MistralForCausalLM", "mistral", "llama", keys={"sliding_window": "sliding_window_size"}, llama_cpp=_NO_WINDOW
    ),
    Family("Qwen2ForCausalLM", "qwen2", "qwen2", {"attention_bias": "qkv"}, required={"use_sliding_window": False}),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        "qwen3",
        {"use_qk_norm": True},
        {"attention_bias": "attention_bias"},
        {"head_dim": 128},
        {"use_sliding_window": False},
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        "gemma2",
        {**_GEMMA, "global_attention_every": 2},
        _GEMMA_KEYS,
        {**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        names=_GEMMA_NAMES,
        norm_offset=1.0,
        llama_cpp={"logits_via_embedding": True},
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        "gemma3",
        {**_GEMMA, "use_qk_norm": True},
        {
            **_GEMMA_KEYS,
            "sliding_window_pattern": "global_attention_every",
            "rope_local_base_freq": "rope_local_theta",
        },
        {**_GEMMA_DEFAULTS, "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0, "rope_theta": 1e6},
        {"use_bidirectional_attention": False},
        _GEMMA_NAMES,
        1.0,
        {"global_attention_every": 6, "rope_local_theta": 10000.0},
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        "llama",
        keys={**_EXPERTS, "sliding_window": "sliding_window_size"},
        names={
            "mlp/gate/kernel": "block_sparse_moe.gate.weight",
            "mlp/wi_0": "block_sparse_moe.experts.{}.w1.weight",
            "mlp/wi_1": "block_sparse_moe.experts.{}.w3.weight",
            "mlp/wo": "block_sparse_moe.experts.{}.w2.weight",
        },
        llama_cpp=_NO_WINDOW,
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        "qwen3moe",
        {"use_qk_norm": True},
        {
            "num_experts": "num_experts",
            "num_experts_per_tok": "num_experts_per_tok",
            "norm_topk_prob": "norm_topk_prob",
            "moe_intermediate_size": "mlp_dim",
            "attention_bias": "attention_bias",
        },
        {"norm_topk_prob": False},
        {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        llama_cpp={"norm_topk_prob": True},
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        "gpt-oss",
        {
            "attention_bias": "all",
            "attention_sinks": True,
            "mlp_bias": True,
            "mlp_activation": "clipped_swiglu",
            "global_attention_every": 2,
        },
        {**_EXPERTS, "sliding_window": "sliding_window_size"},
        {
            "rope_theta": 150000.0,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        {"mlp/gate/kernel": "mlp.router.weight", "mlp/gate/bias": "mlp.router.bias"},
    ),
)
"""All families. A shape belongs to the first family that can express it (``family_of``)."""
_FEATURES = {
    *("num_experts", "norm_topk_prob", "attention_bias", "attention_sinks", "use_qk_norm", "query_pre_attn_scalar"),
    *("sliding_window_size", "global_attention_every", "rope_local_theta", "attn_logits_soft_cap"),
    *("final_logits_soft_cap", "mlp_activation", "mlp_bias", "use_post_norms", "scale_embedding"),
}
"""Fields that differ between families."""


def _differences(family: Family, shape: DecoderShape) -> list[str]:
    """Return the fields of a shape that checkpoints of a family cannot express."""
    found = []
    for field in dataclasses.fields(DecoderShape):
        value, name = getattr(shape, field.name), field.name
        if name not in _FEATURES or value == family.fixed.get(name, field.default):
            continue
        if name in family.fixed or name not in family.keys.values() or value == "qkv":
            found.append(name)
    if ("num_experts" in family.keys.values()) != bool(shape.num_experts):
        found.append("num_experts")
    return found


@functools.lru_cache(64)
def family_of(shape: DecoderShape) -> Family:
    """Return the first family whose checkpoints can express a shape.

    Raises:
      NotImplementedError: there is none; the message names the fields that the nearest family has otherwise.
    """
    misses = [_differences(family, shape) for family in FAMILIES]
    fewest = min(misses, key=len)
    family = FAMILIES[misses.index(fewest)]
    if not fewest:
        return family
    values = ", ".join(f"{name} {show(getattr(shape, name))}" for name in dict.fromkeys(fewest))
    raise NotImplementedError(
        f"no supported family of checkpoints has a decoder like this one: the nearest, {family.architecture}, cannot "
        f"have {values}"
    )


def _layer_tensors(shape: DecoderShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield path and checkpoint shape of each tensor of a layer, in model order; one expert's, if there are experts."""
    size, head = shape.emb_dim, shape.head_dim
    widths = {"query": shape.num_query_heads, "key": shape.num_kv_heads, "value": shape.num_kv_heads}
    yield "pre_self_attention_layer_norm/scale", (size,)
    for name, heads in widths.items():
        yield f"self_attention/{name}/kernel", (heads * head, size)
        if shape.attention_bias != "none":
            yield f"self_attention/{name}/bias", (heads * head,)
        if shape.use_qk_norm and name != "value":
            yield f"self_attention/{name}_norm/scale", (head,)
    yield "self_attention/out/kernel", (size, shape.num_query_heads * head)
    if shape.attention_bias == "all":
        yield "self_attention/out/bias", (size,)
    if shape.attention_sinks:
        yield "self_attention/sinks", (shape.num_query_heads,)
    if shape.use_post_norms:
        yield "self_attention_output_norm/scale", (size,)
    yield "post_self_attention_layer_norm/scale", (size,)
    if shape.num_experts:
        yield "mlp/gate/kernel", (shape.num_experts, size)
        if shape.mlp_bias:
            yield "mlp/gate/bias", (shape.num_experts,)
    kernel, bias = ("", "_bias") if shape.num_experts else ("/kernel", "/bias")
    for name, rows, columns in (
        ("wi_0", shape.mlp_dim, size),
        ("wi_1", shape.mlp_dim, size),
        ("wo", size, shape.mlp_dim),
    ):
        yield f"mlp/{name}{kernel}", (rows, columns)
        if shape.mlp_bias:
            yield f"mlp/{name}{bias}", (rows,)
    if shape.use_post_norms:
        yield "mlp_output_norm/scale", (size,)


@functools.lru_cache(8)
def tensors_of(shape: DecoderShape) -> Mapping[str, Tensor]:
    """Return the tensors of a float checkpoint by name, in model order."""
    names = {**_NAMES, **family_of(shape).names}
    found = {names["token_embedder/embedding"]: Tensor("token_embedder/embedding", (shape.vocab_size, shape.emb_dim))}
    of_layer = tuple(_layer_tensors(shape))
    for layer in range(shape.num_layers):
        for path, size in of_layer:
            name = f"model.layers.{layer}.{names[path]}"
            experts = range(shape.num_experts) if "{}" in name else (None,)
            found |= {name.format(expert): Tensor(path, size, layer, expert) for expert in experts}
    found[names["decoder_norm/scale"]] = Tensor("decoder_norm/scale", (shape.emb_dim,))
    if not shape.logits_via_embedding:
        found[names["logits_dense/kernel"]] = Tensor("logits_dense/kernel", (shape.vocab_size, shape.emb_dim))
    return found


@functools.lru_cache(8)
def layout_of(shape: DecoderShape) -> Layout:
    """Return the tensors and config of the checkpoints of a shape.

    Raises:
      NotImplementedError: no family can express the shape.
    """
    found = tensors_of(shape)
    linears = {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in found.items()
        if tensor.layer is not None and len(tensor.shape) == 2 and tensor.path != "mlp/gate/kernel"
    }
    sizes = {name: tensor.shape for name, tensor in found.items()}
    return Layout(sizes, linears, to_config(shape), shape, family_of(shape).architecture == "GptOssForCausalLM")


def to_config(shape: DecoderShape) -> dict[str, Any]:
    """Return ``config.json`` without dtype, special tokens and quantization."""
    family, activation = family_of(shape), _ACTIVATIONS[shape.mlp_activation]
    values: dict[str, Any] = {key: getattr(shape, field) for key, field in {**_KEYS, **family.keys}.items()}
    for key in _OFF & values.keys():
        values[key] = values[key] or None
    if "query_pre_attn_scalar" in values:
        values["query_pre_attn_scalar"] = shape.query_pre_attn_scalar or shape.head_dim
    if shape.sliding_window_size:
        values["layer_types"] = layer_types(shape)
    rope = {key: getattr(shape, field) for key, field in _ROPE[shape.rope_type].items()}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "attention_dropout": 0.0,
        "hidden_act": activation,
        **({"hidden_activation": activation} if family.norm_offset else {}),
        "initializer_range": 0.02,
        "use_cache": True,
        "rope_theta": shape.rope_theta,
        "rope_scaling": {"rope_type": shape.rope_type, **rope} if rope else None,
        **family.required,
        **values,
        "attention_bias": shape.attention_bias == "all",
    }


def layer_types(shape: DecoderShape) -> list[str]:
    """Return the entry ``layer_types`` of config.json for a shape with a sliding window."""
    every = shape.global_attention_every or shape.num_layers + 1
    return ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(shape.num_layers)]


def shape_of_config(config: Mapping[str, Any]) -> DecoderShape:
    """Return the shape that ``config.json`` describes.

    Raises:
      ValueError: a size is missing or invalid; the message names its key.
      NotImplementedError: the decoder does not support the architecture or the value of a key.
    """
    names, known = config.get("architectures"), {family.architecture: family for family in FAMILIES}
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        raise NotImplementedError(
            f"config.json has architectures {show(names)}; supported architectures are {', '.join(known)}"
        )
    family = known[names[0]]
    heads = _read("num_attention_heads", config.get("num_attention_heads"), "num_query_heads")
    usual = {
        "num_key_value_heads": heads,
        "head_dim": max(1, _read("hidden_size", config.get("hidden_size"), "emb_dim") // heads),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "attention_bias": family.fixed.get("attention_bias") == "all",
        "mlp_bias": False,
        "hidden_act": _ACTIVATIONS[family.fixed.get("mlp_activation", "silu")],
        "partial_rotary_factor": 1.0,
        **family.required,
    }
    if family.norm_offset:  # Gemma's ``hidden_act`` has no effect
        usual["hidden_activation"] = usual.pop("hidden_act")
    if "num_local_experts" in config:  # transformers 5 writes this key for all families
        config = {"num_experts": config["num_local_experts"], **config}
    given = {key: value for key, value in config.items() if value is not None or key in _OFF}
    config, keys = {**usual, **family.defaults, **given}, {**_KEYS, **family.keys}
    for key in usual.keys() - keys.keys():
        if config[key] != usual[key]:
            raise NotImplementedError(
                f"config.json has {key} {show(config[key])}; for {family.architecture} only {show(usual[key])} is "
                "supported"
            )
    read = {
        **family.fixed,
        **_read_rope(config),
        **{field: _read(key, config.get(key), field) for key, field in keys.items()},
    }
    if heads % read["num_kv_heads"]:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {read['num_kv_heads']}"
        )
    if read["head_dim"] % 2:
        raise ValueError(f"config.json: head_dim must be even for rotary embeddings, got {read['head_dim']}")
    if read.get("query_pre_attn_scalar") == read["head_dim"]:
        read["query_pre_attn_scalar"] = 0.0
    shape, types = DecoderShape(**read), config.get("layer_types")
    if not isinstance(types, list) or types == ["full_attention"] * shape.num_layers:
        return shape if types is None else dataclasses.replace(shape, sliding_window_size=0)
    if types != layer_types(shape):
        first = types.index("full_attention") + 1 if "full_attention" in types else 0
        shape = dataclasses.replace(shape, global_attention_every=first)
    if types != layer_types(shape) or not shape.sliding_window_size:
        raise NotImplementedError(
            f"config.json has layer_types {show(types)} and sliding_window {show(config.get('sliding_window'))}; "
            "supported are windows in all layers except every n-th"
        )
    return shape


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``DecoderShape`` that describe the rotary embedding."""
    rope, read = config.get("rope_parameters") or config.get("rope_scaling") or {}, {}
    if isinstance(rope, Mapping) and isinstance(rope.get("sliding_attention"), Mapping):  # as transformers 5 writes it
        local, rope = rope["sliding_attention"], rope.get("full_attention")
        read["rope_local_theta"] = _read("rope_theta", local.get("rope_theta"), "rope_local_theta")
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json: rope_scaling must be a mapping, got {show(rope)}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE:
        raise NotImplementedError(f"config.json has rope_type {show(kind)}; supported are {', '.join(_ROPE)}")
    known = {*_ROPE[kind], "rope_type", "type", "rope_theta"}
    is_whole = lambda key, value: value is None or (key, value) == ("partial_rotary_factor", 1.0)  # noqa: E731
    if others := [key for key, value in rope.items() if key not in known and not is_whole(key, value)]:
        raise NotImplementedError(
            f"config.json has {others[0]} {show(rope[others[0]])} in rope_scaling, which is not supported for {kind}"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(DecoderShape)}
    defaults["original_max_position_embeddings"] = config["max_position_embeddings"]
    for key, field in _ROPE[kind].items():
        read[field] = _read(key, defaults[field] if rope.get(key) is None else rope[key], field)
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    return {"rope_type": kind, "rope_theta": _read("rope_theta", theta, "rope_theta"), **read}


def _read(key: str, value: Any, field: str) -> Any:
    """Return the value of a key of config.json as a field of ``DecoderShape``, after checking it."""
    kind = bool if field == "attention_bias" else type_hints(DecoderShape)[field]
    if value is None and key in _OFF:
        return 0 if kind is int else 0.0
    most = _MAX_LAYERS if field == "num_layers" else _SIZE
    if kind is int and (type(value) is not int or not 1 <= value <= most):
        raise ValueError(f"config.json: {key} must be a whole number from 1 to {most}, got {show(value)}")
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be true or false, got {show(value)}")
    if kind is float and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30):
        raise ValueError(f"config.json: {key} must be a number above 0, got {show(value)}")
    if field == "attention_bias":
        return "all" if value else "none"
    return float(value) if kind is float else value
