"""Shape of a decoder: the sizes and options of its layers, as runs and checkpoints of other frameworks describe it."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class DecoderShape:
    """Sizes and options of a decoder. ``TrainConfig`` documents the fields; 0 or "none" turns an option off."""

    vocab_size: int = 0
    emb_dim: int = 512
    mlp_dim: int = 1536
    num_layers: int = 8
    num_query_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    num_experts: int = 0
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    norm_epsilon: float = 1e-5
    logits_via_embedding: bool = True
    max_position_embeddings: int = 0
    rope_theta: float = 500000.0
    rope_local_theta: float = 0.0
    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    original_max_position_embeddings: int = 0
    attention_bias: Literal["none", "qkv", "all"] = "none"
    attention_sinks: bool = False
    use_qk_norm: bool = False
    query_pre_attn_scalar: int = 0
    sliding_window_size: int = 0
    global_attention_every: int = 0
    attn_logits_soft_cap: float = 0.0
    final_logits_soft_cap: float = 0.0
    mlp_activation: Literal["silu", "gelu_tanh", "clipped_swiglu"] = "silu"
    mlp_bias: bool = False
    use_post_norms: bool = False
    scale_embedding: bool = False


def rope_stretch(shape: DecoderShape) -> np.ndarray | None:
    """Return the factors [head_dim / 2] that scaled rotary embeddings multiply wavelengths by, or None without scaling.

    Source: ``modeling_rope_utils.py`` of transformers; "llama3" and "yarn" are the types of Llama 3.1 and of
    arXiv 2309.00071.
    """
    half, factor, original = shape.head_dim // 2, shape.rope_factor, shape.original_max_position_embeddings
    if shape.rope_type == "default":
        return None
    if shape.rope_type == "linear":
        return np.full(half, factor, np.float32)
    wavelength = 2 * math.pi * shape.rope_theta ** (np.arange(half) / half)
    if shape.rope_type == "llama3":
        low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
        kept = np.clip((original / wavelength - low) / (high - low), 0, 1)
    else:
        ends = (
            shape.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))
            for turns in (shape.rope_beta_fast, shape.rope_beta_slow)
        )
        first, last = next(ends), next(ends)
        if shape.rope_truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, shape.head_dim - 1)
        kept = 1 - np.clip((np.arange(half) - first) / max(last - first, 0.001), 0, 1)
    return (1 / (kept + (1 - kept) / factor)).astype(np.float32)


def rope_magnitude(shape: DecoderShape) -> float:
    """Return the factor that rotary embeddings multiply queries and keys by; only "yarn" has one other than 1."""
    return 0.1 * math.log(shape.rope_factor) + 1 if shape.rope_type == "yarn" and shape.rope_factor > 1 else 1.0
