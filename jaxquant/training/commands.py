"""The commands for runs: compare, convert, evaluate, export, import and serve."""

from __future__ import annotations

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
from jaxquant.config.quant_config import NO_KV_QUANT
from jaxquant.export import Row
from jaxquant.training import conversion, exporting, importing, report, serving
from jaxquant.training.generate import Completion, Sampling
from jaxquant.training.processes import check_devices
from jaxquant.training.serving import Served, open_served
from jaxquant.training.tokenizer import TextStream

_M_MMAP_THRESHOLD = -3  # value in glibc's malloc.h


def compare(folders: Sequence[str], out: str) -> None:
    """Print a table that compares training runs, and write an HTML page with their curves, bytes and dtypes."""
    runs = report.load_runs(folders)
    rows = report.comparison_rows(runs)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(report.render(runs), encoding="utf-8")
    terminal.show_rows(rows, [*rows[0]][:3])
    for note in report.notes(runs):
        print(note)
    print(f"Report: {out}")


def convert(source: str, out: str, changes: Sequence[str], step: int | None) -> None:
    """Convert a training run to a quantized checkpoint for serving, layer by layer in bounded memory."""
    with _measure_cost() as cost:
        made = conversion.convert_run(
            source, out, parse_overrides(changes), step=step, say=lambda text: print(text, flush=True)
        )
    on_disk = sum(path.stat().st_size for path in Path(out).rglob("*") if path.is_file())
    sizes = [f"{count / 1e6:.2f} MB" for count in (made.bytes_bf16, made.bytes_quantized, on_disk)]
    print(
        f"{out}: step {made.step} of {source} in {made.config.quantization or 'rules'} on "
        f"{made.config.resolved_backend}, {len(made.layers)} kernels converted.\n"
        f"parameters {sizes[0]} in bfloat16, {sizes[1]} now; {sizes[2]} on disk.\n{cost()}."
    )


def evaluate(run: str, converted: Sequence[str], batches: int | None) -> None:
    """Compare a run in float, as trained and as served: held-out loss and next-token agreement in one table."""
    check_devices()
    rows = serving.evaluate(serving.open_contenders(run, converted), batches=batches)
    terminal.show_rows(rows, [*rows[0]][:3])


def export(source: str, out: str, format: str, step: int | None, dtype: str) -> None:
    """Export a run, or a converted checkpoint, to a folder or file that vLLM, SGLang, MAX or llama.cpp loads."""
    with _measure_cost() as cost, _show_rows("exporting") as progress:
        exporting.export_run(
            source,
            out,
            format,
            step=step,
            dtype=dtype,
            say=lambda text: print(text, file=sys.stderr, flush=True),
            progress=progress,
        )
    print(f"{out}: {format}, {cost()}.")


def import_(source: str, out: str, changes: Sequence[str], serve: bool) -> None:
    """Import a model from a Hugging Face folder or a GGUF file: as a run to train, or a checkpoint to serve."""
    run = importing.import_to_serve if serve else importing.import_to_run
    with _measure_cost() as cost, _show_rows("importing") as progress:
        config = run(source, out, parse_overrides(changes), progress)
    fields = f"dataset={config.dataset} quantization={config.quantization}; to change a field, import again with it"
    train = f"train {out}/config.yml run_dir={out}\n{fields}"
    print(f"{out}: {cost()}.")
    print(f"Next: jaxquant {f'serve {out} --prompt TEXT' if serve else train}")


