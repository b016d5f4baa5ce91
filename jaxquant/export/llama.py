"""Llama in Hugging Face checkpoints: shape, names and shapes of tensors, config.json.

    model.embed_tokens.weight [V, D]        model.norm.weight [D]          lm_head.weight [V, D] (absent if tied)
    model.layers.N.self_attn.{q,k,v,o}_proj.weight [out, in]               model.layers.N.input_layernorm.weight [D]
    model.layers.N.mlp.{gate,up,down}_proj.weight [out, in]                …post_attention_layernorm.weight [D]

Heads are concatenated along the rows of q, k and v and the columns of o. Rotary embedding rotates the halves of a head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxquant.core.typed import show
from jaxquant.export.hf.quantization import FUSED

ARCHITECTURE = "LlamaForCausalLM"
EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
MLP = tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
_SIZE = 2**24
_MAX_LAYERS = 10_000


@dataclasses.dataclass(frozen=True)
class LlamaShape:
    """Sizes and hyperparameters of a Llama model.

    Attributes:
      vocab_size, hidden, intermediate, layers, heads, kv_heads, head_dim: sizes of the axes, and numbers of layers and
        heads.
      rope_theta, norm_epsilon: parameters of the rotary embedding and RMSNorm.
      tied: whether the output head shares the weight of the embedding.
      max_length: maximum number of positions (``max_position_embeddings``).
    """

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    tied: bool = False
    max_length: int = 2048

    def linear_shape(self, module: str) -> tuple[int, int]:
        """Return the shape [out, in] of a linear layer by name."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (wide, self.hidden),
            "k_proj": (narrow, self.hidden),
            "v_proj": (narrow, self.hidden),
            "o_proj": (self.hidden, wide),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }[module.rpartition(".")[2]]

    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Return the shapes [out, in] of the linear layers of all decoder layers, by name."""
        return self._linears

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all tensors of a float checkpoint, in model order."""
        return self._tensors

    @functools.cached_property
    def _linears(self) -> dict[str, tuple[int, int]]:
        shapes = {name: self.linear_shape(name) for name in (*ATTENTION, *MLP)}
        return {f"model.layers.{index}.{name}": shapes[name] for index in range(self.layers) for name in shapes}

    @functools.cached_property
    def _tensors(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (self.vocab_size, self.hidden)}
        for index in range(self.layers):
            for norm, linears in (("input_layernorm", ATTENTION), ("post_attention_layernorm", MLP)):
                found[f"model.layers.{index}.{norm}.weight"] = (self.hidden,)
                for name in (f"model.layers.{index}.{each}" for each in linears):
                    found[f"{name}.weight"] = self._linears[name]
        found[f"{NORM}.weight"] = (self.hidden,)
        if not self.tied:
            found[f"{HEAD}.weight"] = (self.vocab_size, self.hidden)
        return found

    def to_config(self, dtype: str, tokens: Mapping[str, int | None]) -> dict[str, Any]:
        """Return ``config.json`` without the quantization.

        Args:
          dtype: dtype of unquantized tensors.
          tokens: token number or None for ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.
        """
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_length,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "tie_word_embeddings": self.tied,
            "torch_dtype": dtype,
            "use_cache": True,
            "vocab_size": self.vocab_size,
            **{name: token for name, token in tokens.items() if token is not None},
        }

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> LlamaShape:
        """Return the shape that ``config.json`` describes.

        Raises:
          ValueError: a size is missing or invalid; the message names its key.
          NotImplementedError: the decoder does not support the model, for example its architecture, biases or scaled
            rotary embedding.
        """
        names = config.get("architectures")
        if not isinstance(names, list) or not set(map(str, names)) <= {ARCHITECTURE, "MistralForCausalLM"} or not names:
            raise NotImplementedError(
                f"config.json has architectures {show(names)}; only {ARCHITECTURE} and MistralForCausalLM are supported"
            )
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ValueError(f"config.json: rope_scaling must be a mapping, got {show(rope)}")
        refused = {
            "attention_bias": (config.get("attention_bias", False), False),
            "mlp_bias": (config.get("mlp_bias", False), False),
            "hidden_act": (config.get("hidden_act", "silu"), "silu"),
            "sliding_window": (config.get("sliding_window"), None),
            "partial_rotary_factor": (config.get("partial_rotary_factor") or 1.0, 1.0),
            "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        }
        for key, (value, wanted) in refused.items():
            if value != wanted:
                raise NotImplementedError(f"config.json has {key} {show(value)}; the decoder supports only {wanted!r}")
        hidden, heads = _read_size(config, "hidden_size"), _read_size(config, "num_attention_heads")
        kv_heads = _read_size(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        head_dim = _read_size(config, "head_dim", max(1, hidden // heads))
        if head_dim % 2:
            raise ValueError(f"config.json: head_dim must be even for rotary embeddings, got {head_dim}")
        tied = config.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise ValueError(f"config.json: tie_word_embeddings must be true or false, got {show(tied)}")
        return cls(
            _read_size(config, "vocab_size"),
            hidden,
            _read_size(config, "intermediate_size"),
            _read_size(config, "num_hidden_layers", most=_MAX_LAYERS),
            heads,
            kv_heads,
            head_dim,
            _read_number(rope if "rope_theta" in rope else config, "rope_theta", 10000.0),
            _read_number(config, "rms_norm_eps", 1e-6),
            tied,
            _read_size(config, "max_position_embeddings", 2048),
        )


def fused_with(module: str) -> tuple[str, ...]:
    """Return a linear layer and the layers that servers fuse with it; all of them must share per-tensor scales."""
    stem, _, last = module.rpartition(".")
    return next((tuple(f"{stem}.{each}" for each in group) for group in FUSED.values() if last in group), (module,))


def _read_size(config: Mapping[str, Any], key: str, default: int | None = None, most: int = _SIZE) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"config.json: {key} must be a whole number from 1 to {most}, got {show(value)}")
    return value


def _read_number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ValueError(f"config.json: {key} must be a number above 0, got {show(value)}")
    return float(value)
