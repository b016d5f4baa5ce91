"""Conversion of tokens to text, complete and streamed."""

from __future__ import annotations

import json

import pytest

from jaxquant.export.vocabulary import byte_vocabulary
from jaxquant.training.tokenizer import ByteTokenizer, FileTokenizer, TextStream, Tokenizer

TEXTS = ["def f(x):\n    return x", "naïve café 数学 🙂 end", "a", "tail \ufffd here", ""]


@pytest.fixture(scope="module", params=["bytes", "file"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    data, merges = byte_vocabulary(512).tokenizer_json, ["d e", "de f", "r e", "re t", "Ã ©", "Ġ c"]
    vocab = data["model"]["vocab"] | {pair.replace(" ", ""): number for number, pair in enumerate(merges, 259)}
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(data | {"model": data["model"] | {"vocab": vocab, "merges": merges}}))
    return FileTokenizer(str(path))


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_comes_back_whole_and_in_pieces_without_half_characters(tokenizer, text):
    tokens = tokenizer.encode_prompt(text)
    assert [*tokens, *([tokenizer.eos] if text else [])] == [*tokenizer.encode([text])[0]]
    assert tokenizer.decode(tokens) == tokenizer.decode([*tokens, tokenizer.vocab_size]) == text
    stream = TextStream(tokenizer)
    pieces = [stream.add(int(token)) for token in tokens]
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.end() == text


def test_a_long_text_decodes_few_tokens_at_a_time_and_half_a_character_is_shown_at_the_end(monkeypatch):
    decoded, decode = [], ByteTokenizer.decode
    monkeypatch.setattr(
        ByteTokenizer, "decode", lambda self, tokens: decoded.append(len(tokens)) or decode(self, tokens)
    )
    stream = TextStream(ByteTokenizer())
    for token in ByteTokenizer().encode(["def größe(x):  # 測試 🙂\n" * 200])[0]:
        stream.add(int(token))
    assert max(decoded) < 80
    stream = TextStream(ByteTokenizer())
    assert [stream.add(token) for token in (0x61, 0xC3)] == ["a", ""]
    assert stream.end() == "\ufffd"


def test_a_completion_goes_on_from_its_prompt(tmp_path):
    """Metaspace decoders, like Llama 2's, remove the space before the first word."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁hello": 0, "▁world": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(str(tmp_path / "tokenizer.json"))
    prompt = [int(token) for token in tokenizer.encode_prompt("hello")]
    assert tokenizer.decode([1]) == "world"
    assert TextStream(tokenizer, prompt).all([1]) == " world"
    stream = TextStream(tokenizer, prompt)
    assert stream.add(1) + stream.end() == " world"
