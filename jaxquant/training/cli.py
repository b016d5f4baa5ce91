"""The commands on finished runs: ``python -m train compare|convert|evaluate|export|import|serve``."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxquant import terminal
from jaxquant.config.loader import parse_overrides
from jaxquant.config.quant_config import KV_ELEMENTS, NO_KV_QUANT
from jaxquant.export import FORMATS, Row
from jaxquant.training import conversion, exporting, importing, needed, report, serving
from jaxquant.training.generate import Completion, Sampling
from jaxquant.training.processes import check_devices
from jaxquant.training.serving import Served, open_served
from jaxquant.training.tokenizer import TextStream

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def compare(words: argparse.Namespace) -> int:
    """Compare training runs: a table here, and one HTML page with curves, bytes and dtypes."""
    runs = report.load_runs(words.runs)
    rows = report.comparison_rows(runs)
    Path(words.out).parent.mkdir(parents=True, exist_ok=True)
    Path(words.out).write_text(report.render(runs), encoding="utf-8")
    terminal.show_rows(rows, [*rows[0]][:3])
    for note in report.notes(runs):
        print(note)
    print(f"Report: {words.out}")
    return 0


def convert(words: argparse.Namespace) -> int:
    """Convert a training run to a quantized checkpoint that serves, layer by layer in bounded memory."""
    with _timed() as cost:
        made = conversion.convert_run(
            words.source,
            words.out,
            parse_overrides(words.changes),
            step=words.step,
            say=lambda text: print(text, flush=True),
        )
    on_disk = sum(path.stat().st_size for path in Path(words.out).rglob("*") if path.is_file())
    sizes = [f"{count / 1e6:.2f} MB" for count in (made.bytes_bf16, made.bytes_quantized, on_disk)]
    print(
        f"{words.out}: step {made.step} of {words.source} in {made.config.quantization or 'rules'} on "
        f"{made.config.resolved_backend}, {len(made.layers)} kernels converted.\n"
        f"parameters {sizes[0]} in bfloat16, {sizes[1]} now; {sizes[2]} on disk.\n{cost()}."
    )
    return 0


def evaluate(words: argparse.Namespace) -> int:
    """Compare a run in float, as trained, and as served: held-out loss and next-token agreement in one table."""
    rows = serving.evaluate(serving.contenders(words.run, words.converted), batches=words.batches)
    terminal.show_rows(rows, [*rows[0]][:3])
    return 0


def export(words: argparse.Namespace) -> int:
    """Export a run, or a converted checkpoint, to a folder or file that vLLM, SGLang, MAX or llama.cpp loads."""
    with _timed() as cost, _shown("exporting") as progress:
        exporting.export_run(
            words.source,
            words.out,
            words.format,
            step=words.step,
            dtype=words.dtype,
            say=lambda text: print(text, file=sys.stderr, flush=True),
            progress=progress,
        )
    print(f"{words.out}: {words.format}, {cost()}.")
    return 0


def import_(words: argparse.Namespace) -> int:
    """Import a Llama from a Hugging Face folder or a GGUF file: into a run to train, or a checkpoint that serves."""
    run = importing.import_to_serve if words.serve else importing.import_to_run
    with _timed() as cost, _shown("importing") as progress:
        run(words.source, words.out, parse_overrides(words.changes), progress)
    print(f"{words.out}: {cost()}.")
    if not words.serve:
        print(f"train it with: python -m train {words.out}/config.yml run_dir={words.out}")
    return 0


def serve(words: argparse.Namespace) -> int:
    """Complete prompts with a trained model. One prompt streams; several come out in order, as they finish."""
    return_large_blocks()
    sampling = Sampling(words.temperature, words.top_p, words.seed)
    texts, names = _texts(words)
    cache = {"quantize_kvcache": True, "kv_quant_dtype": words.kv_cache} if words.kv_cache else {}
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
    if not data:
        raise ValueError(f"{name} holds no prompt; write one a line")
    lines = data.removesuffix(b"\n").split(b"\n")  # splitlines() would split at form feeds too
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
            stream, text = self._streams[self._next], self._texts[self._next]
            self._next += 1
            if found.stopped == "refused":
                continue
            if self._is_streaming:
                self._write(stream.end() + "\n")
            else:
                print(f"--- {found.prompt.name}\n{text}{stream.all(found.tokens)}", flush=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(self._texts[0] + text)
        sys.stdout.flush()
        self._texts[0] = ""


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"import": import_}
COMMANDS |= {each.__name__: each for each in (compare, convert, evaluate, export, serve)}
COUNTS = ("batches", "max_new_tokens")
"""Options that must be at least 1."""
READERS = {"compare": "interrupted", "evaluate": "interrupted", "serve": "\ninterrupted"}
"""What the commands that write no checkpoint print on Ctrl-C."""


@contextmanager
def _shown(verb: str) -> Iterator[Any]:
    """Return a function to call with each row; a terminal shows the tensor at hand, and the end is a table of all.

    Layers that are alike stand in one line, with their number, their bytes together and the worst SQNR.
    """
    rows: list[Row] = []
    with Console(stderr=True).status(verb) as status:
        yield lambda row: (rows.append(row), status.update(f"{verb} {row.tensor}"))
    merged: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        merged.setdefault((re.sub(r"\.\d+\.", ".*.", row.tensor), row.format, row.shape), []).append(row)
    lines = [
        {
            "tensor": f"{name} ({len(group)})" if len(group) > 1 else group[0].tensor,
            "format": format,
            "shape": " x ".join(map(str, shape)),
            "bytes": f"{sum(row.bytes for row in group):,}",
            "SQNR dB": "exact" if (worst := min(row.sqnr for row in group)) == math.inf else f"{worst:.1f}",
        }
        for (name, format, shape), group in merged.items()
    ]
    count = sum(row.shape != () for row in rows)  # the tokenizer is not one
    total = dict.fromkeys(lines[0], "") | {"tensor": f"{count} tensors", "bytes": f"{sum(r.bytes for r in rows):,}"}
    terminal.show_rows([*lines, total], ["tensor", "format"])


def return_large_blocks() -> None:
    """Make glibc return blocks above 1 MiB to the system as soon as they are freed.

    By default it learns to keep blocks of up to 32 MiB for later: a program that handles a model layer by layer would
    hold several times what it uses. Elsewhere this does nothing.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


