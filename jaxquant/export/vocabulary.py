"""Tokenizers on their way into files: bytes, and byte-level BPE of a ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxquant.export.source import Vocabulary

BYTE_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")
"""What the tokens after the 256 bytes are called, of ``ByteVocabulary``."""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_characters() -> tuple[str, ...]:
    """Return the printable character that byte-level BPE has for each byte.

    Printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on.

    Source: ``bytes_to_unicode`` of GPT-2.
    """
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in plain else next(others)) for byte in range(256))


def byte_vocabulary(size: int) -> Vocabulary:
    """Return the vocabulary of bytes 0 to 255, then beginning, end and padding; the rest of ``size`` is not used."""
    tokens = (*byte_characters(), *BYTE_SPECIAL)
    special = range(256, 256 + len(BYTE_SPECIAL))
    added = [
        {
            "id": index,
            "content": tokens[index],
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for index in special
    ]
    bos = {"SpecialToken": {"id": BYTE_SPECIAL[0], "type_id": 0}}
    parts = [bos, {"Sequence": {"id": "A", "type_id": 0}}]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": parts,
            "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                BYTE_SPECIAL[0]: {"id": BYTE_SPECIAL[0], "ids": [256], "tokens": [BYTE_SPECIAL[0]]},
            },
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [],
        },
    }
    if size < len(tokens):
        raise ValueError(f"a vocabulary of {size} does not hold the {len(tokens)} tokens of bytes")
    return Vocabulary(tokens, (), frozenset(special), 256, 257, 258, data)


def of_tokenizer_json(data: Mapping[str, Any], bos: int | None, eos: int | None, pad: int | None) -> Vocabulary:
    """Return the vocabulary of a ``tokenizer.json``.

    One that GGUF has no name for has ``pre`` empty; a Hugging Face folder takes it nevertheless.

    Args:
      data: the file's contents.
      bos, eos, pad: numbers, or None.

    Raises:
      ValueError: no model with a vocabulary in it, or parts that are none of a tokenizer's.
    """
    try:
        return _read(data, bos, eos, pad)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"tokenizer.json is not of the library's layout ({type(error).__name__}: {error})") from None


def _read(data: Mapping[str, Any], bos: int | None, eos: int | None, pad: int | None) -> Vocabulary:
    model = data.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(vocab, Mapping) or not all(type(number) is int and number >= 0 for number in vocab.values()):
        raise ValueError("tokenizer.json has no model with a vocabulary of tokens and their numbers")
    numbers = {number: token for token, number in vocab.items()}
    added = [row for row in data.get("added_tokens", []) if isinstance(row, Mapping)]
    numbers |= {row["id"]: row["content"] for row in added}
    most = 2 * len(numbers) + 1_000_000
    if not all(type(number) is int and 0 <= number < most for number in numbers):
        raise ValueError(f"tokenizer.json numbers {len(numbers):,} tokens by something else than 0 to {most:,}")
    tokens = tuple(numbers.get(index, f"[unused{index}]") for index in range(max(numbers, default=-1) + 1))
    for name, number in (("bos", bos), ("eos", eos), ("pad", pad)):
        if number is not None and not 0 <= number < len(tokens):
            raise ValueError(f"{name}_token_id {number} is none of the {len(tokens):,} tokens of tokenizer.json")
    merges = tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", ()))  # pyright: ignore[reportOptionalMemberAccess]
    special = frozenset(row["id"] for row in added if row.get("special"))
    pre = _pre_tokenizer(data) if model.get("type") == "BPE" else ""  # pyright: ignore[reportOptionalMemberAccess]
    return Vocabulary(tokens, merges, special, bos, eos, pad, data, pre)


def _pre_tokenizer(data: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of what cuts a text before the merges, "" where it has none."""
    cut = data.get("pre_tokenizer") or {}
    parts = cut.get("pretokenizers", [cut]) if isinstance(cut, Mapping) else []
    if data.get("normalizer") is not None or not parts or parts[-1].get("type") != "ByteLevel":
        return ""
    if len(parts) == 1:
        plain = parts[0].get("use_regex", True) and not parts[0].get("add_prefix_space", False)
        return "gpt-2" if plain else ""
    pattern = parts[0].get("pattern", {})
    is_llama3 = len(parts) == 2 and parts[0].get("type") == "Split" and pattern.get("Regex") == _LLAMA3
    return "llama-bpe" if is_llama3 and not parts[1].get("use_regex", True) else ""
