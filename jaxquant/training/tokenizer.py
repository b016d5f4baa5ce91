"""Tokenizers: bytes, or a Hugging Face ``tokenizers`` file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxquant.config.loader import check_ordinary, read_json

# Usual names of the tokens for the beginning and the end of a text; tokenizer files do not mark these tokens.
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]", "[CLS]")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]", "[SEP]")
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>")


class Tokenizer:
    """A tokenizer that adds the tokens for the beginning and the end of a text, if its vocabulary has them.

    Attributes:
      label: name in messages.
      vocab_size: size of the vocabulary; all token ids are below it.
      bos, eos: tokens at the beginning and the end of a text, or None.
      ends: tokens that end a generated text.
      pad: padding token.
      dtype: dtype of the arrays.
    """

    label: str
    vocab_size: int
    bos: int | None
    eos: int | None
    ends: tuple[int, ...]
    pad: int
    dtype: type[np.uint16] | type[np.uint32]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode complete texts; an empty text has no tokens, not even ``bos`` and ``eos``."""
        first, last = (np.array([] if mark is None else [mark], self.dtype) for mark in (self.bos, self.eos))
        return [
            np.concatenate([first, np.asarray(tokens, self.dtype), last]) if len(tokens) else np.empty(0, self.dtype)
            for tokens in self._encode(texts)
        ]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encode the beginning of a text: like ``encode``, without the token at the end."""
        tokens = self.encode([text])[0]
        return tokens if self.eos is None else tokens[:-1]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens into text; special tokens, padding and numbers outside of the vocabulary are left out."""
        raise NotImplementedError

    def _encode(self, texts: Sequence[str]) -> Iterable[Any]:
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0..255, then bos 256, eos 257, pad 258; the vocabulary is padded to 320."""

    label = "byte"
    bos, eos, pad, ends = 256, 257, 258, (257,)
    vocab_size = 320
    dtype = np.uint16

    def _encode(self, texts: Sequence[str]) -> Iterable[Any]:
        return (np.frombuffer(text.encode(), np.uint8) for text in texts)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens into text; invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A Hugging Face ``tokenizer.json``.

    ``bos`` and ``eos`` come from a ``tokenizer_config.json`` next to the file; otherwise they are the first tokens of
    ``BOS_NAMES`` and ``EOS_NAMES`` in the vocabulary. ``bos`` is None if the config or the file does not add it to a
    text. A ``generation_config.json`` next to the file can have more tokens that end a text. Truncation and padding in
    the file are turned off, because truncation would drop text.

    Args:
      path: path of the file.

    Raises:
      ValueError: the file is missing, unreadable, or not a tokenizer.
    """

    def __init__(self, path: str):
        import tokenizers  # imported here: the import is slow, and ByteTokenizer does not need it

        data = read_bytes(Path(path), "tokenizer_path")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except ValueError as error:
            raise ValueError(f"tokenizer_path {path!r} is not a tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if not self.vocab_size:
            raise ValueError(f"tokenizer_path {path!r} has an empty vocabulary; use a trained tokenizer")
        self.label = Path(path).name
        self.dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        names = ("special_tokens_map", "tokenizer_config", "generation_config")
        files = (Path(path).with_name(f"{name}.json") for name in names)
        special, marks, generation = (read_json(file) if file.is_file() else {} for file in files)
        marks = special | marks
        names = {"bos": BOS_NAMES, "eos": EOS_NAMES, "pad": PAD_NAMES}
        bos, self.eos, pad = (self._find(marks, kind, each) for kind, each in names.items())
        adds_bos = marks.get("add_bos_token", not marks or self._tokenizer.encode("").ids[:1] == [bos])
        self.bos, ends = bos if adds_bos else None, generation.get("eos_token_id")
        ends = [self.eos, *(ends if isinstance(ends, list) else [ends])]
        self.ends = tuple(end for end in dict.fromkeys(ends) if end is not None)
        self.pad = 0 if pad is None else pad  # any token works as padding, because segment 0 masks padding

    def _find(self, marks: Mapping[str, Any], kind: str, names: Sequence[str]) -> int | None:
        marked = marks.get(f"{kind}_token")
        marked = marked.get("content") if isinstance(marked, Mapping) else marked  # a mapping with options
        numbers = (self._tokenizer.token_to_id(name) for name in (marked, *names) if isinstance(name, str))
        return next((number for number in numbers if number is not None), None)

    def _encode(self, texts: Sequence[str]) -> Iterable[Any]:
        return (each.ids for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)


def read_bytes(file: Path, option: str = "") -> bytes:
    """Read a file; ``option`` is the config field that names the file, for error messages.

    Raises:
      ValueError: the file cannot be read; the message names the file and the reason.
    """
    try:
        check_ordinary(file, option)
        return file.read_bytes()
    except OSError as error:
        raise_unreadable(file, error, option)


def raise_unreadable(file: Path, error: OSError, option: str = "") -> NoReturn:
    name = f"{option} {str(file)!r}".strip()
    if isinstance(error, FileNotFoundError):
        raise ValueError(f"{name} does not exist; check the path") from None
    raise ValueError(f"{name} cannot be read: {error.strerror or error}") from None


_CONTEXT = 32
"""Number of preceding tokens that the text of a token may depend on."""

_LONGEST_PART = 4
"""Largest number of U+FFFD characters that the beginning of one character decodes to."""


class TextStream:
    """Incremental decoder from tokens to text; a character of several tokens is held back until it is complete.

    ``add`` decodes only the last few tokens again, so the time is linear in the number of tokens.

    Args:
      tokenizer: tokenizer of the tokens.
      before: tokens that are already decoded. The text of the next token can depend on these tokens, for example the
        space before a word.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._recent = list(before)[-_CONTEXT:]  # last tokens; ``_num_returned`` counts characters already returned
        self._num_returned = len(tokenizer.decode(self._recent))

    def add(self, token: int) -> str:
        """Return the text that this token completes."""
        self._recent.append(token)
        text = self._tokenizer.decode(self._recent)
        # The last U+FFFD characters, up to _LONGEST_PART of them, may be the beginning of a character. More than that
        # are bytes that are not text.
        complete = max(len(text.rstrip("\ufffd")), len(text) - _LONGEST_PART)
        new = self._take_new(text[:complete])
        if len(self._recent) >= 2 * _CONTEXT:
            held_back = len(text) - self._num_returned
            self._recent = self._recent[-_CONTEXT:]
            self._num_returned = len(self._tokenizer.decode(self._recent)) - held_back
        return new

    def end(self) -> str:
        """Return the text that was held back."""
        return self._take_new(self._tokenizer.decode(self._recent))

    def all(self, tokens: Sequence[int]) -> str:
        """Return the text of the given tokens and the text that was held back."""
        self._recent += tokens
        return self.end()

    def _take_new(self, text: str) -> str:
        new, self._num_returned = text[self._num_returned :], max(self._num_returned, len(text))
        return new


def open_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a file, or a ``ByteTokenizer`` for an empty path."""
    return FileTokenizer(path) if path else ByteTokenizer()