def serve(
    texts: Sequence[str],
    file: str | None,
    *,
    directory: str,
    max_new_tokens: int,
    max_length: int,
    temperature: float,
    top_p: float,
    seed: int,
    kv_cache: str | None,
    kv_axis: str | None,
    slots: int,
    prefill_chunk: int,
) -> int:
    """Complete prompts with a trained model. One prompt is streamed; several are printed in order.

    Args:
      texts: prompts.
      file: file with one prompt per line, "-" for standard input; None if ``texts`` are the prompts.
      directory: folder of a run or of a converted checkpoint.
      max_new_tokens: maximum number of tokens to generate for each prompt.
      max_length: maximum number of tokens of prompt and completion; 0 selects the sequence length of the run.
      temperature, top_p, seed: parameters of ``Sampling``.
      kv_cache: dtype of the KV cache, "none" for float; None selects the dtype in the config.
      kv_axis: axes that share a scale of the KV cache; None selects the axes in the config.
      slots: number of prompts that run at the same time.
      prefill_chunk: number of tokens of a prompt that one step processes.

    Returns:
      0, or 1 if prompts are refused.
    """
    check_devices()
    return_large_blocks()
    sampling = Sampling(temperature, top_p, seed)
    prompted, names = _read_prompts(texts, file)
    cache = {"quantize_kvcache": True, "kv_quant_dtype": kv_cache} if kv_cache else {}
    served = open_served(directory, dict(NO_KV_QUANT) if kv_cache == "none" else cache)
    if kv_axis:
        if not served.config.quantize_kvcache:
            raise ValueError(f"--kv-axis {kv_axis} requires a quantized cache; add --kv-cache int8, int4 or fp8")
        served = dataclasses.replace(served, config=dataclasses.replace(served.config, kv_quant_axis=kv_axis))
    prompts = served.prompts(prompted, names)
    engine = served.engine(sampling=sampling, max_length=max_length, slots=slots, prefill_chunk=prefill_chunk)
    printer = Printer(served, prompted, [prompt.tokens for prompt in prompts])
    completions = engine.generate(prompts, max_new_tokens, printer.on_token, printer.on_done)
    refused = [completion for completion in completions if completion.stopped == "refused"]
    for completion in refused:
        print(f"error: {completion.message}", file=sys.stderr)
    return 1 if refused else 0


def _read_prompts(texts: Sequence[str], file: str | None) -> tuple[list[str], list[str]]:
    """Return the prompts, each with its name for messages."""
    if file is None:
        names = [f"prompt {number}" for number in range(1, len(texts) + 1)]
        return [_text(os.fsencode(text), name) for text, name in zip(texts, names, strict=True)], names
    name = "standard input" if file == "-" else file
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"--prompts-file {file} cannot be read: {error.strerror}") from None
    if not data:
        raise ValueError(f"{name} contains no prompt; write one prompt per line")
    lines = data.removesuffix(b"\n").split(b"\n")  # splitlines() would also split at form feeds
    names = [f"{name} line {number}" for number in range(1, len(lines) + 1)]
    return [_text(line.removesuffix(b"\r"), name) for line, name in zip(lines, names, strict=True)], names


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


class Printer:
    """Printer of completions: one completion token by token, several in the order of their prompts."""

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


@contextmanager
def _show_rows(verb: str) -> Iterator[Any]:
    """Yield a function to call with each row; print a table of all rows at the end.

    A terminal also shows the current tensor. In the table, tensors that differ only in their layer share one line, with
    their number, total bytes and lowest SQNR.
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
            "SQNR dB": _format_sqnr(min(row.sqnr for row in group)),
        }
        for (name, format, shape), group in merged.items()
    ]
    count = sum(row.shape != () for row in rows)  # the tokenizer is not a tensor
    total = dict.fromkeys(lines[0], "") | {"tensor": f"{count} tensors", "bytes": f"{sum(r.bytes for r in rows):,}"}
    terminal.show_rows([*lines, total], ["tensor", "format"])


def _format_sqnr(value: float) -> str:
    return "" if math.isnan(value) else "exact" if value == math.inf else f"{value:.1f}"  # NaN: the tokenizer


def return_large_blocks() -> None:
    """Make glibc return blocks above 1 MiB to the system as soon as they are freed.

    By default, glibc reuses freed blocks of up to 32 MiB, so a program that processes a model layer by layer would
    occupy several times the memory that it uses. Without glibc, the function does nothing.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


@contextmanager
def _measure_cost() -> Iterator[Callable[[], str]]:
    """Yield a function that describes the elapsed time and the peak memory. Also calls ``return_large_blocks``."""
    check_devices()
    began = time.perf_counter()
    return_large_blocks()
    unit = 1 if sys.platform == "darwin" else 1024
    peak = lambda: unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # noqa: E731
    yield lambda: f"{time.perf_counter() - began:.1f} s, peak memory {peak():.0f} MB"
