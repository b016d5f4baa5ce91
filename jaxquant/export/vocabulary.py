"""Readers of other libraries' tokenizer files (byte-level BPE, SentencePiece BPE), and a vocabulary of bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxquant.core.typed import show
from jaxquant.export.source import Vocabulary

BYTE_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")
"""Special tokens of the byte vocabulary; their numbers follow the 256 bytes."""
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types; GGUF files and SentencePiece use the same numbers."""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SPLIT = {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False}
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, _LEVEL],
    "llama-bpe": [_SPLIT, _LEVEL | {"use_regex": False}],
}
"""Pre-tokenizers of byte-level BPE by llama.cpp's name; a vocabulary without merges has the name ``default``."""
_ESCAPE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREFIX = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _ESCAPE]}
"""SentencePiece normalizer that adds a space before the text; ``_ESCAPE`` is the normalizer without this space."""


def byte_characters() -> tuple[str, ...]:
    """Return the printable character of each byte in byte-level BPE.

    A byte that is printable in Latin-1 is its Latin-1 character. Other bytes become the characters from U+0100 on.

    Source: ``bytes_to_unicode`` of GPT-2.
    """
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in plain else next(others)) for byte in range(256))


def byte_vocabulary(size: int) -> Vocabulary:
    """Return the vocabulary of the bytes 0 to 255 and three special tokens; raise if ``size`` is too small."""
    tokens = (*byte_characters(), *BYTE_SPECIAL)
    if size < len(tokens):
        raise ValueError(f"a vocabulary of size {size} is too small for the {len(tokens)} byte tokens")
    level = _LEVEL | {"trim_offsets": False, "use_regex": False}
    kinds = [NORMAL] * 256 + [CONTROL] * len(BYTE_SPECIAL)
    return _build(_bpe_json(tokens, kinds, [], 256, {}, pre_tokenizer=level, decoder=level), 256, 257, 258, "bytes")


def read_tokenizer(data: Mapping[str, Any], bos: int | None, eos: int | None, pad: int | None) -> Vocabulary:
    """Return the vocabulary of a ``tokenizer.json``.

    If GGUF has no name for the pre-tokenizer, ``pre`` is empty; such a tokenizer can only be written to a Hugging Face
    folder.

    Args:
      data: contents of the file.
      bos, eos, pad: token numbers, or None.

    Raises:
      ValueError: the file has no vocabulary, or a part of the file is invalid.
    """
    try:
        return _build(data, bos, eos, pad)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"tokenizer.json is not a tokenizers file ({type(error).__name__}: {error})") from None


def read_gguf(metadata: Mapping[str, Any]) -> Vocabulary | None:
    """Return the vocabulary in the metadata of a GGUF file, or None if there is none.

    Raises:
      NotImplementedError: the tokenizer or pre-tokenizer is not supported; the message names it.
      ValueError: a part is missing or invalid.
    """
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    model, pre = found.get("model", "none"), found.get("pre", "default")
    if model in ("none", "no_vocab"):
        return None
    is_spm, merges = model == "llama", found.get("merges", [])
    if not is_spm and (model != "gpt2" or (len(merges) and pre not in PRE_TOKENIZERS)):
        raise NotImplementedError(
            f"tokenizer.ggml.model {show(model)} with tokenizer.ggml.pre {show(pre)} is not supported; supported "
            f"are llama, and gpt2 with {', '.join(PRE_TOKENIZERS)}"
        )
    try:
        tokens = found["tokens"]
        kinds = [int(kind) for kind in found.get("token_type", [NORMAL] * len(tokens))]
        usual = {"bos": 1, "eos": 2} if is_spm else {}
        bos, eos, pad = (found.get(f"{name}_token_id", usual.get(name)) for name in ("bos", "eos", "padding"))
        bos = bos if found.get("add_bos_token", is_spm or pre == "llama-bpe") else None
        if is_spm:
            data = _spm_json(tokens, kinds, found["scores"], bos, found.get("add_space_prefix", True))
        else:
            cut = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS.get(pre, [_LEVEL])}
            pairs, whole = [merge.split(" ") for merge in merges], {"ignore_merges": pre == "llama-bpe"}
            data = _bpe_json(tokens, kinds, pairs, bos, whole, pre_tokenizer=cut, decoder=_LEVEL)
        return _build(data, bos, eos, pad, f"tokenizer.ggml, {model}")
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"tokenizer.ggml is not a {model} tokenizer ({type(error).__name__}: {error})") from None


