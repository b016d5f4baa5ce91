"""Families of decoders in checkpoints: config.json, names and shapes of tensors; ``families.yml`` has a row for each.

A matrix is stored as [out, in]: heads are concatenated along the rows of q, k and v and the columns of o. Rotary
embeddings rotate the halves of a head. A checkpoint stores each expert's matrices separately, except for gpt-oss
(``jaxquant.export.fused``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxquant.config.decoder import DecoderShape
from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build, show, type_hints
from jaxquant.export.source import Layout

_SIZE, _MAX_LAYERS = 2**24, 10_000


class Tensor(NamedTuple):
    """A tensor of a checkpoint and its place in the decoder.

    Attributes:
      path: path of the parameter in its layer of the decoder, such as ``mlp/wi_0/kernel``.
      shape: shape in the checkpoint; experts' tensors are separate.
      gguf: name in GGUF files, where the experts of a layer are one tensor.
      layer, expert: indices, or None for a tensor outside of the layers, or that is not an expert's.
    """

    path: str
    shape: tuple[int, ...]
    gguf: str
    layer: int | None = None
    expert: int | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """What the checkpoints of an architecture have in common; ``families.yml`` documents the fields."""

    architecture: str
    model_type: str
    gguf: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    norm_offset: float = 0.0
    llama_cpp: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@functools.cache
def _tables() -> Mapping[str, Any]:
    return load_yaml(Path(__file__).with_name("families.yml"))


@functools.cache
def families() -> tuple[Family, ...]:
    """Return the rows of ``families.yml``."""
    return tuple(build(Family, row) for row in _tables()["families"])


def gguf_keys() -> Mapping[str, str]:
    """Return keys of GGUF files after the architecture, with the keys of config.json that have the same value."""
    return _tables()["gguf_keys"]


@functools.cache
def _features() -> set[str]:
    """Return the fields of ``DecoderShape`` that tell families apart."""
    fields = {key for row in families() for key in (*row.fixed, *row.keys.values())}
    return fields - {"mlp_dim", "num_experts_per_tok"}


_ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings"),
}
"""Keys of ``rope_scaling`` by type; most fields of ``DecoderShape`` have their names with the prefix ``rope_``."""
OFF = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
"""Keys whose value null turns an option off."""
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "clipped_swiglu": "silu"}


def _differences(family: Family, shape: DecoderShape) -> list[str]:
    """Return the fields of a shape that checkpoints of a family cannot express."""

    def differs(name: str) -> bool:
        value, free = getattr(shape, name), name in family.keys.values() and getattr(shape, name) != "qkv"
        if name == "num_experts":
            return free != bool(value)
        return not free and value != family.fixed.get(name, getattr(DecoderShape, name))

    return sorted(filter(differs, _features()))


@functools.lru_cache(64)
def family_of(shape: DecoderShape) -> Family:
    """Return the first family whose checkpoints can express a shape.

    Raises:
      NotImplementedError: there is none; the message names the fields that the nearest family has otherwise.
    """
    misses = [_differences(family, shape) for family in families()]
    fewest = min(misses, key=len)
    family = families()[misses.index(fewest)]
    if not fewest:
        return family
    values = ", ".join(f"{name} {show(getattr(shape, name))}" for name in fewest)
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
    inner = shape.mlp_dim
    for name, rows, columns in (("wi_0", inner, size), ("wi_1", inner, size), ("wo", size, inner)):
        yield f"mlp/{name}{kernel}", (rows, columns)
        if shape.mlp_bias:
            yield f"mlp/{name}{bias}", (rows,)
    if shape.use_post_norms:
        yield "mlp_output_norm/scale", (size,)


@functools.lru_cache(8)
def tensors_of(shape: DecoderShape) -> Mapping[str, Tensor]:
    """Return the tensors of a float checkpoint by name, in model order."""
    names, found = {**_tables()["tensors"], **family_of(shape).names}, {}
    table = (shape.vocab_size, shape.emb_dim)
    outside = [("token_embedder/embedding", table), ("decoder_norm/scale", (shape.emb_dim,))]
    if not shape.logits_via_embedding:
        outside.append(("logits_dense/kernel", table))
    parts = [(None, *outside[0])]
    parts += [(layer, *part) for layer in range(shape.num_layers) for part in _layer_tensors(shape)]
    for layer, path, size in (*parts, *((None, *part) for part in outside[1:])):
        name, gguf = names[path]
        if layer is not None:
            name, gguf = f"model.layers.{layer}.{name}", f"blk.{layer}.{gguf}"
        for expert in range(shape.num_experts) if "{}" in name else (None,):
            found[name.format(expert)] = Tensor(path, size, gguf, layer, expert)
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
    values: dict[str, Any] = {key: getattr(shape, field) for key, field in {**_tables()["keys"], **family.keys}.items()}
    for key in OFF & values.keys():
        values[key] = values[key] or None
    if "query_pre_attn_scalar" in values:
        values["query_pre_attn_scalar"] = shape.query_pre_attn_scalar or shape.head_dim
    if "global_attention_every" in (*family.fixed, *family.keys.values()) or shape.sliding_window_size:
        values["layer_types"] = layer_types(shape)
        values["sliding_window"] = shape.sliding_window_size or family.defaults["sliding_window"]
    if "rope_local_base_freq" in values:
        values["rope_local_base_freq"] = shape.rope_local_theta or shape.rope_theta
        values["sliding_window_pattern"] = shape.global_attention_every or shape.num_layers + 1
    rope = {key: getattr(shape, _rope_field(key)) for key in _ROPE[shape.rope_type]}
    if rope and "rope_local_base_freq" in values and not shape.rope_local_theta:
        raise NotImplementedError(f"{family.architecture} scales no local rotary embedding; set rope_local_theta")
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "attention_dropout": 0.0,
        "hidden_act": activation,
        **({"hidden_activation": activation} if family.norm_offset else {}),
        "initializer_range": 0.02,
        "use_cache": True,
        "rope_theta": shape.rope_theta,
        "rope_scaling": {"rope_type": shape.rope_type, **rope} if rope or "rope_scaling" in family.defaults else None,
        **family.required,
        **values,
        "attention_bias": shape.attention_bias == "all",
    }


def layer_types(shape: DecoderShape) -> list[str]:
    """Return the entry ``layer_types`` of config.json."""
    every = (shape.global_attention_every or shape.num_layers + 1) if shape.sliding_window_size else 1
    return ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(shape.num_layers)]


def shape_of_config(config: Mapping[str, Any]) -> DecoderShape:
    """Return the shape that ``config.json`` describes.

    Raises:
      ValueError: a size is missing or invalid; the message names its key.
      NotImplementedError: the decoder does not support the architecture or the value of a key.
    """
    names, known = config.get("architectures"), {family.architecture: family for family in families()}
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
    given = {key: value for key, value in config.items() if value is not None or key in OFF}
    config, keys = {**usual, **family.defaults, **given}, {**_tables()["keys"], **family.keys}
    if "rope_parameters" in given:
        config["rope_scaling"] = given.get("rope_scaling")
    for key in usual.keys() - keys.keys():
        if config[key] != usual[key]:
            raise NotImplementedError(
                f"config.json has {key} {show(config[key])}; for {family.architecture} only {show(usual[key])} is "
                "supported"
            )
    read = {**family.fixed, **{field: _read(key, config.get(key), field) for key, field in keys.items()}}
    read |= _read_rope(config)  # rope_parameters of transformers 5 replace the older rope_local_base_freq
    if heads % read["num_kv_heads"]:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {read['num_kv_heads']}"
        )
    if read["head_dim"] % 2:
        raise ValueError(f"config.json: head_dim must be even for rotary embeddings, got {read['head_dim']}")
    if read.get("query_pre_attn_scalar") == read["head_dim"]:
        read["query_pre_attn_scalar"] = 0
    shape, types = DecoderShape(**read), config.get("layer_types")
    if types is None:
        return shape
    if types == ["full_attention"] * shape.num_layers:
        return dataclasses.replace(shape, sliding_window_size=0)
    if types != layer_types(shape) and isinstance(types, list):
        first = types.index("full_attention") + 1 if "full_attention" in types else 0
        shape = dataclasses.replace(shape, global_attention_every=first)
    if types != layer_types(shape) or not shape.sliding_window_size:
        raise NotImplementedError(
            f"config.json has layer_types {show(types)} and sliding_window {show(config.get('sliding_window'))}; "
            "supported are windows in all layers except every n-th"
        )
    return shape


def _rope_field(key: str) -> str:
    return key if key.startswith("original") else f"rope_{key}"


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``DecoderShape`` that describe the rotary embedding."""
    given = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    rope: Any = given[0] if given else {}
    read = {}
    if given[1:] and given[0] != given[1]:
        raise NotImplementedError("config.json has rope_scaling besides other rope_parameters; keep one of them")
    if isinstance(rope, Mapping) and isinstance(rope.get("sliding_attention"), Mapping):  # as transformers 5 writes it
        local, rope = rope["sliding_attention"], rope.get("full_attention")
        if (kind := _rope_type(local)) != "default":
            raise NotImplementedError(
                f"config.json has rope_type {show(kind)} in sliding_attention; only 'default' is supported there"
            )
        read["rope_local_theta"] = _read("rope_theta", local.get("rope_theta"), "rope_local_theta")
    elif config.get("rope_parameters") and "rope_local_base_freq" in config:
        raise NotImplementedError("config.json has rope_parameters without the entry sliding_attention; add it")
    kind = _rope_type(rope)
    original = [config.get(key) for key in ("original_max_position_embeddings", "max_position_embeddings")]
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "original_max_position_embeddings": original[1]}
    rope = {**rope, **({"original_max_position_embeddings": original[0]} if original[0] else {})}
    for key in _ROPE[kind]:
        read[_rope_field(key)] = _read(key, usual.get(key) if rope.get(key) is None else rope[key], _rope_field(key))
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    return {"rope_type": kind, "rope_theta": _read("rope_theta", theta, "rope_theta"), **read}


