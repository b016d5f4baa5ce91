"""The commands on finished runs: ``python -m train compare|convert|evaluate|export|import|serve``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxquant import terminal
from jaxquant.config.loader import parse_overrides
from jaxquant.config.quant_config import KV_ELEMENTS
from jaxquant.export import FORMATS, SHARD_BYTES
from train import completing, conversion, exporting, extras, importing, report, serving, transfer_report
from train.memory import peak_resident_bytes, return_large_blocks
from train.processes import check_devices


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
            calibration_batches=words.calibration_batches,
            say=lambda text: print(text, flush=True),
        )
    on_disk = sum(path.stat().st_size for path in Path(words.out).rglob("*") if path.is_file())
    sizes = [f"{count / 1e6:.2f} MB" for count in (made.bytes_f32, made.bytes_bf16, made.bytes_quantized, on_disk)]
    print(
        f"{words.out}: step {made.step} of {words.source} in {made.config.quantization or 'rules'} on "
        f"{made.config.resolved_backend}, {len(made.layers)} kernels converted.\n"
        f"parameters {sizes[0]} in float32, {sizes[1]} in bfloat16, {sizes[2]} now; {sizes[3]} on disk.\n{cost()}."
    )
    return 0


def evaluate(words: argparse.Namespace) -> int:
    """Compare a run in float, as trained, and as served: held-out loss and next-token agreement in one table."""
    rows = serving.evaluate(serving.contenders(words.run, words.converted), batches=words.batches)
    if words.out:
        Path(words.out).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    terminal.show_rows(rows, [*rows[0]][:3])
    return 0


def export(words: argparse.Namespace) -> int:
    """Export a run, or a converted checkpoint, to a folder or file that vLLM, SGLang, MAX or llama.cpp loads."""
    with _timed() as cost, transfer_report.shown("exporting") as progress:
        exporting.export_run(
            words.source,
            words.out,
            words.format,
            step=words.step,
            dtype=words.dtype,
            shard_bytes=words.shard_mb * 10**6,
            calibration_batches=words.calibration_batches,
            say=lambda text: print(text, file=sys.stderr, flush=True),
            progress=progress,
        )
    print(f"{words.out}: {words.format}, {cost()}.")
    return 0


def import_(words: argparse.Namespace) -> int:
    """Import a Llama from a Hugging Face folder or a GGUF file: into a run to train, or a checkpoint that serves."""
    run = importing.import_to_serve if words.serve else importing.import_to_run
    with _timed() as cost, transfer_report.shown("importing") as progress:
        run(words.source, words.out, parse_overrides(words.changes), progress)
    print(f"{words.out}: {cost()}.")
    if not words.serve:
        print(f"train it with: python -m train {words.out}/config.yml run_dir={words.out}")
    return 0


def serve(words: argparse.Namespace) -> int:
    """Complete prompts with a trained model. One prompt streams; several come out in order, as they finish."""
    return completing.complete(words)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "compare": compare,
    "convert": convert,
    "evaluate": evaluate,
    "export": export,
    "import": import_,
    "serve": serve,
}
COUNTS = ("batches", "calibration_batches", "max_new_tokens", "shard_mb")
"""Options that must be at least 1."""
READERS = {"compare": "interrupted", "evaluate": "interrupted", "serve": "\ninterrupted"}
"""What the commands that write no checkpoint print on Ctrl-C."""


@contextmanager
def _timed() -> Iterator[Callable[[], str]]:
    """Yield a function that describes the time since, and the peak memory; memory of layers is returned at once."""
    began = time.perf_counter()
    return_large_blocks()
    yield lambda: f"{time.perf_counter() - began:.1f} s, peak memory {peak_resident_bytes() / 1e6:.0f} MB"


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
        add("--out", metavar="FILE", help="write the rows as JSON, too")
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
        about = "held-out batches that give static scales, where they are needed (default: %(default)s)"
        add("--calibration-batches", type=int, default=conversion.CALIBRATION_BATCHES, metavar="N", help=about)
    if name == "export":
        add("--format", required=True, choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
        dtypes = ("bfloat16", "float16", "float32")
        add("--dtype", default="bfloat16", choices=dtypes, help="dtype of float tensors (default: %(default)s)")
        add("--shard-mb", type=int, default=SHARD_BYTES // 10**6, metavar="N", help="(default: %(default)s)")
    elif name == "import":
        add(
            "--serve",
            action="store_true",
            help="write a checkpoint that serves, with the same elements and scales if possible",
        )
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
        with extras.needed():
            if name != "compare":
                check_devices()
            return COMMANDS[name](words)

    return terminal.run(work, interrupted=READERS.get(name, "interrupted; nothing was written"))
