#!/usr/bin/env python3
"""Complete prompts with a trained model. One prompt streams; several come out in order, as they finish."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxquant import terminal
from jaxquant.config.quant_config import KV_ELEMENTS, NO_KV_QUANT
from train import extras
from train.generate import Completion, Prompt, Sampling
from train.memory import return_large_blocks
from train.processes import check_devices
from train.serving import Served, open_served
from train.tokenizer import TextStream

KV_CACHES = ("none", *KV_ELEMENTS)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/serve.py", description=__doc__)
    parser.add_argument("directory", metavar="DIR", help="folder that scripts/convert.py wrote, or of a run")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", action="append", metavar="TEXT", help="text to go on from; may be given repeatedly")
    asked.add_argument("--prompts-file", metavar="FILE", help="one prompt a line; - is standard input")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=0, metavar="N", help="of a text (default: as in training)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="share to draw from (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--kv-cache", choices=KV_CACHES, help="dtype of the KV cache (default: as the run's config)")
    parser.add_argument("--kv-axis", choices=("dkv", "heads_and_dkv"), help="scale a head, or one for all heads")
    parser.add_argument("--slots", type=int, default=8, metavar="N", help="prompts at a time (default: %(default)s)")
    parser.add_argument("--prefill-chunk", type=int, default=64, metavar="N", help="(default: %(default)s)")
    return parser.parse_args(arguments)


def _overrides(words: argparse.Namespace) -> dict[str, Any]:
    if words.kv_cache == "none":
        return dict(NO_KV_QUANT)
    return {"quantize_kvcache": True, "kv_quant_dtype": words.kv_cache} if words.kv_cache else {}


def _texts(words: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the prompts and what to call them."""
    if words.prompt is not None:
        names = [f"prompt {number}" for number in range(1, len(words.prompt) + 1)]
        return [_text(os.fsencode(text), name) for text, name in zip(words.prompt, names, strict=True)], names
    source, name = words.prompts_file, "standard input" if words.prompts_file == "-" else words.prompts_file
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise ValueError(f"--prompts-file {source} cannot be read: {error.strerror}") from None
    lines = data.split(b"\n")  # and not at form feeds and the like, as splitlines does
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


class _Streaming:
    """Write one completion as it comes."""

    def __init__(self, served: Served, text: str, prompt: Prompt):
        self._stream = TextStream(served.tokenizer, prompt.tokens)  # pyright: ignore[reportArgumentType]
        self._prompt, self._begun = text, False

    def _write(self, text: str) -> None:
        sys.stdout.write(text if self._begun else self._prompt + text)
        sys.stdout.flush()
        self._begun = True

    def on_token(self, place: int, token: int) -> None:
        self._write(self._stream.add(token))

    def on_done(self, place: int, completion: Completion) -> None:
        if completion.stopped != "refused":
            self._write(self._stream.end() + "\n")


class _InOrder:
    """Write whole completions, each under its prompt, once all before it are finished."""

    def __init__(self, served: Served, texts: list[str]):
        self._tokenizer, self._texts = served.tokenizer, texts
        self._done: dict[int, Completion] = {}
        self._next = 0

    def on_token(self, place: int, token: int) -> None:
        pass

    def on_done(self, place: int, completion: Completion) -> None:
        self._done[place] = completion
        while (completion := self._done.pop(self._next, None)) is not None:  # pyright: ignore[reportAssignmentType]
            if completion.stopped != "refused":
                stream = TextStream(self._tokenizer, completion.prompt.tokens)  # pyright: ignore[reportArgumentType]
                text = stream.all(completion.tokens)
                print(f"--- {completion.prompt.name}\n{self._texts[self._next]}{text}", flush=True)
            self._next += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve.

    Returns:
      0 when all prompts were answered, 1 when some were refused or the output was closed, 2 when nothing could start,
      130 on Ctrl-C.
    """
    words = _parse(arguments)
    return_large_blocks()
    terminal.accept_all_characters()
    try:
        return _serve(words)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return terminal.INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        terminal.close_output()
        return 1


def _serve(words: argparse.Namespace) -> int:
    try:
        if words.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {words.max_new_tokens} must be at least 1")
        check_devices()
        sampling = Sampling(words.temperature, words.top_p, words.seed)
        texts, names = _texts(words)
        with extras.needed():
            served = open_served(words.directory, _overrides(words))
        if words.kv_axis:
            if not served.config.quantize_kvcache:
                raise ValueError(
                    f"--kv-axis {words.kv_axis} belongs to a quantized cache; add --kv-cache int8, int4 or fp8"
                )
            served = dataclasses.replace(served, config=dataclasses.replace(served.config, kv_quant_axis=words.kv_axis))
        prompts = served.prompts(texts, names)
        engine = served.engine(
            sampling=sampling, max_length=words.max_length, slots=words.slots, prefill_chunk=words.prefill_chunk
        )
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    printer = _Streaming(served, texts[0], prompts[0]) if len(texts) == 1 else _InOrder(served, texts)
    completions = engine.generate(prompts, words.max_new_tokens, printer.on_token, printer.on_done)
    refused = [completion for completion in completions if completion.stopped == "refused"]
    for completion in refused:
        print(f"error: {completion.message}", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
