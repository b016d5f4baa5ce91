"""Tokenizers of checkpoints: each form has the same tokens after reading, and after writing it again."""

import json
import re
import struct

import numpy as np
import pytest
import tokenizers

from jaxquant.export import HfFolder, Source, export, layout_of, open_gguf
from jaxquant.export.gguf_file import GgufFile
from jaxquant.export.vocabulary import PRE_TOKENIZERS, byte_vocabulary, gguf_metadata, read_gguf, read_tokenizer
from jaxquant.training.tokenizer import FileTokenizer
from tests.export.models import shape_of

LAYOUT = layout_of(shape_of(512, 32, 32, 1, 1, 1, 32))
TEXTS = ["hello  world 123\n\tit's HELLO", " ab<|x|>cd</s>e", "größe 数学 🙂", "", "   ", "HelloWorld's 12345//"]
CUTS = {"gpt-2": "HelloWorld|'s|Ġ12345|//", "llama-bpe": "HelloWorld|'s|Ġ|123|45|//"}
CUTS |= {"smollm": "HelloWorld|'s|Ġ|1|2|3|4|5|//", "dbrx": CUTS["llama-bpe"], "gpt-4o": "Hello|World's|Ġ|123|45|//"}
CUTS |= dict.fromkeys(("qwen2", "deepseek-r1-qwen"), CUTS["smollm"]) | {"tekken": "Hello|World|'s|Ġ|1|2|3|4|5|//"}
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message }}{% endfor %}"


def made(cut):
    """Return a byte-level BPE with a pre-tokenizer of llama.cpp, as the original files have it."""
    text = json.dumps(byte_vocabulary(512).tokenizer_json)
    data = json.loads(text.replace("<|begin_of_text|>", "<s>").replace("<|end_of_text|>", "</s>"))
    pairs = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld", "1 2", "12 3", "Ġ 12", "' s"]
    names = [*(pair.replace(" ", "") for pair in pairs), "<|eot_id|>", "<stop>", "<|x|>"]
    vocab = data["model"]["vocab"] | {name: number for number, name in enumerate(names, 259)}
    row = data["added_tokens"][0]
    data["added_tokens"] += [row | {"id": vocab[n], "content": n, "special": n != "<|x|>"} for n in names[-3:]]
    model = {"vocab": vocab, "merges": pairs, "ignore_merges": cut in ("llama-bpe", "tekken", "gpt-4o")}
    parts = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[cut]}}
    return data | parts | {"normalizer": {"type": "NFC"} if cut == "qwen2" else None, "model": data["model"] | model}


def write(folder, data, config=None, **generation):
    """Write a tokenizer with its configs; return the path of the tokenizer."""
    marks = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE, **(config or {})}
    for name, contents in {"tokenizer": data, "tokenizer_config": marks, "generation_config": generation}.items():
        (folder / f"{name}.json").write_text(json.dumps(contents))
    return folder / "tokenizer.json"


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


@pytest.mark.parametrize("name", [*CUTS, "bytes", "prefix", "no prefix", "gemma"])
def test_a_tokenizer_is_the_same_in_gguf_and_in_a_folder(tmp_path, name):
    if name in CUTS:
        config = {"add_bos_token": name != "qwen2"}
        vocabulary = read_tokenizer(write(tmp_path, made(name), config, eos_token_id=[273, 272], pad_token_id=258), {})
        assert (vocabulary.pre, vocabulary.ids["eos_token_id"]) == (name, [257, 273, 272])
    elif name == "bytes":
        vocabulary = byte_vocabulary(512)
    else:
        write(tmp_path, {}).with_name("tokenizer.model").write_bytes(sentencepiece(name == "prefix"))
        vocabulary = read_tokenizer(tmp_path / "tokenizer.model", {"bos_token_id": None})
        assert vocabulary.tokens[259:261] == ("<|x|>", "[unused260]")
        data = vocabulary.tokenizer_json
        reference = tokenizers.Tokenizer.from_str(json.dumps(data))
        for text in TEXTS:
            assert reference.encode(text, add_special_tokens=False).ids == as_sentencepiece(text, name == "prefix")
        assert reference.decode(reference.encode("hello größe").ids) == "hello größe"
        metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        other = read_tokenizer(write(tmp_path, data | {"normalizer": None, "pre_tokenizer": metaspace}), {})
        assert (other.scores, gguf_metadata(other, 512)["tokenizer.ggml.add_space_prefix"]) == (vocabulary.scores, True)
    if name == "gemma":  # several spaces are one added token, whose merge is the first
        cut = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        row = data["added_tokens"][-1] | {"id": data["model"]["vocab"]["▁▁"], "content": "▁▁"}
        model = data["model"] | {"merges": sorted(data["model"]["merges"], key=lambda pair: "".join(pair) != "▁▁")}
        model["vocab"] = {**model["vocab"], "\t": 3 + ord("\t")}  # a second name of this byte
        more = {"added_tokens": [*data["added_tokens"], row], "pre_tokenizer": cut, "model": model}
        vocabulary = read_tokenizer(write(tmp_path, data | more), {})
        assert vocabulary.tokens[3 + ord("\t")] == "<0x09>"
    reference = tokenizers.Tokenizer.from_str(json.dumps(vocabulary.tokenizer_json))
    if name in CUTS:
        assert [word for word, _ in reference.pre_tokenizer.pre_tokenize_str(TEXTS[-1])] == CUTS[name].split("|")
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
        assert found.adds_bos == vocabulary.adds_bos == (name != "qwen2") == len(again.encode("").ids)
        assert (TEMPLATE in found.files.values()) == (name != "bytes")
    first, second = (GgufFile(tmp_path / file).metadata for file in ("a.gguf", "b.gguf"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)


GPT2 = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"]}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pre": "bloom"}, NotImplementedError, "tokenizer.ggml.pre 'bloom' is not supported; supported are llama"),
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


