"""A corpus in memory, split by document into train and held-out, and its batches: shuffled and packed by grain."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import stat
import sysconfig
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxquant.config.loader import check_ordinary
from train.config import TrainConfig
from train.tokenizer import Tokenizer, open_tokenizer, unreadable

if TYPE_CHECKING:
    import grain

HELD_OUT_SHARE = 0.05
_TEXTS_AT_ONCE = 256
# First-fit packs into this many open rows at least. More rows waste fewer places and take longer to restore: a restored
# iterator packs the open rows once more.
_OPEN_ROWS = 64
# The held-out sample is the same whatever data_seed is, so that runs can be compared.
_HELD_OUT_SEED = 0

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokenized documents.

    Attributes:
      tokens: every document, one after another, in the smallest unsigned type that holds the vocabulary.
      starts: where document d starts; one entry more than documents.
      train, held_out: numbers of the documents of each part, ascending. No document, and no copy of one, is in both.
      vocab_size: a multiple of 64, above every token.
      pad: the token that fills a row.
      description: one line: source, files, tokens, split.
      fingerprint: of tokens and split.
    """

    tokens: np.ndarray
    starts: np.ndarray
    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    pad: int
    description: str
    fingerprint: str


def load_corpus(dataset: str, path: str = "", field: str = "text", tokenizer_path: str = "") -> Corpus:
    """Read, tokenize and split a dataset.

    The split orders the documents by the SHA-256 of their name (``stdlib``: relative path) or text (the others) and
    holds out the first 5 %, at least one. Equal texts share a hash and therefore a part.

    Args:
      dataset, path, field: as in ``open_source``.
      tokenizer_path: a Hugging Face ``tokenizer.json``; empty for bytes.

    Raises:
      ValueError: unknown dataset, missing or unreadable data, no text, or fewer than two different documents.
    """
    tokenizer = open_tokenizer(tokenizer_path)
    source = open_source(dataset, path, field)
    flat, starts, digests = _tokenize(source, tokenizer)
    if len(starts) == 1:
        raise ValueError(f"dataset {source.label} is empty: none of its {len(source.files)} files holds any text")
    distinct = np.unique(digests)
    if len(distinct) < 2:
        size = f"it has {len(starts) - 1} documents, {len(distinct)} of them different"
        fix = "give at least 2 different documents"
        raise ValueError(f"dataset {source.label} leaves the held-out part empty: {size}; {fix}")
    last = distinct[max(1, round(HELD_OUT_SHARE * len(distinct))) - 1]
    held_out, train = np.flatnonzero(digests <= last), np.flatnonzero(digests > last)
    lengths = np.diff(starts)
    fingerprint = hashlib.blake2b(digest_size=16)
    for part in (flat, starts, held_out):
        fingerprint.update(np.ascontiguousarray(part).data)
    description = (
        f"{source.label}: {len(source.files):,} files, {len(flat):,} {tokenizer.label} tokens (vocabulary "
        f"{tokenizer.vocab_size:,}), train {len(train):,} documents {lengths[train].sum():,} tokens, held out "
        f"{len(held_out):,} documents {lengths[held_out].sum():,} tokens"
    )
    return Corpus(
        flat, starts, train, held_out, tokenizer.vocab_size, tokenizer.pad, description, fingerprint.hexdigest()
    )