def _rope_type(rope: Any) -> str:
    """Return the type of a rotary embedding in config.json, after checking its keys."""
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json: rope_scaling must be a mapping, got {show(rope)}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE:
        raise NotImplementedError(f"config.json has rope_type {show(kind)}; supported are {', '.join(_ROPE)}")
    known = {*_ROPE[kind], "rope_type", "type", "rope_theta"}
    is_whole = lambda key, value: value is None or (key, value) == ("partial_rotary_factor", 1.0)  # noqa: E731
    if others := [key for key, value in rope.items() if key not in known and not is_whole(key, value)]:
        raise NotImplementedError(
            f"config.json has {others[0]} {show(rope[others[0]])} in rope_scaling, which is not supported for {kind}"
        )
    return kind


def _read(key: str, value: Any, field: str) -> Any:
    """Return the value of a key of config.json as a field of ``DecoderShape``, after checking it."""
    given: Any = value  # a value of another type is refused
    hint: Any = bool if field == "attention_bias" else type_hints(DecoderShape)[field]
    most = 1e30 if hint is float else _MAX_LAYERS if field == "num_layers" else _SIZE
    wanted = {bool: "true or false", int: f"a whole number from 1 to {most}", float: "a number above 0"}[hint]
    if key in OFF and given is None:
        given = hint(0)
    elif type(given) not in (hint, *({int} if hint is float else ())) or (hint is not bool and not 0 < given <= most):
        raise ValueError(f"config.json: {key} must be {wanted}, got {show(given)}")
    return ("all" if given else "none") if field == "attention_bias" else hint(given)
