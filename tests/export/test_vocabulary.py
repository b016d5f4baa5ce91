"""Tokenizers of checkpoints: each form has the same tokens after reading, and after writing it again."""

import json
import re
import struct

import numpy as np
import pytest
import tokenizers

from jaxquant.export import HfFolder, Source, export, layout_of, open_gguf
from jaxquant.export.gguf_file import GgufFile
from jaxquant.export.vocabulary import PRE_TOKENIZERS, byte_vocabulary, read_gguf, read_sentencepiece, read_tokenizer
from tests.export.models import shape_of

LAYOUT = layout_of(shape_of(512, 32, 32, 1, 1, 1, 32))
TEXTS = ["hello  world 123\n\tit's HELLO", " ab<|x|>cd</s>e", "größe 数学 🙂", "", "   "]
SPECIAL = ["<s>", "</s>"]


def made(cut):
    """Return a byte-level BPE that was trained with a pre-tokenizer of llama.cpp."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=cut == "llama-bpe"))
    parts = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[cut]}
    data = json.loads(tokenizer.to_str()) | {"pre_tokenizer": parts, "decoder": PRE_TOKENIZERS["gpt-2"][0]}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello world it's 123 12 ab cd größe"] * 9, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<|x|>", normalized=False)])
    return tokenizer


PIECES = [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3), *((f"<0x{byte:02X}>", 0, 6) for byte in range(256))]
PIECES += [("<|x|>", 0, 4), ("gone", 0, 5)]
MERGED = ("he", "ll", "▁w", "hell", "lo", "or", "hello", "▁hello", "▁▁", "orl", "▁wor", "ab", "world", "▁world", "▁ab")
PIECES += [(piece, -float(rank), 1) for rank, piece in enumerate(MERGED)]
PIECES += [(each, -100.0 - rank, 1) for rank, each in enumerate("▁helowrdabc")]


def sentencepiece(has_prefix, kind=2, collapses=0):
    """Return the bytes of a ``tokenizer.model``."""
    field = lambda number, data: bytes([number << 3 | 2, *varint(len(data))]) + data  # noqa: E731
    piece = lambda text, score, kind: field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([24, kind])  # noqa: E731
    varint = lambda n: [n] if n < 128 else [n & 127 | 128, n >> 7]  # noqa: E731
    trainer, normalizer = bytes([3 << 3, kind]), bytes([3 << 3, has_prefix, 4 << 3, collapses])
    return b"".join(field(1, piece(*each)) for each in PIECES) + field(2, trainer) + field(3, normalizer)


def as_sentencepiece(text, has_prefix):
    """Return the tokens of a text: repeatedly join the pair whose piece has the highest score, leftmost first."""
    numbers = {piece: index for index, (piece, *_) in enumerate(PIECES)}
    scores, found = {piece: score for piece, score, kind in PIECES if kind == 1}, []
    for number, part in enumerate(re.split(r"(<\|x\|>|</s>)", text)):
        if number % 2:
            found.append(numbers[part])
            continue
        symbols = list((" " * (has_prefix and bool(part)) + part).replace(" ", "▁"))
        join = lambda at: -scores.get("".join(symbols[at : at + 2]), -np.inf)  # noqa: B023, E731
        while (ats := range(len(symbols) - 1)) and join(at := min(ats, key=join)) < np.inf:
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        for symbol in symbols:
            found += [numbers[symbol]] if symbol in scores else [3 + byte for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("name", ["llama-bpe", "smollm", "bytes", "prefix", "no prefix"])
def test_a_tokenizer_is_the_same_in_gguf_and_in_a_folder(tmp_path, name):
    if name in PRE_TOKENIZERS:
        reference = made(name)
        vocabulary = read_tokenizer(json.loads(reference.to_str()), 0, 1, None)
        assert vocabulary.pre == name
    elif name == "bytes":
        vocabulary = byte_vocabulary(512)
        reference = tokenizers.Tokenizer.from_str(json.dumps(vocabulary.tokenizer_json))
    else:
        vocabulary = read_sentencepiece(sentencepiece(name == "prefix"))
        assert vocabulary.tokens[259:261] == ("<|x|>", "[unused260]")
        reference = tokenizers.Tokenizer.from_str(json.dumps(vocabulary.tokenizer_json))
        for text in TEXTS:
            assert reference.encode(text, add_special_tokens=False).ids == as_sentencepiece(text, name == "prefix")
        assert reference.decode(reference.encode("hello größe").ids) == "hello größe"
    source = Source(LAYOUT, lambda name: np.zeros(LAYOUT.tensors[name], np.float32), vocabulary)
    export(source, tmp_path / "a.gguf", "gguf_f16")
    export(open_gguf(tmp_path / "a.gguf"), tmp_path / "hf", "hf")
    export(HfFolder(tmp_path / "hf").source(), tmp_path / "b.gguf", "gguf_f16")
    read = [open_gguf(tmp_path / "a.gguf").vocabulary, HfFolder(tmp_path / "hf").vocabulary()]
    for found in read:
        again = tokenizers.Tokenizer.from_str(json.dumps(found.tokenizer_json))
        for text in TEXTS:
            tokens = reference.encode(text, add_special_tokens=False).ids
            assert again.encode(text, add_special_tokens=False).ids == tokens
            assert again.decode(tokens) == reference.decode(tokens)
        assert (found.ids, found.kinds) == (vocabulary.ids, vocabulary.kinds)
    first, second = (GgufFile(tmp_path / file).metadata for file in ("a.gguf", "b.gguf"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)


GPT2 = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"]}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pre": "tekken"}, NotImplementedError, "tokenizer.ggml.pre 'tekken' is not supported; supported are llama"),
        ({"tokens": ["a"]}, ValueError, "tokenizer.ggml is not a gpt2 tokenizer"),
        ({"model": "llama"}, ValueError, "tokenizer.ggml is not a llama tokenizer (KeyError: 'scores')"),
        ({"model": "llama", "tokens": ["a" * 10**6] * 3, "scores": [0.0] * 3}, ValueError, "has 1000000 characters"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_refused(tmp_path, change, error, message):
    keys = lambda fields: {f"tokenizer.ggml.{key}": value for key, value in fields.items()}  # noqa: E731
    assert read_gguf(keys(GPT2)).tokens == ("a", "b", "ab")
    with pytest.raises(error, match=re.escape(message)):
        read_gguf(keys(GPT2 | change))


def test_a_folder_says_which_tokenizer_it_takes(tmp_path):
    folder = tmp_path / "hf"
    export(Source(LAYOUT, lambda name: np.zeros(LAYOUT.tensors[name], np.float32)), folder, "hf")
    assert HfFolder(folder).vocabulary() is None
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(NotImplementedError, match=r"has its tokenizer as vocab\.json; save it as tokenizer\.json"):
        HfFolder(folder).vocabulary()
    assert HfFolder(folder).source(has_tokenizer=False).vocabulary is None
    for data, message in (
        (sentencepiece(1, kind=1), "is not BPE"),
        (sentencepiece(1)[:-3], "is not a SentencePiece model"),
    ):
        (folder / "tokenizer.model").write_bytes(data)
        with pytest.raises((ValueError, NotImplementedError), match=message):
            HfFolder(folder).vocabulary()
    (folder / "tokenizer.model").write_bytes(sentencepiece(1))
    assert HfFolder(folder).vocabulary().origin == "tokenizer.model"
    (folder / "tokenizer.json").write_text(json.dumps(byte_vocabulary(320).tokenizer_json))
    assert HfFolder(folder).vocabulary().origin == "tokenizer.json"
    # Next to a GGUF file, whose own tokenizer is not read.
    export(Source(LAYOUT, HfFolder(folder).read), folder / "m.gguf", "gguf_f16")
    assert open_gguf(folder / "m.gguf").vocabulary.origin == "tokenizer.json"
