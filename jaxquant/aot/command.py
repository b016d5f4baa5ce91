"""``python -m jaxquant audit CONFIG.yml [key=value ...] --target h200``: what a chip's compiler makes of a step.

The chip need not be here. The training step is compiled as configured and with ``quantization=`` laid over it; both are
printed side by side, and written as JSON and markdown. ``--strings fp8 int8`` does so for several config strings, with
one compilation of the unquantized step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from jaxquant import terminal
from jaxquant.aot import report
from jaxquant.aot.chips import CHIPS
from jaxquant.aot.compile import audit_program
from jaxquant.aot.memory import largest_batch
from jaxquant.aot.plugin import add_program

UNQUANTIZED = ("quantization=", "quant_backend=auto")
NAME = "python -m jaxquant audit"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=NAME, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", help="YAML file, such as configs/quickstart.yml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields laid over the file")
    parser.add_argument("--target", default="h200", choices=list(CHIPS), help="chip (default: %(default)s)")
    parser.add_argument(
        "--topology", default="", help="number of GPUs, as 64, or TPU slice, as 8x8 (default: smallest)"
    )
    parser.add_argument("--out", default="", help="folder to write JSON and markdown to (default: none)")
    add_program(parser)
    parser.add_argument(
        "--largest-batch",
        type=int,
        metavar="N",
        help="find the largest batch_size, a multiple of N, that fits, by compiling a few (default: do not)",
    )
    parser.add_argument("--strings", nargs="+", default=[], metavar="S", help="config strings to lay over the file")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
      arguments: words after ``audit``.

    Returns:
      0 on success, 1 where 8-bit matmuls fell back or the step does not fit, 2 where it could not be audited.
    """
    options = _parse(arguments)

    def run() -> int:
        if options.largest_batch is not None:
            return max([_print_largest(*step, options) for step in _steps(options)])
        return max(_print_audit(found, options) for found in audits(options))  # every one is printed

    return terminal.run(run, also=(ModuleNotFoundError, RuntimeError), interrupted="interrupted")


def audits(options: argparse.Namespace) -> Iterator[report.Audit]:
    """Audit the steps of a command line, quantized ones beside the unquantized one, which is compiled once.

    Args:
      options: the parsed command line.
    """

    plain, is_asked, stem = None, False, Path(options.config).stem
    for name, overrides in _steps(options):
        found = _compiled(options, overrides, name)
        if found.outcome.asked and not is_asked:
            is_asked = True
            try:
                plain = _compiled(options, [*options.overrides, *UNQUANTIZED], f"{stem} unquantized")
            except (ValueError, TypeError, NotImplementedError) as error:
                print(f"no unquantized step to compare with: {error}", file=sys.stderr)
            else:
                yield plain
        found.unquantized = plain if found.outcome.asked else None
        yield found


def _steps(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return the name of each step to compile, and the words to lay over the file."""
    stem = Path(options.config).stem
    given = [word.partition("=")[2] for word in options.overrides if word.startswith("quantization=")]
    steps = [(each, [*options.overrides, f"quantization={each}"]) for each in options.strings]
    return [
        (f"{stem} {string}".strip(), words) for string, words in steps or [("".join(given[-1:]), options.overrides)]
    ]


def _compiled(options: argparse.Namespace, overrides: Sequence[str], name: str) -> report.Audit:
    where = {"target": options.target, "topology": options.topology}
    return audit_program(options.program, options.config, overrides, name=name, **where)


def _print_largest(name: str, overrides: list[str], options: argparse.Namespace) -> int:
    unit, slice_ = options.largest_batch, f"-{options.topology}" if options.topology else ""
    if unit < 1:
        raise ValueError(f"--largest-batch {unit} must be 1 or more")
    size, rows = largest_batch(lambda n: _compiled(options, [*overrides, f"batch_size={n}"], name), unit)
    told = f"The largest batch_size that fits is {size}." if size else f"batch_size {unit} does not fit."
    sizes = ("arguments", "outputs", "temporaries", "peak", "capacity")
    shown = [row | {key: f"{row[key] / 1e9:,.2f} GB" if key in row else "–" for key in sizes} for row in rows]
    lines = [f"# {name} on {options.target}{slice_}", "", told, "", *report.table(shown), ""]
    stem = f"batch-{name.replace(' ', '-')}-{options.target}{slice_}"
    print_and_write("\n".join(lines), json.dumps(rows, indent=1) + "\n", options.out, stem)
    return 0 if size else 1


def _print_audit(found: report.Audit, options: argparse.Namespace) -> int:
    stem = f"audit-{found.name.replace(' ', '-')}-{options.target}{f'-{options.topology}' if options.topology else ''}"
    print_and_write(found.to_markdown(), found.to_json(), options.out, stem)
    return 0 if found.fits and not found.outcome.fell_back else 1


def print_and_write(text: str, data: str, folder: str, stem: str) -> int:
    """Print markdown, and write it and its data to a folder, "" for none; returns 0."""
    Console(width=terminal.columns() or 160).print(Markdown(text))
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for suffix, content in ((".md", text), (".json", data)):
            path = Path(folder) / f"{stem}{suffix}"
            path.write_text(content, encoding="utf-8")
            print(path)
    return 0
