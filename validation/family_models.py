#!/usr/bin/env python3
"""Write tiny random models of all model families with transformers, with tokenizers and reference logits.

``FOLDER/NAME`` has the files of ``save_pretrained``, ``tokens.npy`` [2, 24] and ``logits.npy`` [2, 24, V] (float32, eager
attention). Every parameter and every option of a family changes the logits: the script zeroes each kind of parameter and
neutralizes each option, and raises if the logits stay the same.

transformers writes MXFP4 only with GPU kernels, so the experts of ``gpt_oss_mxfp4`` are encoded here. transformers reads the
folder back, and its logits are the reference.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (Path(__file__).resolve().parents[1] / "LICENSE").read_text()
LENGTH, VOCAB = 24, 512
MOVED = 1e-3
"""Smallest change of the logits, relative to their root mean square, that a parameter or an option must cause."""
_WORD = r"[^\r\n\p{L}\p{N}]?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
REGEXES = {
    "llama3": rf"{_ENDINGS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_ENDINGS}|{_WORD}\p{{L}}+|\p{{N}}|{_REST}",
    "o200k": rf"{_WORD}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_WORD}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Patterns that split text before byte-level BPE. Source: the families' own ``tokenizer.json``."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
      architecture: class of transformers.
      tokenizer: kind of tokenizer: a key of ``REGEXES``, or ``spm_prefix`` or ``spm`` (SentencePiece).
      fields: fields of the config in addition to ``SIZES``.
      neutral: values with which single fields of the config have no effect.
      no_gguf: reason why llama.cpp does not compute this model, or "".
    """

    architecture: str
    tokenizer: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    neutral: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    no_gguf: str = ""


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default", **scaling}


SIZES = {
    **{"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512},
    **{"tie_word_embeddings": False, "rope_parameters": _rope(10000.0)},
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS = {
    **{"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128, "sliding_window": 8},
    **{"max_position_embeddings": 8192, "rope_parameters": _rope(150000.0, **_YARN, original_max_position_embeddings=256)},
}
_GPT_OSS_NEUTRAL = {"sliding_window": 512, "rope_parameters": _rope(150000.0), "swiglu_limit": 1e9, "swiglu_alpha": 1.0}
_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "tie_word_embeddings": True}
_GEMMA2 = {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
_GEMMA2_NEUTRAL = {"sliding_window": 512, "attn_logit_softcapping": None, "final_logit_softcapping": None}
_SCALE = "llama.cpp divides scores by the root of head_dim"
_GLOBAL = _rope(1e6, rope_type="linear", factor=8.0)
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "spm_prefix"),
    "llama31": Family(
        "LlamaForCausalLM",
        "llama3",
        {"rope_parameters": _rope(10000.0, **_LLAMA3, original_max_position_embeddings=64)},
        {"rope_parameters": _rope(10000.0)},
    ),
    "llama_bias": Family("LlamaForCausalLM", "llama3", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Family(
        "MistralForCausalLM",
        "spm_prefix",
        {"sliding_window": 8},
        {"sliding_window": None},
        no_gguf="llama.cpp has no window in llama",
    ),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": Family("Qwen3ForCausalLM", "qwen2", {"head_dim": 64}),
    "gemma2": Family("Gemma2ForCausalLM", "spm", _GEMMA2, _GEMMA2_NEUTRAL),
    "gemma2_scalar": Family(
        "Gemma2ForCausalLM",
        "spm",
        _GEMMA2 | {"query_pre_attn_scalar": 24},
        _GEMMA2_NEUTRAL | {"query_pre_attn_scalar": 64},
        no_gguf=_SCALE,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "spm",
        _GEMMA
        | {
            "num_hidden_layers": 7,
            "rope_parameters": {"full_attention": _GLOBAL, "sliding_attention": _rope(10000.0)},
        },
        {
            "sliding_window": 512,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {"full_attention": _rope(1e6), "sliding_attention": _rope(10000.0)},
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM", "spm_prefix", {"num_local_experts": 4, "num_experts_per_tok": 2}, {"num_experts_per_tok": 1}
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen2",
        {
            **{"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
            "norm_topk_prob": True,
        },
        {"norm_topk_prob": False, "num_experts_per_tok": 1},
    ),
    "gpt_oss": Family("GptOssForCausalLM", "o200k", _GPT_OSS, _GPT_OSS_NEUTRAL),
    "gpt_oss_mxfp4": Family("GptOssForCausalLM", "o200k", _GPT_OSS, _GPT_OSS_NEUTRAL),
}


def make_tokenizer(kind: str) -> Any:
    """Train a tokenizer of a kind on ``TEXT``; embeddings have more rows than the tokenizer has tokens."""
    size, quiet = VOCAB - 20, {"show_progress": False}
    if kind in REGEXES:
        tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=kind != "qwen2"))
        split = pre_tokenizers.Split(tokenizers.Regex(REGEXES[kind]), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.normalizer = normalizers.NFC() if kind == "qwen2" else None  # type: ignore[assignment]
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([split, level]), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, **quiet))
        bos, eos = {"llama3": ("<|begin_of_text|>", "<|end_of_text|>"), "qwen2": (None, "<|endoftext|>")}.get(
            kind, ("<|startoftext|>", "<|return|>")
        )
        tokenizer.add_special_tokens([each for each in (bos, eos, "<|pad|>") if each])
        first, pad = kind == "llama3", "<|pad|>"
    else:
        bos, eos, pad = ("<s>", "</s>", None) if kind == "spm_prefix" else ("<bos>", "<eos>", "<pad>")
        special = ["<unk>", bos, eos] if pad is None else [pad, eos, bos, "<unk>"]
        tokenizer, first = _sentencepiece(kind, special, size), True
    if first:
        tokens = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", tokens)
    ends = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "unk_token": None if kind in REGEXES else "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


def _sentencepiece(kind: str, special: list[str], size: int) -> tokenizers.Tokenizer:
    """Return byte-fallback BPE whose merges are all splits of all tokens, as converted from SentencePiece."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    start = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    learner.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=size - len(start), show_progress=False))
    learned = json.loads(learner.to_str())["model"]["vocab"]
    made = sorted((token for token in learned if len(token) > 1), key=learned.__getitem__)
    pairs = [(token[:cut], token[cut:]) for token in made for cut in range(1, len(token))]
    merges = [pair for pair in pairs if set(pair) <= learned.keys()]
    letters = sorted(token for token in learned if len(token) == 1)
    vocab = {token: index for index, token in enumerate([*start, *made, *letters])}
    fallback = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **fallback))
    space, steps = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "spm_prefix":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer, tokenizer.pre_tokenizer = space, pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(special)
    return tokenizer


def randomize(model: Any) -> None:
    """Draw all parameters, so that norms, biases, sinks and clamps have an effect."""
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        if name.endswith("norm.weight") and "gemma" in model.config.model_type:  # computes 1 + weight
            noise = 0.3 * noise
        elif name.endswith("norm.weight"):
            noise = 1 + 0.3 * noise
        elif not name.endswith(("bias", "sinks")):
            gain = 6 if "gpt_oss" in model.config.model_type and "gate_up_proj" in name else 1.5
            noise = noise * gain / 128**0.5
        elif name.endswith("bias"):
            noise = 0.3 * noise
        parameter.data = noise


@torch.no_grad()
def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    return model(torch.tensor(tokens.astype(np.int64))).logits.float().numpy()


def load(folder: Path, **changes: Any) -> Any:
    """Load a folder in float32 with eager attention; ``changes`` replaces fields of its config."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for key, value in changes.items():
        setattr(config, key, value)
    options: Any = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, **options).eval()


