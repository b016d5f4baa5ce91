"""Tokenizers of checkpoints: each form has the same tokens after reading, and after writing it again."""

import json
import re
import struct

import numpy as np
import pytest
import tokenizers

from jaxquant.export import HfFolder, LlamaShape, Source, export, open_gguf
from jaxquant.export.gguf_file import GgufFile
from jaxquant.export.vocabulary import PRE_TOKENIZERS, byte_vocabulary, gguf_metadata, read_gguf, read_tokenizer

SHAPE = LlamaShape(512, 32, 32, 1, 1, 1, 32)
TEXTS = ["hello  world 123\n\tit's HELLO", "größe 数学 🙂", "", "HelloWorld's 12345//", " ab<|x|>cd</s>e", "   "]
SPECIAL = ["<s>", "</s>", "<|eot_id|>", "<stop>"]
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message }}{% endfor %}"


def made(cut):
    """Return a byte-level BPE that was trained with a pre-tokenizer of llama.cpp, as the original files have it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=cut in ("llama-bpe", "tekken", "gpt-4o")))
    parts = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[cut]}
    data = json.loads(tokenizer.to_str()) | {"pre_tokenizer": parts, "decoder": PRE_TOKENIZERS["gpt-2"][0]}
    data["normalizer"] = {"type": "NFC"} if cut == "qwen2" else None
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello world it's 123 12 ab cd größe"] * 9, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<|x|>", normalized=False)])
    return json.loads(tokenizer.to_str())


def write(folder, contents, config=None, **generation):
    """Write a tokenizer with its config; return the path of the tokenizer."""
    path = folder / ("tokenizer.model" if isinstance(contents, bytes) else "tokenizer.json")
    path.write_bytes(contents if isinstance(contents, bytes) else json.dumps(contents).encode())
    marks = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks | (config or {})))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return path


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


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, "bytes", "prefix", "no prefix", "gemma", "metaspace"])
def test_a_tokenizer_is_the_same_in_gguf_and_in_a_folder(tmp_path, name):
    texts = TEXTS if name != "metaspace" else TEXTS[:-2]  # it adds no second space before a text
    if name in PRE_TOKENIZERS:
        vocabulary = read_tokenizer(write(tmp_path, made(name), eos_token_id=[3, 2], pad_token_id=2), {})
        assert (vocabulary.pre, vocabulary.special["eos"], vocabulary.adds_bos) == (name, (1, 3, 2), False)
    elif name == "bytes":
        vocabulary = byte_vocabulary(512)
    else:
        prefix = name in ("prefix", "metaspace")
        vocabulary = read_tokenizer(write(tmp_path, sentencepiece(prefix)), {"bos_token_id": None})
        assert vocabulary.tokens[259:261] == ("<|x|>", "[unused260]")
        data = vocabulary.tokenizer_json
        if name == "metaspace":
            cut = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
            vocabulary = read_tokenizer(write(tmp_path, data | {"normalizer": None, "pre_tokenizer": cut}), {})
        if name == "gemma":  # several spaces are one token, whose merge is the first
            cut = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
            row = data["added_tokens"][-1] | {"id": data["model"]["vocab"]["▁▁"], "content": "▁▁"}
            model = data["model"] | {"merges": sorted(data["model"]["merges"], key=lambda pair: "".join(pair) != "▁▁")}
            more = {"added_tokens": [*data["added_tokens"], row], "pre_tokenizer": cut, "model": model}
            vocabulary = read_tokenizer(write(tmp_path, data | more), {})
            assert "  " in gguf_metadata(vocabulary, 512)["tokenizer.ggml.tokens"]
    reference = tokenizers.Tokenizer.from_str(json.dumps(vocabulary.tokenizer_json))
    if vocabulary.scores:
        assert reference.decode(reference.encode("hello größe").ids) == "hello größe"
        for text in texts if name != "gemma" else ():
            assert reference.encode(text, add_special_tokens=False).ids == as_sentencepiece(text, prefix)
    source = Source(SHAPE, lambda name: np.zeros(SHAPE.tensors()[name], np.float32), vocabulary)
    export(source, tmp_path / "a.gguf", "gguf_f16")
    export(open_gguf(tmp_path / "a.gguf"), tmp_path / "hf", "hf")
    export(HfFolder(tmp_path / "hf").source(), tmp_path / "b.gguf", "gguf_f16")
    read = [open_gguf(tmp_path / "a.gguf").vocabulary, HfFolder(tmp_path / "hf").vocabulary()]
    for found in read:
        again = tokenizers.Tokenizer.from_str(json.dumps(found.tokenizer_json))
        for text in texts:
            tokens = reference.encode(text, add_special_tokens=False).ids
            assert again.encode(text, add_special_tokens=False).ids == tokens
            assert again.decode(tokens) == reference.decode(tokens)
        assert (found.ids, found.kinds) == (vocabulary.ids, vocabulary.kinds)
        assert (found.adds_bos, TEMPLATE in found.files.values()) == (vocabulary.adds_bos, name != "bytes")
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
    export(Source(SHAPE, lambda name: np.zeros(SHAPE.tensors()[name], np.float32)), folder, "hf")
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
    export(Source(SHAPE, HfFolder(folder).read), folder / "m.gguf", "gguf_f16")
    assert open_gguf(folder / "m.gguf").vocabulary.origin == "tokenizer.json"
