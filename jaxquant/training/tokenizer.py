"""Text to token numbers: bytes, or a Hugging Face ``tokenizers`` file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxquant.config.loader import check_ordinary, read_json

# tokenizers files do not say which special token begins or ends a text: these are the names that models use.
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]", "[CLS]")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]", "[SEP]")
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>")


class Tokenizer:
    """Turns texts into arrays of token numbers, with the beginning and the end of the text marked where it can.

    Attributes:
      label: what messages call it.
      vocab_size: above every token.
      bos, eos: tokens that mark the beginning and the end; None for no mark.
      pad: the token that fills a row.
      dtype: of the arrays.
    """

    label: str
    vocab_size: int
    bos: int | None
    eos: int | None
    pad: int
    dtype: type[np.uint16] | type[np.uint32]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode whole texts; an empty one has no tokens and no marks."""
        first, last = (np.array([] if mark is None else [mark], self.dtype) for mark in (self.bos, self.eos))
        return [
            np.concatenate([first, np.asarray(tokens, self.dtype), last]) if len(tokens) else np.empty(0, self.dtype)
            for tokens in self._encode(texts)
        ]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encode the beginning of a text: as ``encode``, without the end."""
        tokens = self.encode([text])[0]
        return tokens if self.eos is None else tokens[:-1]

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn tokens into text; marks, padding and numbers beyond the vocabulary are left out."""
        raise NotImplementedError

    def _encode(self, texts: Sequence[str]) -> Iterable[Any]:
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0..255, then bos 256, eos 257, pad 258; the vocabulary is padded to 320."""

    label = "byte"
    bos, eos, pad = 256, 257, 258
    vocab_size = 320
    dtype = np.uint16

    def _encode(self, texts: Sequence[str]) -> Iterable[Any]:
        return (np.frombuffer(text.encode(), np.uint8) for text in texts)

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn tokens into text; what is not UTF-8 becomes U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A Hugging Face ``tokenizer.json``.

    The marks of the beginning and the end are the tokens that a ``tokenizer_config.json`` next to the file names, and
    otherwise those of one of ``BOS_NAMES``, ``EOS_NAMES``. A truncation or padding that the file carries is switched
    off, because it would drop text.

    Args:
      path: the file.

    Raises:
      ValueError: the file is missing or unreadable, or is not a tokenizer.
    """

    def __init__(self, path: str):
        import tokenizers  # only here: it takes a while, and bytes do without

        data = read_bytes(Path(path), "tokenizer_path")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except ValueError as error:
            raise ValueError(f"tokenizer_path {path!r} is no tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest < 0:
            raise ValueError(f"tokenizer_path {path!r} has an empty vocabulary; give a trained tokenizer")
        self.label = Path(path).name
        self.vocab_size = highest + 1
        self.dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        beside = Path(path).with_name("tokenizer_config.json")
        marks = read_json(beside) if beside.is_file() else {}
        self.bos = None if marks.get("add_bos_token") is False else self._find(marks, "bos", BOS_NAMES)
        self.eos, pad = self._find(marks, "eos", EOS_NAMES), self._find(marks, "pad", PAD_NAMES)
        self.pad = 0 if pad is None else pad  # Which number fills a row does not matter: segment 0 masks it.

    def _find(self, marks: Mapping[str, Any], kind: str, names: Sequence[str]) -> int | None:
        own = marks.get(f"{kind}_token") if kind != "bos" or marks.get("add_bos_token") else None
        own = own.get("content") if isinstance(own, Mapping) else own  # with how it is cut out of a text
        numbers = (self._tokenizer.token_to_id(name) for name in (own, *names) if isinstance(name, str))
        return next((number for number in numbers if number is not None), None)

    def _encode(self, texts: Sequence[str]) -> Iterable[Any]:
        return (each.ids for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)


def read_bytes(file: Path, option: str = "") -> bytes:
    """Read a file, which ``option`` of the config named.

    Raises:
      ValueError: naming the file and why it cannot be read.
    """
    try:
        check_ordinary(file, option)
        return file.read_bytes()
    except OSError as error:
        unreadable(file, error, option)


def unreadable(file: Path, error: OSError, option: str = "") -> NoReturn:
    name = f"{option} {str(file)!r}".strip()
    if isinstance(error, FileNotFoundError):
        raise ValueError(f"{name} does not exist; check the path") from None
    raise ValueError(f"{name} cannot be read: {error.strerror or error}") from None


_CONTEXT = 32
"""Tokens before a token that its text may depend on."""

_LONGEST_PART = 4
"""Marks U+FFFD that the beginning of one character may be shown as."""


class TextStream:
    """Turn tokens into text as they come: a character of several tokens is held back until it is whole.

    A token decodes the last few again, and not the whole text: so a long text takes the time of its tokens.

    Args:
      tokenizer: of the tokens.
      before: tokens that are written already. What a token is written as may depend on them, as whether a word has a
        space before it.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._recent = list(before)[-_CONTEXT:]  # the tokens of ``_given`` characters, and those not given yet
        self._given = len(tokenizer.decode(self._recent))

    def add(self, token: int) -> str:
        """Return the text that is whole with this token and was not given before."""
        self._recent.append(token)
        text = self._tokenizer.decode(self._recent)
        # What may yet become a character: the last mark, or a few. Many of them are bytes that are no text.
        whole = max(len(text.rstrip("\ufffd")), len(text) - _LONGEST_PART)
        new = self._give(text[:whole])
        if len(self._recent) >= 2 * _CONTEXT:
            held = len(text) - self._given
            self._recent = self._recent[-_CONTEXT:]
            self._given = len(self._tokenizer.decode(self._recent)) - held
        return new

    def end(self) -> str:
        """Return what was held back."""
        return self._give(self._tokenizer.decode(self._recent))

    def all(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens that are left."""
        self._recent += tokens
        return self.end()

    def _give(self, text: str) -> str:
        new, self._given = text[self._given :], max(self._given, len(text))
        return new


def open_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a file, or bytes for an empty path."""
    return FileTokenizer(path) if path else ByteTokenizer()