def _tokenize(source: Source, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokenize into one growing buffer. Documents of fewer than two tokens predict nothing and are left out."""
    flat, starts, digests = bytearray(), array("q", [0]), array("Q")
    item = np.dtype(tokenizer.dtype).itemsize
    documents = source.documents()
    while some := list(itertools.islice(documents, _TEXTS_AT_ONCE)):
        for (text, name), tokens in zip(some, tokenizer.encode([text for text, _ in some]), strict=True):
            if len(tokens) >= 2:
                flat += tokens.data
                starts.append(len(flat) // item)
                digests.append(int.from_bytes(hashlib.sha256((name or text).encode()).digest()[:8], "big"))
    return np.frombuffer(flat, tokenizer.dtype), np.frombuffer(starts, np.int64), np.frombuffer(digests, np.uint64)


class TrainIterator:
    """The endless stream of training batches.

    Its position is small and JSON-able, the same on every process, and says which stream it belongs to.
    """

    def __init__(self, stream: grain.IterDataset, fingerprint: str):
        self._iterator = iter(stream)
        self._stream = {"corpus": fingerprint}  # the rest of what decides it is the run's configuration

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        return {"stream": self._stream, "position": copy.deepcopy(self._iterator.get_state())}

    def set_state(self, state: Any) -> None:
        """Go to a position; the next batch is the one that followed ``get_state``.

        Raises:
          ValueError: the position is one in another text.
        """
        before, now = state["stream"]["corpus"], self._stream["corpus"]
        if before != now:
            change = f"the sum of its tokens was {before} and is {now}"
            raise ValueError(f"data position belongs to another text: {change}; restore it or start a new run")
        self._iterator.set_state(copy.deepcopy(state["position"]))


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run.

    A batch holds, each ``[B, S]``: ``inputs``, ``targets`` (int32), ``segment_ids`` (int32; the documents, or pieces of
    one, of a row from 1; 0 is padding), ``positions`` (int32, from 0 in each segment). Where segment_ids > 0,
    ``targets[b, s]`` is the token after ``inputs[b, s]`` **in the same document**, so no target crosses into another
    one.

    Attributes:
      train: endless batches.
      held_out: () -> ``eval_batches`` batches of held-out text, the same in each call. Where there are fewer, all of
        them: each token once, the last batch filled up with rows of padding.
      vocab_size: a multiple of 64, above every token.
      description: one line: source, files, tokens, split.
    """

    train: TrainIterator
    held_out: Callable[[], Iterator[Batch]]
    vocab_size: int
    description: str


def make_iterators(config: TrainConfig, batch_size: int) -> Data:
    """Load a config's corpus and set up its batches.

    Every process packs the whole stream, so neither the batches nor the position depend on how many processes there
    are; ``processes.place`` gives each device its rows.

    Args:
      config: of the run. With ``packing`` a row holds as many documents as fit, else one.
      batch_size: rows of a batch, over all processes.

    Raises:
      ValueError: data that cannot be read or split, or less of it than one batch.
    """
    import grain  # only here: serving and importing do without

    corpus = load_corpus(config.dataset, config.dataset_path, config.dataset_text_field, config.tokenizer_path)
    chunks = Chunks(corpus, corpus.train, config.sequence_length)
    _check_size(chunks, batch_size, config, corpus)
    # Grain's shuffle of epoch e is seeded with seed + e: spread the seeds, or run 1 would be run 0 an epoch later.
    seed = int(np.random.SeedSequence(config.data_seed).generate_state(1)[0])
    held_out = Chunks(corpus, corpus.held_out, config.sequence_length)

    def batches(chunks: grain.MapDataset, shuffle_seed: int | None) -> grain.IterDataset:
        packed = grain.experimental.FirstFitPackIterDataset(
            # The corpus is in memory: threads would only cost, and the order of reading is the order of the stream.
            chunks.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
            length_struct=dict.fromkeys(("inputs", "targets"), config.sequence_length),
            padding_struct=dict.fromkeys(("inputs", "targets"), corpus.pad),
            num_packing_bins=max(_OPEN_ROWS, batch_size),
            max_sequences_per_bin=None if config.packing else 1,
            shuffle_bins=shuffle_seed is not None,
            seed=shuffle_seed or 0,
        )
        return packed.batch(batch_size).map(lambda packed: _finish(packed, batch_size, corpus.pad))

    train = TrainIterator(
        batches(grain.MapDataset.source(chunks).shuffle(seed=seed).repeat(), seed), corpus.fingerprint
    )
    tested = batches(grain.MapDataset.source(held_out).shuffle(seed=_HELD_OUT_SEED), None)
    held_out_batches = lambda: itertools.islice(iter(tested), config.eval_batches)  # noqa: E731
    return Data(train, held_out_batches, corpus.vocab_size, corpus.description)


class Chunks:
    """The pieces of some documents, by number: a random-access source for grain.

    A document of n tokens predicts n − 1. Piece k takes inputs k·S … and the targets one further, so each token but the
    document's first is a target exactly once.
    """

    def __init__(self, corpus: Corpus, documents: np.ndarray, sequence_length: int):
        first, last = corpus.starts[documents], corpus.starts[documents + 1] - 1
        counts = -(-(last - first) // sequence_length)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._tokens = corpus.tokens
        self._starts = np.repeat(first, counts) + within * sequence_length
        self._ends = np.minimum(self._starts + sequence_length, np.repeat(last, counts))
        self.targets = int((last - first).sum())

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Batch:  # Any: grain hands over numpy integers too.
        start, end = int(self._starts[index]), int(self._ends[index])
        piece = self._tokens[start : end + 1].astype(np.int32)
        return {"inputs": piece[:-1], "targets": piece[1:]}


def _finish(packed: Batch, rows: int, pad: int) -> Batch:
    """Name the arrays of a batch as the step does, and fill up the last held-out one with rows of padding."""
    names = {"inputs": "inputs", "targets": "targets", "segment_ids": "inputs_segment_ids"}
    batch = {name: packed[of_grain] for name, of_grain in (names | {"positions": "inputs_positions"}).items()}
    missing, fill = ((0, rows - len(batch["inputs"])), (0, 0)), {"inputs": pad, "targets": pad}
    return {name: np.pad(x, missing, constant_values=fill.get(name, 0)) for name, x in batch.items()}


def _check_size(chunks: Chunks, rows: int, config: TrainConfig, corpus: Corpus) -> None:
    have, unit = (chunks.targets, "training tokens") if config.packing else (len(chunks), "training rows")
    need = rows * config.sequence_length if config.packing else rows
    if have < need:
        size = f"it has {have} {unit}, and {rows} rows of sequence_length {config.sequence_length} need {need}"
        fix = "lower batch_size or sequence_length, or give more text"
        raise ValueError(f"dataset {corpus.description} is too small for one batch: {size}; {fix}")


# -- where text comes from ---------------------------------------------------------------------------------------------

# Left out of "stdlib": what is installed beside it, tests, tables and generated files.
_SKIPPED_FOLDERS = frozenset(
    (
        *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"),
        *("pydoc_data", "encodings", "ensurepip", "__phello__", "__pycache__"),
    )
)
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "_sysconfig_vars")
# One text file is cut at line ends, so that it can be split into train and held-out: parts of at most this many
# characters, and about this many parts when the file is shorter.
_PART_CHARS = 16384
_PARTS = 20


Documents = Iterator[tuple[str, str | None]]
"""Texts of a corpus, always encodable as UTF-8, each with the name that the split is drawn on, if not the text."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A readable collection of documents.

    Attributes:
      label: what it is, for messages: ``text at /data/books``.
      files: in the order in which they are read.
      read: file -> its documents.
    """

    label: str
    files: list[Path]
    read: Callable[[Path], Documents]

    def documents(self) -> Documents:
        """Pass over the documents.

        Raises:
          ValueError: naming a file that cannot be read or is not what it should be.
        """
        for file in self.files:
            try:
                check_ordinary(file)
                yield from self.read(file)
            except OSError as error:
                unreadable(file, error)


def open_source(dataset: str, path: str, field: str) -> Source:
    """Find the files of a dataset; nothing is read yet.

    Args:
      dataset: ``stdlib``, ``text``, ``jsonl`` or ``parquet``.
      path: a file or a folder (searched recursively, hidden names left out); empty for ``stdlib``.
      field: the key (JSONL) or column (Parquet) that holds the text.

    Raises:
      ValueError: a path that is missing, unreadable, superfluous or has no files of the kind.
    """
    if dataset in ("stdlib", "text") and field != "text":
        raise ValueError(f"dataset_text_field {field!r} is not read by dataset {dataset!r}; leave it out")
    if dataset == "stdlib":
        if path:
            raise ValueError(f"dataset_path {path!r} is not read by dataset 'stdlib'; set dataset=text, or another")
        return _stdlib()
    if not path:
        raise ValueError(f"dataset {dataset!r} needs dataset_path, a file or a folder; got an empty one")
    read = _parts if Path(path).is_file() else _whole
    if dataset != "text":
        read = functools.partial(_json_lines if dataset == "jsonl" else _parquet_rows, field=field)
    return Source(f"{dataset} at {Path(path)}", _files(Path(path), dataset), read)


def _stdlib() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in _walk(root, _SKIPPED_FOLDERS) if file.suffix == ".py"]
    files = [x for x in files if not any(part.startswith(_SKIPPED_PREFIXES) for part in x.relative_to(root).parts)]
    if not files:
        raise ValueError(f"dataset 'stdlib' found no .py sources under {str(root)!r}; set dataset=text, or another")
    name_of = lambda file: file.relative_to(root).as_posix()  # noqa: E731
    return Source(f"stdlib at {root}", files, lambda file: iter([(_read_text(file), name_of(file))]))