def read_sentencepiece(data: bytes) -> Vocabulary:
    """Return the vocabulary of a ``tokenizer.model`` of SentencePiece.

    Source: ``sentencepiece_model.proto``.

    Raises:
      NotImplementedError: the model is not BPE, or normalizes text.
      ValueError: the file is not a SentencePiece model.
    """
    try:
        parts = _parse_protobuf(data)
        pieces, (trainer,), (normalizer,) = ([_parse_protobuf(each) for each in parts[key]] for key in (1, 2, 3))
        one = lambda fields, key, default: fields.get(key, [default])[-1]  # noqa: E731
        if one(trainer, 3, 1) != 2 or one(normalizer, 2, b"") or one(normalizer, 4, 1):
            raise NotImplementedError("tokenizer.model is not BPE, or it normalizes text; provide a tokenizer.json")
        tokens, kinds = [one(piece, 1, b"").decode() for piece in pieces], [one(piece, 3, NORMAL) for piece in pieces]
        scores = np.array([one(piece, 2, 0) for piece in pieces], np.uint32).view(np.float32).tolist()
        ids = [one(trainer, key, default) for key, default in ((41, 1), (42, 2), (43, -1))]
        bos, eos, pad = (number if 0 <= number < len(tokens) else None for number in ids)  # -1: does not exist
        prefixed = _spm_json(tokens, kinds, scores, bos, one(normalizer, 3, 1))
        return _build(prefixed, bos, eos, pad, "tokenizer.model")
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, DecodeError) as error:
        raise ValueError(f"tokenizer.model is not a SentencePiece model ({type(error).__name__}: {error})") from None


def _parse_protobuf(data: bytes) -> dict[int, list[Any]]:
    """Return the values of a protocol buffer (integers or bytes) by field number."""
    found: dict[int, list[Any]] = {}
    for field in UnknownFieldSet(Empty.FromString(data)):
        found.setdefault(field.field_number, []).append(field.data)
    return found


def _bpe_json(
    tokens: Sequence[str], kinds: Sequence[int], merges: Any, bos: int | None, model: Mapping[str, Any], **parts: Any
) -> dict[str, Any]:
    """Return the contents of a ``tokenizer.json``; ``model`` adds fields to its BPE model, ``parts`` to the file."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": token, "special": kind != USER, **flags}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER, UNKNOWN)
    ]
    first, special = [], {}
    if bos is not None:
        first = [{"SpecialToken": {"id": tokens[bos], "type_id": 0}}]
        special = {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}}
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    whole = {"pre_tokenizer": None, "post_processor": template if first else None, "decoder": None, **parts}
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    vocab = {token: index for index, token in enumerate(tokens) if kinds[index] != UNUSED}
    rest = {"fuse_unk": False, "byte_fallback": False, **model, "vocab": vocab, "merges": merges}
    return {**base, **whole, "model": {"type": "BPE", **plain, **rest}}


def _spm_json(
    tokens: Sequence[str], kinds: Sequence[int], scores: Iterable[float], bos: int | None, has_prefix: bool
) -> dict[str, Any]:
    """Return the contents of a ``tokenizer.json`` for SentencePiece BPE, with merges in the order of the scores.

    Source: ``LlamaConverter`` of transformers.
    """
    if (longest := max(map(len, tokens))) > 1000:  # a merge looks up every split of a token
        raise ValueError(f"a token has {longest} characters, but at most 1000 are supported")
    ranked = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
    merges = sorted(_splits(ranked), key=lambda pair: (-ranked["".join(pair)], -len(pair[0])))
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    parts = {"normalizer": _PREFIX if has_prefix else _ESCAPE, "decoder": {"type": "Sequence", "decoders": decoders}}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    model = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return _bpe_json(tokens, kinds, merges, bos, model, **parts)


def _splits(tokens: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield every pair of tokens whose concatenation is a token."""
    known = dict.fromkeys(tokens)
    for token in known:
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        yield from ((left, right) for left, right in halves if left in known and right in known)