def check_effects(folder: Path, family: Family, tokens: np.ndarray, reference: np.ndarray) -> None:
    """Raise if a kind of parameter could be zero, or an option absent, without a change of the logits."""
    rms, still = float(np.sqrt(np.mean(reference**2))), []
    model = load(folder)
    for kind in sorted({".".join(name.split(".")[-2:]) for name, _ in model.named_parameters()}):
        chosen = [each for name, each in model.named_parameters() if name.endswith(kind)]
        values = [each.data for each in chosen]
        for each in chosen:
            each.data = torch.zeros_like(each.data)
        moved = np.abs(logits(model, tokens) - reference).max() / rms
        for each, value in zip(chosen, values, strict=True):
            each.data = value
        still += [kind] if moved < MOVED else []
    for field, value in family.neutral.items():
        moved = np.abs(logits(load(folder, **{field: value}), tokens) - reference).max() / rms
        still += [field] if moved < MOVED else []
    if still:
        raise ValueError(f"{folder.name}: {', '.join(still)} without an effect on the logits")


def encode_mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Encode experts [E, in, out] as blocks [E, out, in / 32, 16] and scales [E, out, in / 32] of gpt-oss.

    A byte has two elements, the first in its low half. The scale is 2^(s - 127), with the amax in (3, 6] times the scale.

    Source: ``convert_moe_packed_tensors`` of transformers.
    """
    tiles = weight.transpose(1, 2).reshape(weight.shape[0], weight.shape[2], -1, 32)
    power = torch.ceil(torch.log2(tiles.abs().amax(-1) / 6))
    scaled = tiles / torch.exp2(power)[..., None]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return {"_blocks": blocks.to(torch.uint8), "_scales": (power + 127).to(torch.uint8)}


def _rewrite_as_mxfp4(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors |= {name + end: part.contiguous() for end, part in encode_mxfp4(tensors.pop(name)).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_family(folder: Path, family: Family) -> None:
    """Write one model with its tokenizer, tokens and reference logits."""
    tokenizer = make_tokenizer(family.tokenizer)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    architecture = getattr(transformers, family.architecture)
    model = architecture(architecture.config_class(**(SIZES | family.fields | ids)))
    randomize(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if folder.name.endswith("mxfp4"):
        _rewrite_as_mxfp4(folder)
    text = tokenizer(TEXT[2000:2400])["input_ids"][:LENGTH]
    tokens = np.stack([text, np.random.default_rng(0).integers(0, len(tokenizer), LENGTH)]).astype(np.int32)
    reference = logits(load(folder), tokens)
    check_effects(folder, family, tokens, reference)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "logits.npy", reference)


def main(words: Sequence[str]) -> None:
    folder, names = Path(words[0]), words[1:] or FAMILIES
    for name in names:
        write_family(folder / name, FAMILIES[name])
        print(folder / name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