def _whole(file: Path) -> Documents:
    yield _read_text(file), None


def _parts(file: Path) -> Documents:
    text = _read_text(file)
    size = min(_PART_CHARS, len(text) // _PARTS)
    start = end = 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        if end - start >= size:
            yield text[start:end], None
            start = end
    if start < end:
        yield text[start:end], None


def _json_lines(file: Path, field: str) -> Documents:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{file} line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or nesting as deep
                fix = "write one object a line, in UTF-8"
                raise ValueError(f"{place} is not JSON that Python reads ({error}); {fix}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{place} must be a JSON object with the key {field!r}, got {type(record).__name__}")
            _check_field(field, [*record], place, "key")
            yield _text(record[field], f"{place} key {field!r}"), None


def _check_field(field: str, names: Sequence[str], place: object, kind: str) -> None:
    if field not in names:
        one_of = ", ".join(map(repr, names)) or "none"
        raise ValueError(f"{place} has no {kind} {field!r}; set dataset_text_field to one of {one_of}")


def _parquet_rows(file: Path, field: str) -> Documents:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError("dataset 'parquet' needs pyarrow, which is not installed; pip install pyarrow") from None
    row = 0
    try:
        with parquet.ParquetFile(file) as table:
            _check_field(field, table.schema_arrow.names, file, "column")
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _text(value, f"{file} row {row} column {field!r}"), None
    except (pyarrow.ArrowInvalid, UnicodeDecodeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{file} is not a Parquet file, or damaged after row {row}: {reason}") from None


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        why = f"{error.reason} at byte {error.start}"
        raise ValueError(f"{str(file)!r} is not UTF-8 text: {why}; convert it or take it out") from None


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place} must be text, got {type(value).__name__}; set dataset_text_field")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} holds half a surrogate pair at character {error.start}, which is no text") from None
    return value


def _files(path: Path, dataset: str) -> list[Path]:
    """List the files of a path in an order that does not depend on the file system."""
    try:
        check_ordinary(path, "dataset_path")
        if not stat.S_ISDIR(path.stat().st_mode):
            return [path]
    except OSError as error:
        unreadable(path, error, "dataset_path")
    suffix = "" if dataset == "text" else f".{dataset}"
    files = [file for file in _walk(path) if file.name.endswith(suffix)]
    if not files:
        kind = f"*{suffix} files" if suffix else "files"
        raise ValueError(f"dataset {dataset!r} is empty: {str(path)!r} holds no {kind}")
    return files


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    found: list[Path] = []
    seen: set[str] = set()  # Links are followed; a folder that is reached twice is read once.
    refuse = lambda error: unreadable(Path(error.filename), error)  # noqa: E731
    for folder, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
        else:
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
            found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())