def _build(
    data: Mapping[str, Any], bos: int | None, eos: int | None, pad: int | None, origin: str = "tokenizer.json"
) -> Vocabulary:
    model: Any = data.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(vocab, Mapping) or not all(type(number) is int and number >= 0 for number in vocab.values()):
        raise ValueError("tokenizer.json has no model with a vocabulary that maps tokens to numbers")
    numbers = {number: token for token, number in vocab.items()}
    added = [row for row in data.get("added_tokens", []) if isinstance(row, Mapping)]
    numbers |= {row["id"]: row["content"] for row in added}
    most = 2 * len(numbers) + 1_000_000
    if not all(type(number) is int and 0 <= number < most for number in numbers):
        raise ValueError(f"tokenizer.json has {len(numbers):,} tokens, but not all have numbers from 0 to {most:,}")
    tokens = tuple(numbers.get(index, f"[unused{index}]") for index in range(max(numbers, default=-1) + 1))
    for name, number in (("bos", bos), ("eos", eos), ("pad", pad)):
        if number is not None and not 0 <= number < len(tokens):
            raise ValueError(f"{name}_token_id {number} is not one of the {len(tokens):,} tokens of tokenizer.json")
    merges = tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", ()))
    is_bpe, has_bytes = model.get("type") == "BPE", model.get("byte_fallback", False)
    of_bytes = {token for token in tokens if has_bytes and re.fullmatch("<0x[0-9A-F]{2}>", token)}
    kinds = [BYTE if token in of_bytes else NORMAL if n in numbers else UNUSED for n, token in enumerate(tokens)]
    for row in added:
        is_unknown = has_bytes and row["content"] == model.get("unk_token")
        kinds[row["id"]] = UNKNOWN if is_unknown else CONTROL if row.get("special") else USER
    scores = _find_scores(data, tokens, kinds, merges) if is_bpe and has_bytes else ()
    pre = "default" if scores else _find_pre_tokenizer(data) if is_bpe else ""
    return Vocabulary(tokens, merges, tuple(kinds), bos, eos, pad, data, pre, scores, origin)


def _find_scores(
    data: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], merges: Iterable[str]
) -> tuple[float, ...]:
    """Return scores with which SentencePiece merges in the same order, or () if no scores have this effect."""
    pairs = [tuple(pair.split(" ")) for pair in merges]
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
    if data.get("normalizer") not in (_ESCAPE, _PREFIX) or data.get("pre_tokenizer") or set(_splits(normal)) - {*pairs}:
        return ()
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    return tuple(-float(ranks.get(token, 0)) for token in tokens)


def _find_pre_tokenizer(data: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer, or "" if it has no name."""
    cut = data.get("pre_tokenizer") or {}
    parts = cut.get("pretokenizers", [cut]) if isinstance(cut, Mapping) else []
    if data.get("normalizer") is not None or not parts or parts[-1].get("type") != "ByteLevel":
        return ""
    parts = [*parts[:-1], {**_LEVEL, **parts[-1], "trim_offsets": True}]  # does not change tokens
    found = (name for name, known in PRE_TOKENIZERS.items() if parts == known)
    return next(found, "") if data["model"].get("merges") else "default"
