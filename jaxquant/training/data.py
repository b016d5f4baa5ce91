"""Corpus in memory, split by document into a training and a held-out part; grain shuffles and packs the batches."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxquant.training.config import TrainConfig
from jaxquant.training.sources import Source, open_source
from jaxquant.training.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    import grain

HELD_OUT_SHARE = 0.05
_TEXTS_AT_ONCE = 256
# Minimum number of open rows for first-fit packing. More rows waste less space, but restoring takes longer, because a
# restored iterator packs the open rows again.
_OPEN_ROWS = 64
# The held-out sample does not depend on data_seed, so that runs can be compared.
_HELD_OUT_SEED = 0

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokenized documents.

    Attributes:
      tokens: all documents, concatenated, in the smallest unsigned dtype that holds the vocabulary.
      starts: start offset of each document, followed by the end of the last document.
      train, held_out: indices of the documents of each part, ascending. No document, and no copy of a document, is in
        both parts.
      vocab_size: size of the tokenizer's vocabulary; every token is smaller.
      pad: padding token.
      description: one line with source, files, tokens and split.
      fingerprint: hash of tokens and split.
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

    The documents are sorted by the SHA-256 of their name (``stdlib``: relative path) or of their text (other datasets),
    and the first 5 %, at least one, are held out. Equal texts share a hash and are therefore in the same part.

    Args:
      dataset, path, field: arguments of ``sources.open_source``.
      tokenizer_path: Hugging Face ``tokenizer.json``; empty for bytes.

    Raises:
      ValueError: the dataset is unknown, the data is missing or unreadable, has no text, or has fewer than two
        different documents.
    """
    tokenizer = open_tokenizer(tokenizer_path)
    source = open_source(dataset, path, field)
    flat, starts, digests = _tokenize(source, tokenizer)
    if len(starts) == 1:
        raise ValueError(f"dataset {source.label} is empty: none of its {len(source.files)} files has text")
    distinct = np.unique(digests)
    if len(distinct) < 2:
        size = f"it has {len(starts) - 1} documents and {len(distinct)} distinct text"
        fix = "provide at least 2 different documents"
        raise ValueError(f"dataset {source.label} has no held-out part: {size}; {fix}")
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
    """Tokenize into one growing buffer. Documents with fewer than two tokens have no targets and are left out."""
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
    """Endless iterator over training batches.

    The position of the iterator is a small JSON-serializable value. It is equal on every process and includes a hash of
    the corpus.
    """

    def __init__(self, stream: grain.IterDataset, fingerprint: str):
        self._iterator = iter(stream)
        self._stream = {"corpus": fingerprint}  # the configuration determines everything else

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        return {"stream": self._stream, "position": copy.deepcopy(self._iterator.get_state())}

    def set_state(self, state: Any) -> None:
        """Move to a position; the next batch is the batch that followed the ``get_state`` call.

        Raises:
          ValueError: the position belongs to another text.
        """
        before, now = state["stream"]["corpus"], self._stream["corpus"]
        if before != now:
            change = f"the hash of its tokens was {before} and is now {now}"
            raise ValueError(f"data position belongs to another text: {change}; restore the text or start a new run")
        self._iterator.set_state(copy.deepcopy(state["position"]))


@dataclasses.dataclass(frozen=True)
class Data:
    """Data of a run.

    A batch holds four arrays ``[B, S]``: ``inputs``, ``targets`` (int32), ``segment_ids`` (int32; number of the
    document or chunk, from 1 in each row; 0 is padding), ``positions`` (int32, from 0 in each segment). Where
    segment_ids > 0, ``targets[b, s]`` is the token after ``inputs[b, s]`` **in the same document**, so no target
    belongs to another document.

    Attributes:
      train: endless iterator over training batches.
      held_out: function () -> iterator over ``eval_batches`` held-out batches, the same in each call. If the text has
        fewer batches, each token is returned once, and padding rows fill the last batch.
      vocab_size: multiple of 64 that is larger than every token.
      description: one line with source, files, tokens and split.
    """

    train: TrainIterator
    held_out: Callable[[], Iterator[Batch]]
    vocab_size: int
    description: str


