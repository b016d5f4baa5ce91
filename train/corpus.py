"""A corpus in memory: the tokens of every document, split by document into train and held-out."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from array import array

import numpy as np

from train.sources import Document, Source, open_source
from train.tokenizer import Tokenizer, open_tokenizer

HELD_OUT_SHARE = 0.05
_TEXTS_AT_ONCE = 256


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
      dataset, path, field: as in ``sources.open_source``.
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
        raise ValueError(
            f"dataset {source.label} leaves the held-out part empty: it has {len(starts) - 1} documents, "
            f"{len(distinct)} of them different; give at least 2 different documents"
        )
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
        for document, tokens in zip(some, tokenizer.encode([document.text for document in some]), strict=True):
            if len(tokens) >= 2:
                flat += tokens.data
                starts.append(len(flat) // item)
                digests.append(_digest(document))
    return np.frombuffer(flat, tokenizer.dtype), np.frombuffer(starts, np.int64), np.frombuffer(digests, np.uint64)


def _digest(document: Document) -> int:
    key = document.text if document.name is None else document.name
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