@contextmanager
def _timed() -> Iterator[Callable[[], str]]:
    """Yield a function that describes the time since, and the peak memory; memory of layers is returned at once."""
    began = time.perf_counter()
    return_large_blocks()
    unit = 1 if sys.platform == "darwin" else 1024
    peak = lambda: unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # noqa: E731
    yield lambda: f"{time.perf_counter() - began:.1f} s, peak memory {peak():.0f} MB"


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m train {name}", description=COMMANDS[name].__doc__)
    add = parser.add_argument
    if name == "compare":
        add("runs", nargs="+", metavar="RUN", help="folder of a run, such as runs/quickstart-int8-native")
        add("--out", default="report.html", help="the page to write (default: %(default)s)")
    elif name == "evaluate":
        add("run", metavar="RUN", help="folder of a run, such as runs/demo/int8")
        add("converted", nargs="*", metavar="DIR", help="folders that `python -m train convert` wrote")
        add("--batches", type=int, metavar="N", help="held-out batches (default: eval_batches of the run)")
    elif name == "serve":
        add("directory", metavar="DIR", help="folder that `python -m train convert` wrote, or folder of a run")
        asked = parser.add_mutually_exclusive_group(required=True)
        asked.add_argument("--prompt", action="append", metavar="TEXT", help="text to complete; may be repeated")
        asked.add_argument("--prompts-file", metavar="FILE", help="one prompt a line; - is standard input")
        add("--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
        add("--max-length", type=int, default=0, metavar="N", help="tokens of a text (default: as in training)")
        add("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
        add("--top-p", type=float, default=1.0, help="share to draw from (default: %(default)s)")
        add("--seed", type=int, default=0, help="seed of the draws (default: %(default)s)")
        add("--kv-cache", choices=("none", *KV_ELEMENTS), help="dtype of the KV cache (default: as the run's config)")
        add("--kv-axis", choices=("dkv", "heads_and_dkv"), help="a scale for each head, or one for all heads")
        add("--slots", type=int, default=8, metavar="N", help="prompts at a time (default: %(default)s)")
        add("--prefill-chunk", type=int, default=64, metavar="N", help="(default: %(default)s)")
    else:
        sources = {"convert": "folder of a run", "export": "folder of a run, or a converted one"}
        add("source", metavar="SOURCE", help=sources.get(name, "Hugging Face folder, or GGUF file"))
        add("--out", required=True, metavar="PATH", help="folder or GGUF file to write; it must not exist")
    if name in ("convert", "export"):
        add("--step", type=int, metavar="N", help="step of the run's checkpoint (default: the newest)")
    if name == "export":
        add("--format", required=True, choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
        dtypes = ("bfloat16", "float16", "float32")
        add("--dtype", default="bfloat16", choices=dtypes, help="dtype of float tensors (default: %(default)s)")
    elif name == "import":
        about = "write a checkpoint that serves, with the same elements and scales if possible"
        add("--serve", action="store_true", help=about)
    if name in ("convert", "import"):
        about = "fields of the quantization, such as quantization=int8" if name == "convert" else "fields of the config"
        add("changes", nargs="*", metavar="key=value", help=about)
    return parser


def main(name: str, arguments: Sequence[str]) -> int:
    """Run a command.

    Returns:
      0 on success, 1 when prompts are refused or the output is closed, 2 when it cannot run, 130 on Ctrl-C.
    """
    words = _parser(name).parse_intermixed_args(arguments)

    def work() -> int:
        for option in COUNTS:
            value = getattr(words, option, None)
            if value is not None and value < 1:
                raise ValueError(f"--{option.replace('_', '-')} {value} must be at least 1")
        with needed():
            if name != "compare":
                check_devices()
            return COMMANDS[name](words)

    return terminal.run(work, interrupted=READERS.get(name, "interrupted; nothing was written"))
