"""The data pipeline: documents stay apart, streams repeat and resume exactly, bad data is named."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from train.data import Chunks, load_corpus, make_iterators
from train.tokenizer import ByteTokenizer, open_tokenizer


@dataclasses.dataclass(frozen=True)
class Config:
    dataset: str = "text"
    dataset_path: str = ""
    dataset_text_field: str = "text"
    tokenizer_path: str = ""
    sequence_length: int = 16
    eval_batches: int = 2
    data_seed: int = 0
    packing: bool = True


LETTERS = [chr(number) for number in (*range(65, 91), *range(97, 123))]


def write_letters(folder: Path, copies: int = 1) -> Path:
    """Write documents of one letter each, of 1 to 60 letters, so that a stray target shows."""
    folder.mkdir(exist_ok=True)
    for number, letter in enumerate(LETTERS * copies):
        length = 1 + (number * 37) % 60
        (folder / f"{number:03}.txt").write_text(letter * length)
    return folder


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    return write_letters(tmp_path / "letters")


def segments(batch: dict[str, np.ndarray]) -> list[tuple[int, ...]]:
    """Take a batch apart into the token runs (inputs and last target) of its segments."""
    runs = []
    for row in range(len(batch["inputs"])):
        ids = batch["segment_ids"][row]
        for segment in range(1, ids.max() + 1):
            where = ids == segment
            inputs, targets = batch["inputs"][row][where], batch["targets"][row][where]
            np.testing.assert_array_equal(inputs[1:], targets[:-1])
            runs.append((*inputs.tolist(), int(targets[-1])))
    return runs


def runs_of(chunks: Chunks) -> Counter:
    pieces = (chunks[index] for index in range(len(chunks)))
    return Counter((*piece["inputs"].tolist(), int(piece["targets"][-1])) for piece in pieces)


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def take(iterator, count: int) -> list[dict[str, np.ndarray]]:
    return [next(iterator) for _ in range(count)]


@pytest.mark.parametrize("packing", [True, False])
def test_batch_layout(letters, packing):
    data = make_iterators(Config(dataset_path=str(letters), packing=packing), 4)
    tokens = ByteTokenizer
    most = 0
    for batch in [*take(data.train, 30), *data.held_out()]:
        assert {name: (value.shape, str(value.dtype)) for name, value in batch.items()} == {
            "inputs": ((4, 16), "int32"),
            "targets": ((4, 16), "int32"),
            "segment_ids": ((4, 16), "int32"),
            "positions": ((4, 16), "int32"),
        }
        for row in range(4):
            ids, positions = batch["segment_ids"][row], batch["positions"][row]
            used = int((ids > 0).sum())
            assert (ids[:used] > 0).all(), "padding is at the end of a row"
            assert set(np.diff(ids[:used])) <= {0, 1}
            assert used == 0 or ids[0] == 1
            starts = np.flatnonzero(np.diff(ids[:used], prepend=0))
            expected = np.arange(used) - np.repeat(starts, np.diff(starts, append=used))
            np.testing.assert_array_equal(positions[:used], expected)
            assert not positions[used:].any()
            assert (batch["inputs"][row, used:] == tokens.pad).all()
            assert (batch["targets"][row, used:] == tokens.pad).all()
            most = max(most, int(ids.max()))
    assert (most > 1) == packing


@pytest.mark.parametrize("packing", [True, False])
def test_no_target_crosses_a_document(letters, packing):
    data = make_iterators(Config(dataset_path=str(letters), packing=packing), 4)
    seen = set()
    for batch in take(data.train, 40):
        for run in segments(batch):
            specials = {ByteTokenizer.bos, ByteTokenizer.eos}
            assert len(set(run) - specials) <= 1, run
            assert ByteTokenizer.bos not in run[1:]
            assert ByteTokenizer.eos not in run[:-1]
            seen |= set(run) - specials
    assert len(seen) > 40


def test_held_out_has_every_token_once(letters):
    corpus = load_corpus("text", str(letters))
    data = make_iterators(Config(dataset_path=str(letters), eval_batches=1000), 2)
    got = Counter(run for batch in data.held_out() for run in segments(batch))
    assert got == runs_of(Chunks(corpus, corpus.held_out, 16))
    assert sum(len(run) - 1 for run in got.elements()) == int((np.diff(corpus.starts)[corpus.held_out] - 1).sum())


def test_train_has_every_token_once_an_epoch(tmp_path):
    folder = tmp_path / "words"
    folder.mkdir()
    for number in range(80):
        (folder / f"{number}.txt").write_text(f"{number:03} " * (2 + number % 23))
    corpus = load_corpus("text", str(folder))
    expected = runs_of(Chunks(corpus, corpus.train, 16))
    data = make_iterators(Config(dataset_path=str(folder)), 4)
    # Rows come in groups of 64 that each hold consecutive chunks of the shuffled order: an epoch of more than 128 full
    # rows has at least two groups that reach into no other epoch.
    assert sum((len(run) - 1) * count for run, count in expected.items()) > 192 * 16
    first = Counter(run for batch in take(data.train, 32) for run in segments(batch))
    assert not first - expected
    later = first + Counter(run for batch in take(data.train, 200) for run in segments(batch))
    assert later.keys() == expected.keys()
    rounds = [later[run] / expected[run] for run in expected]
    assert max(rounds) - min(rounds) <= 2


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("copies", [1, 2])
def test_resume_is_exact_everywhere(tmp_path, packing, copies):
    config = Config(dataset_path=str(write_letters(tmp_path / "letters", copies)), packing=packing)
    data = make_iterators(config, 3)
    states, batches = [data.train.get_state()], []
    for _ in range(140):
        batches.append(next(data.train))
        states.append(json.loads(json.dumps(data.train.get_state())))
    chunks = sum(len(segments(batch)) for batch in batches)
    corpus = load_corpus("text", str(tmp_path / "letters"))
    assert chunks > 1.2 * len(Chunks(corpus, corpus.train, 16)), "the stream crosses an epoch boundary"
    fresh = make_iterators(config, 3)
    for position in (0, 1, 2, 20, 21, 22, 23, 43, 64, 65, 97, 110, 137, 5):  # Forwards and backwards.
        fresh.train.set_state(states[position])
        assert fresh.train.get_state() == states[position]
        for offset in range(3):
            assert_same(next(fresh.train), batches[position + offset])
            assert fresh.train.get_state() == states[position + offset + 1]


def test_seed_decides_the_order(letters):
    def first(seed: int, count: int = 12):
        return take(make_iterators(Config(dataset_path=str(letters), data_seed=seed), 4).train, count)

    for one, two in zip(first(3), first(3), strict=True):
        assert_same(one, two)
    assert any((one["inputs"] != two["inputs"]).any() for one, two in zip(first(3), first(4), strict=True))
    make_iterators(Config(dataset_path=str(letters), data_seed=2**40), 4)


def test_epochs_are_shuffled_anew(tmp_path):
    numbers = iter(range(10**6))
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(" ".join(f"{next(numbers):04}" for _ in range(60)))
    corpus = load_corpus("text", str(tmp_path))
    size = len(Chunks(corpus, corpus.train, 16))
    data = make_iterators(Config(dataset_path=str(tmp_path), packing=False), 1)
    # Rows come in mixed groups of 64. The first whole group of the second epoch would, in the order of the first
    # epoch, be among the first two groups.
    start = -(-size // 64) * 64
    rows = [run for batch in take(data.train, start + 64) for run in segments(batch)]
    assert len(set(rows[:128])) == 128
    assert set(rows) == set(runs_of(Chunks(corpus, corpus.train, 16)))
    assert len(set(rows[start:]) - set(rows[:128])) > 16


def test_held_out_is_the_same_each_time_and_for_each_seed(letters):
    data = make_iterators(Config(dataset_path=str(letters)), 2)
    next(data.train)
    state = data.train.get_state()
    first = list(data.held_out())
    assert 1 <= len(first) <= 2
    other = make_iterators(Config(dataset_path=str(letters), data_seed=9), 2)
    for batches in (data.held_out(), other.held_out()):
        for one, two in zip(first, batches, strict=True):
            assert_same(one, two)
    assert data.train.get_state() == state


def test_a_position_in_another_text_is_refused(letters):
    config = Config(dataset_path=str(letters))
    state = make_iterators(config, 4).train.get_state()
    (letters / "000.txt").write_text("changed")
    changed = make_iterators(config, 4)
    with pytest.raises(ValueError, match=r"another text: the sum of its tokens was [0-9a-f]{32} and is [0-9a-f]{32};"):
        changed.train.set_state(state)


# Sources


def test_stdlib_is_the_default_and_is_split_by_file():
    corpus = load_corpus("stdlib")
    assert not set(corpus.train) & set(corpus.held_out)
    documents = len(corpus.starts) - 1
    assert sorted([*corpus.train, *corpus.held_out]) == list(range(documents))
    assert 0.03 < len(corpus.held_out) / documents < 0.07
    assert 4e6 < len(corpus.tokens) < 15e6
    assert corpus.tokens.dtype == np.uint16
    assert corpus.vocab_size == 320
    assert "\n" not in corpus.description
    assert load_corpus("stdlib").fingerprint == corpus.fingerprint
    text = bytes(corpus.tokens[corpus.tokens < 256].astype(np.uint8)).decode()
    assert text.count("class JSONDecodeError(ValueError)") == 1


def test_split_is_by_hash_and_keeps_copies_together(tmp_path):
    for number in range(100):
        (tmp_path / f"{number}.txt").write_text(f"text {number % 40} {'x' * (number % 40)}")
    corpus = load_corpus("text", str(tmp_path))
    texts = [corpus.tokens[start:end].tobytes() for start, end in zip(corpus.starts, corpus.starts[1:], strict=False)]
    assert not {texts[d] for d in corpus.train} & {texts[d] for d in corpus.held_out}
    assert len({texts[d] for d in corpus.held_out}) == 2  # 5 % of 40
    for number in range(100):  # Other names, same texts: the split stays.
        (tmp_path / f"{number}.txt").rename(tmp_path / f"z{100 - number}.txt")
    renamed = load_corpus("text", str(tmp_path))
    held = {renamed.tokens[renamed.starts[d] : renamed.starts[d + 1]].tobytes() for d in renamed.held_out}
    assert held == {texts[d] for d in corpus.held_out}


def documents_of(corpus) -> list[str]:
    found = []
    for start, end in zip(corpus.starts, corpus.starts[1:], strict=False):
        tokens = corpus.tokens[start:end]
        assert (tokens[0], tokens[-1]) == (ByteTokenizer.bos, ByteTokenizer.eos)
        found.append(bytes(tokens[1:-1].astype(np.uint8)).decode())
    return found


def test_text_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("een")
    (tmp_path / "a.md").write_text("zwei ü")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "blob").write_bytes(b"\xff")
    (tmp_path / "c").symlink_to(tmp_path)  # A loop is walked once.
    assert documents_of(load_corpus("text", str(tmp_path))) == ["zwei ü", "een"]


@pytest.mark.parametrize("lines", [3, 200, 20000])
def test_text_file_is_cut_at_line_ends(tmp_path, lines):
    text = "".join(f"line {number}\r\n" for number in range(lines)) + "the end"
    path = tmp_path / "book.txt"
    path.write_bytes(text.encode())
    documents = documents_of(load_corpus("text", str(path)))
    assert "".join(documents) == text
    assert all(document.endswith("\n") for document in documents[:-1])
    assert len(documents) >= min(20, lines) - 2
    assert max(map(len, documents)) <= 16384 + 20


@pytest.mark.parametrize("field", ["text", "content"])
def test_jsonl(tmp_path, field):
    path = tmp_path / "data.jsonl"
    records = [{field: "a\nb", "id": 1}, {field: ""}, {field: "ü"}]
    path.write_text("\n\n".join(json.dumps(record) for record in records))
    assert documents_of(load_corpus("jsonl", str(path), field)) == ["a\nb", "ü"]
    (tmp_path / "data.txt").write_text("not read")
    assert documents_of(load_corpus("jsonl", str(tmp_path), field)) == ["a\nb", "ü"]


def write_parquet(path: Path, **columns: list) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def test_parquet(tmp_path):
    write_parquet(tmp_path / "b.parquet", text=["three", ""], id=[1, 2])
    write_parquet(tmp_path / "a.parquet", text=["one", "two ü"])
    assert documents_of(load_corpus("parquet", str(tmp_path))) == ["one", "two ü", "three"]
    assert documents_of(load_corpus("parquet", str(tmp_path / "a.parquet"))) == ["one", "two ü"]


def write_tokenizer(path: Path, *specials: str) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    words = {name: number for number, name in enumerate([*specials, "[UNK]", "one", "two", "three"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*specials, "<|extra|>"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=2)
    tokenizer.save(str(path))
    return str(path)


def test_tokenizer_file(tmp_path):
    specials = ["<pad>", "<s>", "</s>"]
    path = write_tokenizer(tmp_path / "tokenizer.json", *specials)
    (tmp_path / "data.jsonl").write_text('{"text": "one two three two"}\n{"text": "three"}\n{"text": ""}\n')
    corpus = load_corpus("jsonl", str(tmp_path / "data.jsonl"), tokenizer_path=path)
    # <pad> 0, <s> 1, </s> 2, [UNK] 3, one 4, two 5, three 6, <|extra|> 7; not truncated to two, as the file asks for.
    assert corpus.tokens.tolist() == [1, 4, 5, 6, 5, 2, 1, 6, 2]
    assert (corpus.vocab_size, corpus.pad, corpus.tokens.dtype) == (8, 0, np.uint16)
    assert "tokenizer.json tokens" in corpus.description
    bare = open_tokenizer(write_tokenizer(tmp_path / "bare.json"))
    assert [tokens.tolist() for tokens in bare.encode(["two one", ""])] == [[2, 1], []]


def test_tokenizer_with_a_large_vocabulary(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(70000)} | {"[UNK]": 70000}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    large = open_tokenizer(str(tmp_path / "t.json"))
    assert (large.vocab_size, large.dtype) == (70001, np.uint32)
    assert large.encode(["w69999 w1"])[0].tolist() == [69999, 1]


# Bad data


def refuse(message: str, **fields) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_iterators(Config(**fields), 2)
    assert type(caught.value) is ValueError
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "stdlib", "dataset_path": "x"}, "^dataset_path 'x' is not read by dataset 'stdlib'; set dataset"),
        ({"dataset_text_field": "body"}, "^dataset_text_field 'body' is not read by dataset 'text'; leave it out$"),
        ({"dataset": "text"}, "^dataset 'text' needs dataset_path, a file or a folder; got an empty one$"),
        (
            {"dataset": "jsonl", "dataset_path": "/no/where"},
            "^dataset_path '/no/where' does not exist; check the path$",
        ),
        ({"dataset": "stdlib", "tokenizer_path": "/no/t"}, "^tokenizer_path '/no/t' does not exist; check the path$"),
        ({"dataset": "stdlib", "tokenizer_path": "/"}, "^tokenizer_path '/' cannot be read: Is a directory$"),
    ],
)
def test_bad_config(fields, message):
    refuse(message, **fields)


def test_undecodable_text(tmp_path, letters):
    bad = letters / "010.txt"
    bad.write_bytes(b"good \xff bad")
    message = (
        f"^{re.escape(repr(str(bad)))} is not UTF-8 text: invalid start byte at byte 5; convert it or take it out$"
    )
    refuse(message, dataset_path=str(letters))
    refuse(message, dataset_path=str(bad))


def test_unreadable_path(tmp_path, letters):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    refuse(f"^dataset_path '{loop}' cannot be read: Too many levels", dataset_path=str(loop))
    (letters / "loop").symlink_to(letters / "loop")
    refuse(f"^'{letters}/loop' cannot be read: Too many levels", dataset_path=str(letters))
    (letters / "loop").unlink()
    (letters / "dangling").symlink_to(letters / "gone")
    refuse(f"^'{letters}/dangling' does not exist", dataset_path=str(letters))


def test_empty_corpus(tmp_path):
    refuse(f"^dataset 'text' is empty: '{tmp_path}' holds no files$", dataset_path=str(tmp_path))
    (tmp_path / "a.txt").write_text("")
    message = f"^dataset text at {tmp_path} is empty: none of its 1 files holds any text$"
    refuse(message, dataset_path=str(tmp_path))
    refuse(
        f"^dataset 'jsonl' is empty: '{tmp_path}' holds no \\*.jsonl files$",
        dataset="jsonl",
        dataset_path=str(tmp_path),
    )
    (tmp_path / "a.jsonl").write_text("\n")
    refuse(f"^dataset jsonl at {tmp_path} is empty", dataset="jsonl", dataset_path=str(tmp_path))


def test_stdlib_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    message = f"^dataset 'stdlib' found no .py sources under '{tmp_path}'; set dataset=text, or another$"
    refuse(message, dataset="stdlib")


@pytest.mark.parametrize(("copies", "documents"), [(1, 1), (3, 3)])
def test_held_out_would_be_empty(tmp_path, copies, documents):
    for number in range(copies):
        (tmp_path / f"{number}.txt").write_text("the same " * 100)
    refuse(
        f"^dataset text at {tmp_path} leaves the held-out part empty: it has {documents} documents, 1 of them "
        "different; give at least 2 different documents$",
        dataset_path=str(tmp_path),
    )


def test_too_small_for_one_batch(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 15)
    (tmp_path / "b.txt").write_text("b" * 15)  # 15 bytes, bos and eos: 16 targets, half of what 2 rows of 16 need.
    refuse(
        "is too small for one batch: it has 16 training tokens, and 2 rows of sequence_length 16 need 32; lower batch_",
        dataset_path=str(tmp_path),
    )
    refuse(
        "it has 1 training rows, and 2 rows of sequence_length 16 need 2; lower batch_size or sequence_length",
        dataset_path=str(tmp_path),
        packing=False,
    )
    make_iterators(Config(dataset_path=str(tmp_path)), 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"text": "a"',
            r"is not JSON that Python reads \(Expecting ',' delimiter: line 2 column 1 \(char 13\)\); write",
        ),
        (b"[1, 2]", "must be a JSON object with the key 'text', got list$"),
        (b'{"body": "a", "id": 2}', "has no key 'text'; set dataset_text_field to one of 'body', 'id'$"),
        (b'{"text": 3}', "key 'text' must be text, got int; set dataset_text_field$"),
        (
            b'{"text": "a\xff"}',
            r"is not JSON .* byte 0xff in position 11: invalid start byte\); write one object a line, in UTF-8$",
        ),
        (b"[" * 200000, r"is not JSON that Python reads \(maximum recursion depth"),
    ],
)
def test_bad_jsonl(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    refuse(f"^{path} line 3 {message}", dataset="jsonl", dataset_path=str(path))


def test_bad_parquet(tmp_path):
    fields = {"dataset": "parquet", "dataset_path": write_parquet(tmp_path / "a.parquet", body=["x"], id=[1])}
    refuse(f"^{tmp_path}/a.parquet has no column 'text'; set dataset_text_field to one of 'body', 'id'$", **fields)
    refuse(f"^{tmp_path}/a.parquet row 1 column 'id' must be text, got int", **fields, dataset_text_field="id")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is not")
    refuse(f"^{tmp_path}/a.parquet is not a Parquet file, or damaged after row 0: ", **fields)


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = "^dataset 'parquet' needs pyarrow, .* pip install pyarrow$"
    refuse(message, dataset="parquet", dataset_path=__file__)


@pytest.mark.parametrize("content", [b"", b"not JSON", b"{}", b"\xff\xfe"])
def test_bad_tokenizer_file(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    refuse(f"^tokenizer_path '{path}' is no tokenizer.json: ", dataset="stdlib", tokenizer_path=str(path))


def test_tokenizer_without_words(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path))
    refuse(
        f"^tokenizer_path '{path}' has an empty vocabulary; give a trained", dataset="stdlib", tokenizer_path=str(path)
    )