def test_special_tokens_come_from_the_files_next_to_a_tokenizer(tmp_path):
    data = made("llama-bpe")
    more = {"added_tokens": [*data["added_tokens"], data["added_tokens"][0] | {"id": 275, "content": "<image>"}]}
    for is_in_file, flag, adds in ((1, None, 1), (0, None, 0), (0, True, 1), (1, False, 0)):
        given = data | more | {"post_processor": data["post_processor"] if is_in_file else None}
        path = write(tmp_path, given, {} if flag is None else {"add_bos_token": flag}, eos_token_id=[273, 272])
        found, own = read_tokenizer(path, {"eos_token_id": 256, "vocab_size": 275}), FileTokenizer(str(path))
        assert found.special == {"bos": (256,), "eos": (257, 273, 272), "pad": ()}
        assert (found.adds_bos, own.bos, own.ends) == (adds, 256 if adds else None, found.special["eos"])
        assert (found.tokens[-1], own.vocab_size) == ("<|x|>", 276)  # <image> has no row in the embedding
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<stop>", "bos_token": "<|x|>"}')
    assert (read_tokenizer(path, {}).special["pad"], read_tokenizer(path, {}).special["bos"]) == ((273,), (256,))
    assert FileTokenizer(str(path)).pad == 273
    (tmp_path / "special_tokens_map.json").unlink()
    with pytest.raises(ValueError, match=r"eos_token_id 310 is not one of the 275 tokens of tokenizer\.json"):
        read_tokenizer(write(tmp_path, data, eos_token_id=310), {})
    ends, other = "the model has [257, 273, 274, 258]; remove some", data | {"pre_tokenizer": {"type": "X"}}
    for given, refused in ((data, ends), (other, "no BPE tokenizer with normalizer None and pre_tokenizer {'type': '")):
        found = read_tokenizer(write(tmp_path, given, eos_token_id=[272, 273, 274, 258]), {})
        with pytest.raises(NotImplementedError, match=re.escape(refused)):
            gguf_metadata(found, 512)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(True))
    row = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False) | {"content": "<tool>"}
    write(tmp_path, data, {"added_tokens_decoder": {"512": row}})
    found = read_tokenizer(tmp_path / "tokenizer.model", {})
    assert tokenizers.Tokenizer.from_str(json.dumps(found.tokenizer_json)).token_to_id("<tool>") == 512


def test_a_folder_says_which_tokenizer_it_takes(tmp_path):
    folder = tmp_path / "hf"
    export(Source(LAYOUT, lambda name: np.zeros(LAYOUT.tensors[name], np.float32)), folder, "hf")
    assert HfFolder(folder).vocabulary() is None
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(NotImplementedError, match=r"has its tokenizer as vocab\.json; save it as tokenizer\.json"):
        HfFolder(folder).vocabulary()
    assert HfFolder(folder).source(has_tokenizer=False).vocabulary is None
    cut = sentencepiece(1)[:-3]
    for data, message in ((sentencepiece(1, kind=1), "is not BPE"), (cut, "is not a SentencePiece model")):
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
