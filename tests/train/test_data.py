"""The data pipeline: documents stay separate, streams repeat and resume exactly, bad data is an error."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxquant.training.data import Chunks, load_corpus, make_iterators
from jaxquant.training.tokenizer import ByteTokenizer


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
    """Write documents that repeat one letter 1 to 60 times, so that a target from another document is visible."""
    folder.mkdir(exist_ok=True)
    for number, letter in enumerate(LETTERS * copies):
        length = 1 + (number * 37) % 60
        (folder / f"{number:03}.txt").write_text(letter * length)
    return folder


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    return write_letters(tmp_path / "letters")


def segments(batch: dict[str, np.ndarray]) -> list[tuple[int, ...]]:
    """Return the tokens (inputs and last target) of each segment of a batch."""
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
def test_rows_hold_whole_segments_of_one_document_each_in_an_order_of_the_seed(letters, packing):
    data, again, other = (
        make_iterators(Config(dataset_path=str(letters), packing=packing, data_seed=seed), 4) for seed in (0, 0, 2**40)
    )
    state, held_out = data.train.get_state(), list(data.held_out())
    assert 1 <= len(held_out) <= 2
    assert data.train.get_state() == state
    for one, two in zip(held_out, other.held_out(), strict=True):
        assert_same(one, two)
    batches = take(data.train, 40)
    for one, two in zip(batches, take(again.train, 40), strict=True):
        assert_same(one, two)
    assert any((one["inputs"] != two["inputs"]).any() for one, two in zip(batches, take(other.train, 40), strict=True))
    most, seen, specials = 0, set(), {ByteTokenizer.bos, ByteTokenizer.eos}
    for batch in [*batches, *held_out]:
        assert batch.keys() == {"inputs", "targets", "segment_ids", "positions"}
        assert {(value.shape, str(value.dtype)) for value in batch.values()} == {((4, 16), "int32")}
        for row in range(4):
            ids, positions = batch["segment_ids"][row], batch["positions"][row]
            used = int((ids > 0).sum())
            assert (ids[:used] > 0).all(), "padding is at the end of a row"
            assert set(np.diff(ids[:used])) <= {0, 1}
            starts = np.flatnonzero(np.diff(ids[:used], prepend=0))
            expected = np.arange(used) - np.repeat(starts, np.diff(starts, append=used))
            np.testing.assert_array_equal(positions[:used], expected)
            assert not positions[used:].any()
            assert {*batch["inputs"][row, used:], *batch["targets"][row, used:]} <= {ByteTokenizer.pad}
            most = max(most, int(ids.max()))
        for run in segments(batch):
            assert len(set(run) - specials) <= 1, run
            assert ByteTokenizer.bos not in run[1:]
            assert ByteTokenizer.eos not in run[:-1]
            seen |= set(run) - specials
    assert len(seen) > 40
    assert (most > 1) == packing


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
    # Rows are read in groups of 64, each with consecutive chunks of the shuffled order: an epoch of more than 128 full
    # rows has at least two groups without rows of another epoch.
    assert sum((len(run) - 1) * count for run, count in expected.items()) > 192 * 16
    rows = [Counter(segments(batch)) for batch in take(data.train, 232)]
    first, later = sum(rows[:32], Counter()), sum(rows, Counter())
    assert not first - expected
    assert later.keys() == expected.keys()
    rounds = [later[run] / expected[run] for run in expected]
    assert max(rounds) - min(rounds) <= 2


@pytest.mark.parametrize(("packing", "copies"), [(True, 1), (False, 2)])
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


def test_a_position_in_another_text_is_refused(letters):
    config = Config(dataset_path=str(letters))
    state = make_iterators(config, 4).train.get_state()
    (letters / "000.txt").write_text("changed")
    changed = make_iterators(config, 4)
    with pytest.raises(ValueError, match=r"another text: .* tokens was [0-9a-f]{32} and is now [0-9a-f]{32};"):
        changed.train.set_state(state)


# Sources


def test_stdlib_is_the_default_and_is_split_by_file():
    corpus = load_corpus("stdlib")
    documents = len(corpus.starts) - 1
    assert sorted([*corpus.train, *corpus.held_out]) == list(range(documents))
    assert 0.03 < len(corpus.held_out) / documents < 0.07
    assert 4e6 < len(corpus.tokens) < 15e6
    assert (corpus.tokens.dtype, corpus.vocab_size) == (np.uint16, 320)
    text = bytes(corpus.tokens[corpus.tokens < 256].astype(np.uint8)).decode()
    assert text.count("class JSONDecodeError(ValueError)") == 1


def test_split_is_by_hash_and_keeps_copies_together(tmp_path):
    def held_out() -> set[bytes]:
        corpus = load_corpus("text", str(tmp_path))
        texts = [corpus.tokens[start:end].tobytes() for start, end in itertools.pairwise(corpus.starts)]
        assert not {texts[d] for d in corpus.train} & {texts[d] for d in corpus.held_out}
        return {texts[d] for d in corpus.held_out}

    for number in range(100):
        (tmp_path / f"{number}.txt").write_text(f"text {number % 40} {'x' * (number % 40)}")
    before = held_out()
    assert len(before) == 2  # 5 % of 40
    for number in range(100):  # Other names, same texts: the split does not change.
        (tmp_path / f"{number}.txt").rename(tmp_path / f"z{100 - number}.txt")
    assert held_out() == before


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
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert documents_of(load_corpus("text", str(tmp_path))) == ["zwei ü", "een"]


def test_text_file_is_cut_at_line_ends(tmp_path):
    path = tmp_path / "book.txt"
    for lines in (3, 20000):
        text = "".join(f"line {number}\r\n" for number in range(lines)) + "the end"
        path.write_bytes(text.encode())
        documents = documents_of(load_corpus("text", str(path)))
        assert "".join(documents) == text
        assert all(document.endswith("\n") for document in documents[:-1])
        assert len(documents) >= min(20, lines) - 2
        assert max(map(len, documents)) <= 16384 + 20


def test_jsonl(tmp_path):
    path = tmp_path / "data.jsonl"
    for field in ("text", "content"):
        records = [{field: "a\nb", "id": 1}, {field: ""}, {field: "ü"}]
        path.write_text("\n\n".join(json.dumps(record) for record in records))
        for place in (path, tmp_path):
            assert documents_of(load_corpus("jsonl", str(place), field)) == ["a\nb", "ü"]


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


# Bad data

BAD: list[tuple[str, bytes, dict[str, str], str]] = [
    ("", b"", {"dataset": "stdlib", "dataset_path": "x"}, "^dataset_path 'x' has no effect with dataset 'stdlib'; "),
    ("", b"", {"dataset_path": ""}, "^dataset 'text' requires dataset_path; set it to a file or a folder$"),
    ("", b"", {"dataset_path": "/no/where"}, "^dataset_path '/no/where' does not exist; check the path$"),
    ("", b"", {}, "^dataset 'text' is empty: '.*' has no files$"),
    ("t", b"{}", {"dataset": "stdlib", "tokenizer_path": "t"}, "^tokenizer_path '.*/t' is not a tokenizer.json: "),
    ("a.txt", b"", {}, "is empty: none of its 1 files has text$"),
    ("a.txt", b"good \xff bad", {}, "a.txt' is not UTF-8 text: invalid start byte at byte 5; convert it or remove it"),
    ("a.txt", b"the same " * 100, {}, "has no held-out part: it has 1 documents and 1 distinct text; "),
    ("a.jsonl", b'\n\n{"text": "a"', {}, r"a.jsonl line 3 is not JSON that Python can read \(Expecting"),
    ("a.jsonl", b"[1, 2]", {}, "a.jsonl line 1 must be a JSON object with the key 'text', got list$"),
    ("a.jsonl", b'{"body": "a", "id": 2}', {}, "line 1 has no key 'text'; set dataset_text_field to one of 'body', 'i"),
    ("a.jsonl", b'{"text": "a\xff"}', {}, r"line 1 is not JSON .* invalid start byte\); write one JSON object per"),
    ("a.parquet", b"PAR1 this is not", {}, "a.parquet is not a Parquet file, or is damaged after row 0: "),
]


def refuse(message: str, **fields) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_iterators(Config(**fields), 2)
    assert type(caught.value) is ValueError
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "content", "fields", "message"), BAD)
def test_bad_data_is_named(tmp_path, name, content, fields, message):
    if name:
        (tmp_path / name).write_bytes(content)
    given = {"dataset": name.partition(".")[2].replace("txt", "") or "text", "dataset_path": str(tmp_path)}
    if "tokenizer_path" in fields:
        given, fields = {}, fields | {"tokenizer_path": str(tmp_path / "t")}
    refuse(message, **given | fields)


def test_too_small_for_one_batch(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 15)
    (tmp_path / "b.txt").write_text("b" * 15)  # 15 bytes, bos and eos: 16 targets, half of what 2 rows of 16 need.
    refuse("it has 16 training tokens, and 2 rows of sequence_length 16 need 32; lower", dataset_path=str(tmp_path))
    refuse("1 training rows, and 2 rows of .* need 2; lower batch_si", dataset_path=str(tmp_path), packing=False)
    make_iterators(Config(dataset_path=str(tmp_path)), 1)


def test_bad_parquet(tmp_path):
    fields = {"dataset": "parquet", "dataset_path": write_parquet(tmp_path / "a.parquet", body=["x"], id=[1])}
    refuse(f"^{tmp_path}/a.parquet has no column 'text'; set dataset_text_field to one of 'body', 'id'$", **fields)
    refuse(f"^{tmp_path}/a.parquet row 1 column 'id' must be text, got int", **fields, dataset_text_field="id")
