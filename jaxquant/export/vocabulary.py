"""Readers of other libraries' tokenizer files (byte-level BPE, SentencePiece BPE), and a vocabulary of bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxquant.config.loader import read_json, read_text
from jaxquant.core.typed import show
from jaxquant.export.gguf_file import U32
from jaxquant.export.source import Vocabulary

BYTE_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")
"""Special tokens of the byte vocabulary; their numbers follow the 256 bytes."""
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types; GGUF files and SentencePiece use the same numbers."""
_END = re.compile(r"<\|(eot_id|eom_id|end_of_text|im_end|endoftext|return|call)\|>|<end_of_turn>|<eos>|</s>")
"""Control tokens at which llama.cpp ends a text without an entry in the metadata. Source: llama-vocab.cpp."""
_SLOTS = ("bos", "padding", "eos", "eot", "eom")
"""Special tokens in GGUF files; a text ends at the last three."""
FILES = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files next to a ``tokenizer.json`` that are copied with it."""
_SUFFIX, _BEFORE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (_BEFORE + _UPPER + "*" + _LOWER + "+", _BEFORE + _UPPER + "+" + _LOWER + "*")
_QWEN = _SUFFIX + "|" + _BEFORE + r"\p{L}+|\p{N}" + _OTHERS.replace("/", "")
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    """Return a pre-tokenizer that splits a text into the matches of a regular expression, then into bytes."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _LEVEL | {"use_regex": False}]


PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, _LEVEL],
    **dict.fromkeys(("llama-bpe", "dbrx"), _split(_QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _split(_QWEN)),
    "gpt-4o": _split("|".join(word + _SUFFIX + "?" for word in _WORDS) + r"|\p{N}{1,3}" + _OTHERS),
    "tekken": _split("|".join(_WORDS) + r"|\p{N}" + _OTHERS),
}
"""Pre-tokenizers of byte-level BPE by llama.cpp's name; a vocabulary without merges has the name ``default``.

Source: llama-vocab.cpp, whose comments have the regular expressions of the original files.
"""
_IGNORES_MERGES = ("llama-bpe", "tekken")
"""Names for which llama.cpp does not split a word that is a token, and adds the first token by default."""
_NFC = {"type": "NFC"}
"""Normalizer of ``qwen2``; llama.cpp leaves it out."""
_ESCAPE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREFIX = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _ESCAPE]}
"""SentencePiece normalizer that adds a space before the text; ``_ESCAPE`` is the normalizer without this space."""
_NO_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
"""Pre-tokenizer of Gemma, which has no effect after ``_ESCAPE``."""
_METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
"""Fields of a pre-tokenizer that replaces both normalizers."""


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
    data = _bpe_json(tokens, kinds, [], 256, {}, pre_tokenizer=level, decoder=level)
    return _build(data, {"bos": [256], "eos": [257], "pad": [258]}, True, "bytes", {})


def read_files(path: Path) -> dict[str, str]:
    """Return the contents of the files ``FILES`` next to a tokenizer's file, by name."""
    return {name: read_text(file, most=1 << 28) for name in FILES if (file := path.with_name(name)).is_file()}


