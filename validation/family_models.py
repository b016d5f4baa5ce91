"""Write tiny random models of the families in ``families.yml`` with transformers, with tokenizers and logits.

``FOLDER/NAME`` has the files of ``save_pretrained``, ``tokens.npy`` [2, 96] and ``logits.npy`` [2, 96, V] (float32,
eager attention). Every parameter and every option of a family has an effect: ``check_effects`` zeroes each kind of
parameter and sets each option to another value, and raises if the logits stay the same.

transformers writes MXFP4 only with GPU kernels, so the experts of ``gpt_oss_mxfp4`` are encoded here. transformers
reads the folder back, and its logits are the reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
TEXT = (HERE.parent / "LICENSE").read_text()
TABLE = yaml.safe_load((HERE / "families.yml").read_text())
FAMILIES: dict[str, dict[str, Any]] = TABLE["families"]
LENGTH = 96
ENDS = ("lm_head.weight", "model.embed_tokens.weight")
MOVED = 1e-3
"""Smallest effect of a parameter or an option on the logits, relative to their root mean square."""


def make_tokenizer(kind: str) -> Any:
    """Train a tokenizer on ``TEXT``. Embeddings have more rows than the tokenizer has tokens.

    SentencePiece BPE has byte fallback, and its merges are all splits of all tokens, as converted by transformers.
    """
    row, size = TABLE["tokenizers"][kind], TABLE["sizes"]["vocab_size"] - 20
    special = [*dict.fromkeys(row["ends"].values())]
    model = {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": False, **row["model"]}
    data = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, **row["parts"]}
    if model.get("byte_fallback"):
        start = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        learner = tokenizers.Tokenizer(models.BPE())
        learner.pre_tokenizer = pre_tokenizers.Metaspace()
        learner.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=size - len(start), show_progress=False))
        learned = sorted(learner.get_vocab(), key=learner.get_vocab().__getitem__)
        made = [token for token in learned if len(token) > 1]
        pairs = ((token[:cut], token[cut:]) for token in made for cut in range(1, len(token)))
        ordered = [*start, *made, *(token for token in learned if len(token) == 1)]
        model["vocab"] = {token: index for index, token in enumerate(ordered)}
        model["merges"] = [pair for pair in pairs if {*pair} <= {*learned}]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data | {"model": model}))
    if not model["vocab"]:
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False)
        tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(special)
    if row["begins"]:
        bos = row["ends"]["bos_token"]
        numbers = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", numbers)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **row["ends"])


def randomize(model: Any) -> None:
    """Draw all parameters, so that norms, biases, sinks and clamps have an effect, and layers do not amplify noise."""
    draw, kind = torch.Generator().manual_seed(0), model.config.model_type
    for name, parameter in model.named_parameters():
        gain = 6 if kind == "gpt_oss" and "gate_up_proj" in name else 1.5 if name in ENDS else 0.7
        is_norm, is_vector = name.endswith("norm.weight"), name.endswith(("norm.weight", "bias"))
        scale = 1.0 if name.endswith("sinks") else 0.3 if is_vector else gain / 128**0.5
        offset = 1.0 if is_norm and "gemma" not in kind else 0.0  # Gemma's norms multiply by 1 + weight
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=draw)


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


def check_effects(folder: Path, others: Mapping[str, Any], tokens: np.ndarray, reference: np.ndarray) -> None:
    """Raise if a kind of parameter could be zero, or an option absent, without a change of the logits."""
    model, effects = load(folder), {}
    for kind in sorted({".".join(name.split(".")[-2:]) for name, _ in model.named_parameters()}):
        chosen = [(each, each.data) for name, each in model.named_parameters() if name.endswith(kind)]
        for each, value in chosen:
            each.data = torch.zeros_like(value)
        effects[kind] = np.abs(logits(model, tokens) - reference).max()
        for each, value in chosen:
            each.data = value
    for field, value in others.items():
        effects[field] = np.abs(logits(load(folder, **{field: value}), tokens) - reference).max()
    if still := [name for name, effect in effects.items() if effect < MOVED * np.sqrt(np.mean(reference**2))]:
        raise ValueError(f"{folder.name}: {', '.join(still)} has no effect on the logits")


def encode_mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Encode experts [E, in, out] as blocks [E, out, in / 32, 16] and scales [E, out, in / 32] of gpt-oss.

    A byte has two elements, the first in its low half. Elements are multiplied by 2^(s - 127). No element
    saturates.

    Source: ``convert_moe_packed_tensors`` of transformers.
    """
    tiles = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    power = torch.ceil(torch.log2(tiles.abs().amax(-1) / 6))
    scaled = tiles / torch.exp2(power)[..., None]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return {"_blocks": blocks.to(torch.uint8), "_scales": (power + 127).to(torch.uint8)}


def rewrite_as_mxfp4(folder: Path) -> None:
    """Replace the experts of a float folder."""
    tensors, path = load_file(folder / "model.safetensors"), folder / "config.json"
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors |= {name + end: part.contiguous() for end, part in encode_mxfp4(tensors.pop(name)).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    section = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}
    path.write_text(json.dumps(json.loads(path.read_text()) | section, indent=2))


def write_family(folder: Path) -> None:
    """Write the model that the folder is named after, with its tokenizer, tokens and reference logits."""
    row = FAMILIES[folder.name]
    tokenizer = make_tokenizer(row["tokenizer"])
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    architecture = getattr(transformers, row["class"])
    model = architecture(architecture.config_class(**(TABLE["sizes"] | row.get("fields", {}) | ids)))
    randomize(model)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    if folder.name.endswith("mxfp4"):
        rewrite_as_mxfp4(folder)
    text = tokenizer(TEXT[2000:3000])["input_ids"][:LENGTH]
    tokens = np.stack([text, np.random.default_rng(0).integers(0, len(tokenizer), LENGTH)]).astype(np.int32)
    reference = logits(load(folder), tokens)
    check_effects(folder, row.get("others", {}), tokens, reference)
    np.save(folder / "logits.npy", reference)
    np.save(folder / "tokens.npy", tokens)  # written last: a complete folder has it
