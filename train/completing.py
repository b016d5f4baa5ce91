"""Complete prompts and print the texts as they come; see ``python -m train serve --help``."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from jaxquant.config.quant_config import NO_KV_QUANT
from train.generate import Completion, Sampling
from train.memory import return_large_blocks
from train.serving import Served, open_served
from train.tokenizer import TextStream


def complete(words: argparse.Namespace) -> int:
    """Complete the prompts of a command line; return 1 if some were refused."""
    return_large_blocks()
    sampling = Sampling(words.temperature, words.top_p, words.seed)
    texts, names = _texts(words)
    cache: dict[str, Any] = {"quantize_kvcache": True, "kv_quant_dtype": words.kv_cache} if words.kv_cache else {}
    served = open_served(words.directory, dict(NO_KV_QUANT) if words.kv_cache == "none" else cache)
    if words.kv_axis:
        if not served.config.quantize_kvcache:
            raise ValueError(f"--kv-axis {words.kv_axis} needs a quantized cache; add --kv-cache int8, int4 or fp8")
        served = dataclasses.replace(served, config=dataclasses.replace(served.config, kv_quant_axis=words.kv_axis))
    prompts = served.prompts(texts, names)
    engine = served.engine(
        sampling=sampling, max_length=words.max_length, slots=words.slots, prefill_chunk=words.prefill_chunk
    )
    printer = Printer(served, texts, [prompt.tokens for prompt in prompts])
    completions = engine.generate(prompts, words.max_new_tokens, printer.on_token, printer.on_done)
    refused = [completion for completion in completions if completion.stopped == "refused"]
    for completion in refused:
        print(f"error: {completion.message}", file=sys.stderr)
    return 1 if refused else 0


def _texts(words: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the prompts and their names in messages."""
    if words.prompt is not None:
        names = [f"prompt {number}" for number in range(1, len(words.prompt) + 1)]
        return [_text(os.fsencode(text), name) for text, name in zip(words.prompt, names, strict=True)], names
    source, name = words.prompts_file, "standard input" if words.prompts_file == "-" else words.prompts_file
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise ValueError(f"--prompts-file {source} cannot be read: {error.strerror}") from None
    lines = data.split(b"\n")  # splitlines() would split at form feeds too
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise ValueError(f"{name} holds no prompt; write one a line")
    names = [f"{name} line {number}" for number in range(1, len(lines) + 1)]
    return [_text(line.removesuffix(b"\r"), name) for line, name in zip(lines, names, strict=True)], names


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start}); write it in UTF-8") from None


class Printer:
    """Prints one completion token by token, or several in the order of their prompts."""

    def __init__(self, served: Served, texts: list[str], tokens: list[Any]):
        self._texts, self._is_streaming = texts, len(texts) == 1
        self._streams = [TextStream(served.tokenizer, each) for each in tokens]
        self._done: dict[int, Completion] = {}
        self._next = 0

    def on_token(self, place: int, token: int) -> None:
        if self._is_streaming:
            self._write(self._streams[place].add(token))

    def on_done(self, place: int, completion: Completion) -> None:
        self._done[place] = completion
        while (found := self._done.pop(self._next, None)) is not None:
            stream = self._streams[self._next]
            if found.stopped != "refused" and self._is_streaming:
                self._write(stream.end() + "\n")
            elif found.stopped != "refused":
                text = stream.all(found.tokens)
                print(f"--- {found.prompt.name}\n{self._texts[self._next]}{text}", flush=True)
            self._next += 1

    def _write(self, text: str) -> None:
        sys.stdout.write(self._texts[0] + text)
        sys.stdout.flush()
        self._texts[0] = ""