def read_tokenizer(path: Path, model: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of a ``tokenizer.json``, or of a ``tokenizer.model`` of SentencePiece.

    The special tokens are read from ``tokenizer_config.json``, ``generation_config.json`` and the model, in this order.
    If GGUF has no name for the pre-tokenizer, ``pre`` is empty; such a tokenizer can only be written to a Hugging Face
    folder.

    Args:
      path: path of the file.
      model: ``config.json`` of the model: numbers of special tokens, and ``vocab_size``. Added tokens without a row in
        the embedding are left out.

    Raises:
      NotImplementedError: the SentencePiece model is not BPE, or normalizes text.
      ValueError: the file has no vocabulary, or a part of a file is invalid.
    """
    texts = {name: read_json(file) if (file := path.with_name(name)).is_file() else {} for name in FILES[:3]}
    config, generation = texts[FILES[2]] | texts[FILES[0]], texts[FILES[1]]
    try:
        data, own = _sentencepiece_json(path, config) if path.suffix == ".model" else (read_json(path), {})
        added = [row for row in data.get("added_tokens", []) if row["id"] < model.get("vocab_size", 1 << 32)]
        numbers = dict(data["model"]["vocab"]) | {row["content"]: row["id"] for row in added}
        last = data.get("post_processor") or {}
        adds = any("SpecialToken" in each["single"][0] for each in last.get("processors", [last]) if "single" in each)

        def find(kind: str) -> list[Any]:
            mark, key = config.get(f"{kind}_token"), f"{kind}_token_id"
            listed = next((each[key] for each in (generation, model, own) if each.get(key) is not None), None)
            marked = numbers.get(mark["content"] if isinstance(mark, Mapping) else mark)
            return [marked, *(listed if isinstance(listed, list) else [listed])]

        special, adds = {kind: find(kind) for kind in ("bos", "eos", "pad")}, config.get("add_bos_token", adds)
        return _build(data | {"added_tokens": added}, special, adds, path.name, read_files(path))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path.name} is not a tokenizers file ({type(error).__name__}: {error})") from None


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
        known = f"supported are llama, and gpt2 with {', '.join(PRE_TOKENIZERS)}"
        given = f"tokenizer.ggml.model {show(model)} with tokenizer.ggml.pre {show(pre)}"
        raise NotImplementedError(f"{given} is not supported; {known}")
    try:
        tokens, usual = found["tokens"], {"bos": 1, "eos": 2} if is_spm else {}
        kinds = [int(kind) for kind in found.get("token_type", [NORMAL] * len(tokens))]
        bos, pad, *ends = (found.get(f"{key}_token_id", usual.get(key)) for key in _SLOTS)
        adds = found.get("add_bos_token", is_spm or pre in _IGNORES_MERGES)
        if is_spm:
            data = _spm_json(tokens, kinds, found["scores"], bos if adds else None, found.get("add_space_prefix", True))
        else:
            cut = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS.get(pre, [_LEVEL])}
            pairs, whole = [merge.split(" ") for merge in merges], {"ignore_merges": pre in _IGNORES_MERGES}
            parts = {"normalizer": _NFC if pre == "qwen2" else None, "pre_tokenizer": cut, "decoder": _LEVEL}
            data = _bpe_json(tokens, kinds, pairs, bos if adds else None, whole, **parts)
        ends += [number for number, token in enumerate(tokens) if kinds[number] == CONTROL and _END.fullmatch(token)]
        files = {FILES[-1]: found["tokenizer.chat_template"]} if "tokenizer.chat_template" in found else {}
        return _build(data, {"bos": [bos], "eos": ends, "pad": [pad]}, adds, f"tokenizer.ggml, {model}", files)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"tokenizer.ggml is not a {model} tokenizer ({type(error).__name__}: {error})") from None


def gguf_metadata(vocabulary: Vocabulary | None, size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer in a GGUF file, for an embedding with ``size`` rows.

    Raises:
      NotImplementedError: llama.cpp does not support the tokenizer; the message names its parts.
    """
    if vocabulary is None:
        return {"tokenizer.ggml.model": "none"}
    data = vocabulary.tokenizer_json
    if not vocabulary.pre:
        parts = " and ".join(f"{name} {show(data.get(name))}" for name in ("normalizer", "pre_tokenizer"))
        kind = data["model"].get("type")
        raise NotImplementedError(f"llama.cpp has no {kind} tokenizer with {parts}; export to a Hugging Face folder")
    pairs, scores = zip(vocabulary.tokens, vocabulary.kinds, strict=True), list(vocabulary.scores)
    tokens = [token.replace("▁", " ") if kind == USER else token for token, kind in pairs]
    unused = [f"[PAD{index}]" for index in range(len(tokens), size)]
    found: dict[str, Any] = {"model": "llama" if scores else "gpt2", "pre": vocabulary.pre, "tokens": tokens + unused}
    found |= {"token_type": [*vocabulary.kinds, *[UNUSED] * len(unused)], "add_bos_token": vocabulary.adds_bos}
    spm = {"scores": scores + [0.0] * len(unused), "add_space_prefix": _has_space_prefix(data)}
    found |= {"add_eos_token": False, **(spm if scores else {"merges": list(vocabulary.merges)})}
    bos, eos, pad = (vocabulary.special[kind] for kind in ("bos", "eos", "pad"))
    ends = [*eos[:1], *(number for number in eos[1:] if not _END.fullmatch(tokens[number]))]
    if len(ends) > 3:
        raise NotImplementedError(f"GGUF has three end tokens, but the model has {ends}; remove some from eos_token_id")
    slots = zip(_SLOTS, (bos, pad, ends[:1], ends[1:2], ends[2:]), strict=True)
    found |= {f"{key}_token_id": U32(number) for key, numbers in slots for number in numbers}
    config: dict[str, Any] = json.loads(vocabulary.files.get(FILES[0], "{}"))
    template = vocabulary.files.get(FILES[-1], config.get("chat_template"))
    if isinstance(template, list):  # several templates with names
        template = {each["name"]: each["template"] for each in template}.get("default")
    made = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    return made | ({"tokenizer.chat_template": template} if template else {})


def _sentencepiece_json(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the contents of a ``tokenizer.json`` and the special tokens of a SentencePiece model.

    ``config``, the contents of ``tokenizer_config.json``, can have more added tokens.

    Source: ``sentencepiece_model.proto``.
    """
    try:
        parts = _parse_protobuf(path.read_bytes())
        pieces, (trainer,), (normalizer,) = ([_parse_protobuf(each) for each in parts[key]] for key in (1, 2, 3))
        one = lambda fields, key, default: fields.get(key, [default])[-1]  # noqa: E731
        if one(trainer, 3, 1) != 2 or one(normalizer, 2, b"") or one(normalizer, 4, 1):
            raise NotImplementedError("tokenizer.model is not BPE, or it normalizes text; provide a tokenizer.json")
        tokens, kinds = [one(piece, 1, b"").decode() for piece in pieces], [one(piece, 3, NORMAL) for piece in pieces]
        scores = np.array([one(piece, 2, 0) for piece in pieces], np.uint32).view(np.float32).tolist()
        fields = {"bos_token_id": (41, 1), "eos_token_id": (42, 2), "pad_token_id": (43, -1)}  # -1: does not exist
        ids = {name: n for name, field in fields.items() if 0 <= (n := one(trainer, *field)) < len(tokens)}
        made = _spm_json(tokens, kinds, scores, ids.get("bos_token_id"), one(normalizer, 3, 1))
        more = {int(key): row for key, row in config.get("added_tokens_decoder", {}).items()}
        made["added_tokens"] += [{"id": number, **row} for number, row in more.items() if number >= len(tokens)]
        made["model"]["vocab"] |= {row["content"]: row["id"] for row in made["added_tokens"]}
        return made, ids
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
    pairs = [(n, *pair) for n, pair in enumerate(zip(tokens, kinds, strict=True)) if UNKNOWN <= pair[1] <= USER]
    added = [{"id": n, "content": token, "special": kind != USER, **flags} for n, token, kind in pairs]
    marks = [] if bos is None else [tokens[bos]]
    first = [{"SpecialToken": {"id": mark, "type_id": 0}} for mark in marks]
    special = {mark: {"id": mark, "ids": [bos], "tokens": [mark]} for mark in marks}
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


def _build(data: Mapping[str, Any], special: Any, adds_bos: Any, origin: str, files: Mapping[str, str]) -> Vocabulary:
    """Return a vocabulary; ``special`` has lists of numbers and None, and the first ``bos`` and ``pad`` are used."""
    special = {kind: tuple(dict.fromkeys(n for n in ids if n is not None)) for kind, ids in special.items()}
    special |= {kind: special[kind][:1] for kind in ("bos", "pad")}
    model: Any = data.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(vocab, Mapping) or not all(type(number) is int and number >= 0 for number in vocab.values()):
        raise ValueError("tokenizer.json has no model with a vocabulary that maps tokens to numbers; use another")
    is_bpe, has_bytes = model.get("type") == "BPE", model.get("byte_fallback", False)
    of_bytes = {token for token in vocab if has_bytes and re.fullmatch("<0x[0-9A-F]{2}>", token)}
    numbers = {number: token for token, number in vocab.items()} | {vocab[token]: token for token in of_bytes}
    numbers |= {row["id"]: row["content"] for row in data["added_tokens"]}
    most = 2 * len(numbers) + 1_000_000
    if not all(type(number) is int and 0 <= number < most for number in numbers):
        raise ValueError(f"tokenizer.json has {len(numbers):,} tokens, but not all have numbers from 0 to {most:,}")
    tokens = tuple(numbers.get(index, f"[unused{index}]") for index in range(max(numbers, default=-1) + 1))
    for kind, number in ((kind, number) for kind, ids in special.items() for number in ids):
        if number not in range(len(tokens)):
            raise ValueError(f"{kind}_token_id {number} is not one of the {len(tokens):,} tokens of tokenizer.json")
    merges = tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", ()))
    kinds = [BYTE if token in of_bytes else NORMAL if n in numbers else UNUSED for n, token in enumerate(tokens)]
    for row in data["added_tokens"]:
        is_unknown = has_bytes and row["content"] == model.get("unk_token")
        kinds[row["id"]] = UNKNOWN if is_unknown else CONTROL if row.get("special") else USER
    scores = _find_scores(data, tokens, kinds, merges) if is_bpe and has_bytes else ()
    pre = "default" if scores else _find_pre_tokenizer(data) if is_bpe else ""
    is_added = bool(adds_bos and special["bos"])
    return Vocabulary(tokens, merges, tuple(kinds), special, is_added, data, pre, scores, origin, files)


def _has_space_prefix(data: Mapping[str, Any]) -> bool | None:
    """Return whether a ``tokenizer.json`` adds a space as SentencePiece does; None if it normalizes text differently.

    Metaspace adds no second space before a leading space, and "first" adds none after a special token; llama.cpp adds
    both.
    """
    normalizer, cut = data.get("normalizer"), data.get("pre_tokenizer")
    if normalizer is None and cut is not None and _METASPACE.items() <= cut.items():
        return cut.get("prepend_scheme", "always") != "never"
    return normalizer == _PREFIX if normalizer in (_ESCAPE, _PREFIX) and cut in (None, _NO_SPLIT) else None


def _find_scores(data: Any, tokens: Sequence[str], kinds: Sequence[int], merges: Iterable[str]) -> tuple[float, ...]:
    """Return scores with which SentencePiece merges in the same order, or () if no scores have this effect."""
    splits = set(_splits(token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL))
    pairs = [pair for pair in (tuple(pair.split(" ")) for pair in merges) if pair in splits]
    if _has_space_prefix(data) is None or data["model"].get("ignore_merges") or splits - {*pairs}:
        return ()
    ranks = {"".join(pair): rank for rank, pair in reversed([*enumerate(pairs)])}  # the first rank
    return tuple(-float(ranks.get(token, 0)) for token in tokens)


def _find_pre_tokenizer(data: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer, or "" if it has no name.

    A name with the same ``ignore_merges`` is preferred. The option only matters for tokens that merges do not make.
    """
    cut, model, normalizer = data.get("pre_tokenizer") or {}, data["model"], data.get("normalizer") or {}
    parts = cut.get("pretokenizers", [cut]) if isinstance(cut, Mapping) else []
    changed = [name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    if changed or not parts or parts[-1].get("type") != "ByteLevel" or steps not in ([], [_NFC]):
        return ""
    parts = [*parts[:-1], {**_LEVEL, **parts[-1], "trim_offsets": True}]  # does not change tokens
    found = [name for name, known in PRE_TOKENIZERS.items() if parts == known and (name == "qwen2") == bool(steps)]
    exact = [name for name in found if (name in _IGNORES_MERGES) == bool(model.get("ignore_merges"))]
    return next(iter(exact or found), "") if model.get("merges") else "" if steps else "default"