def make_iterators(config: TrainConfig, batch_size: int) -> Data:
    """Load the corpus of a config and create its batches.

    Every process packs the whole stream, so batches and position do not depend on the number of processes;
    ``processes.shard`` gives each device its rows.

    Args:
      config: configuration of the run. With ``packing``, a row has as many documents as fit, otherwise one document.
      batch_size: rows of a batch, over all processes.

    Raises:
      ValueError: the data cannot be read or split, or is smaller than one batch.
    """
    import grain  # imported here, because serving and importing do not need it

    corpus = load_corpus(config.dataset, config.dataset_path, config.dataset_text_field, config.tokenizer_path)
    chunks = Chunks(corpus, corpus.train, config.sequence_length)
    _check_size(chunks, batch_size, config, corpus)
    # Grain shuffles epoch e with seed + e. Hash the seed, so that two seeds never have the same epoch.
    seed = int(np.random.SeedSequence(config.data_seed).generate_state(1)[0])
    held_out = Chunks(corpus, corpus.held_out, config.sequence_length)

    def batches(chunks: grain.MapDataset, shuffle_seed: int | None) -> grain.IterDataset:
        packed = grain.experimental.FirstFitPackIterDataset(
            # The corpus is in memory: threads would only add cost, and the reading order must be the stream order.
            chunks.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
            length_struct=dict.fromkeys(("inputs", "targets"), config.sequence_length),
            padding_struct=dict.fromkeys(("inputs", "targets"), corpus.pad),
            num_packing_bins=max(_OPEN_ROWS, batch_size),
            max_sequences_per_bin=None if config.packing else 1,
            shuffle_bins=shuffle_seed is not None,
            seed=shuffle_seed or 0,
        )
        return packed.batch(batch_size).map(lambda packed: _rename_and_pad(packed, batch_size, corpus.pad))

    train = TrainIterator(
        batches(grain.MapDataset.source(chunks).shuffle(seed=seed).repeat(), seed), corpus.fingerprint
    )
    tested = batches(grain.MapDataset.source(held_out).shuffle(seed=_HELD_OUT_SEED), None)
    held_out_batches = lambda: itertools.islice(iter(tested), config.eval_batches)  # noqa: E731
    return Data(train, held_out_batches, corpus.vocab_size, corpus.description)


class Chunks:
    """Random-access source for grain: chunks of documents.

    A document of n tokens has n − 1 targets. Chunk k has S inputs from token k·S on, and the targets are one token
    later, so every token except the document's first is a target exactly once.
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

    def __getitem__(self, index: Any) -> Batch:  # Any: grain also passes numpy integers
        start, end = int(self._starts[index]), int(self._ends[index])
        piece = self._tokens[start : end + 1].astype(np.int32)
        return {"inputs": piece[:-1], "targets": piece[1:]}


def _rename_and_pad(packed: Batch, rows: int, pad: int) -> Batch:
    """Rename the arrays of a batch as the step expects, and fill the last held-out batch with padding rows."""
    names = {"inputs": "inputs", "targets": "targets", "segment_ids": "inputs_segment_ids"}
    batch = {name: packed[of_grain] for name, of_grain in (names | {"positions": "inputs_positions"}).items()}
    missing, fill = ((0, rows - len(batch["inputs"])), (0, 0)), {"inputs": pad, "targets": pad}
    return {name: np.pad(x, missing, constant_values=fill.get(name, 0)) for name, x in batch.items()}


def _check_size(chunks: Chunks, rows: int, config: TrainConfig, corpus: Corpus) -> None:
    have, unit = (chunks.targets, "training tokens") if config.packing else (len(chunks), "training rows")
    need = rows * config.sequence_length if config.packing else rows
    if have < need:
        size = f"it has {have} {unit}, and {rows} rows of sequence_length {config.sequence_length} need {need}"
        fix = "lower batch_size or sequence_length, or provide more text"
        raise ValueError(f"dataset {corpus.description} is too small for one batch: {size}; {fix}")
