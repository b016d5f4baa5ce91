"""``python -m jaxquant.audit CONFIG.yml [key=value ...] --target h200``: what a chip's compiler makes of a step.

The chip need not be here. The training step is compiled twice, as configured and with ``quantization=`` laid over it
(or that one's JSON of an earlier call is read, ``--unquantized FILE``); both are printed, and written as JSON and
markdown.
``--yardstick`` measures one MLP step of jaxquant and its peers instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from jaxquant.audit import report
from jaxquant.audit.absent import audit_program
from jaxquant.audit.chips import CHIPS, chip
from jaxquant.audit.topology import environment, require_compiler

PROGRAM = "train.audit:program"
UNQUANTIZED = ("quantization=", "quant_backend=auto")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxquant.audit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="?", help="YAML file, such as configs/quickstart.yml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields laid over the file")
    parser.add_argument("--target", required=True, choices=list(CHIPS), help="chip")
    parser.add_argument(
        "--topology", default="", help="number of GPUs, as 64, or TPU slice, as 8x8 (default: smallest)"
    )
    parser.add_argument("--out", default="", help="folder to write JSON and markdown to (default: none)")
    parser.add_argument(
        "--program",
        default=PROGRAM,
        metavar="MODULE:FUNCTION",
        help="builds the step: FUNCTION(config, overrides, devices) -> (jitted step, shapes) (default: %(default)s)",
    )
    parser.add_argument(
        "--unquantized", default="", metavar="FILE", help="JSON of the unquantized step, written by an earlier call"
    )
    parser.add_argument("--yardstick", action="store_true", help="an MLP step of jaxquant and its peers")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="with --yardstick: entries named so")
    words = parser.parse_intermixed_args(arguments)
    if bool(words.config) == words.yardstick:
        parser.error("give a CONFIG.yml or --yardstick, one of them")
    return words


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit; 0 on success, 1 where 8-bit matmuls fell back or the step does not fit, 2 when it could not be audited."""
    words = _parse(arguments)
    try:
        if words.yardstick:
            require_compiler(chip(words.target))
            command = [sys.executable, "-m", "jaxquant.audit.yardstick", words.target, *words.only]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the yardstick failed:\n{done.stderr[-4000:]}")
            rows = json.loads(done.stdout)
            text = "\n".join([f"# One MLP step on {words.target}", "", *report.table(rows)]) + "\n"
            return _finish(text, json.dumps(rows, indent=1) + "\n", words.out, f"audit-yardstick-{words.target}")
        found = audit_words(words)
    except (ValueError, TypeError, NotImplementedError, OSError, ModuleNotFoundError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stem = f"audit-{found.name.replace(' ', '-')}-{words.target}{f'-{words.topology}' if words.topology else ''}"
    _finish(found.to_markdown(), found.to_json(), words.out, stem)
    return 0 if found.fits and not found.fate.fell_back else 1


def audit_words(words: argparse.Namespace) -> report.Audit:
    """Audit the step of a command line, and its unquantized twin."""
    where = {"target": words.target, "topology": words.topology}
    strings = [word.partition("=")[2] for word in words.overrides if word.startswith("quantization=")]
    name = " ".join(filter(None, (Path(words.config).stem, *strings[-1:])))
    found = audit_program(words.program, words.config, words.overrides, name=name, **where)
    if words.unquantized:
        found.unquantized = _read(words.unquantized, found)
    elif found.fate.asked:
        plain = [*words.overrides, *UNQUANTIZED]
        found.unquantized = audit_program(words.program, words.config, plain, name=f"{name} unquantized", **where)
    return found


def _read(path: str, beside: report.Audit) -> report.Audit:
    """Read an earlier report that is to stand beside another."""
    found = report.from_json(json.loads(Path(path).read_text()))
    ours, theirs = ((each.target, each.topology, each.devices) for each in (beside, found))
    if ours != theirs or found.fate.asked:
        raise ValueError(
            f"--unquantized {path!r} is a step of {theirs} with {sum(found.fate.asked.values())} quantized matmuls; "
            f"give an unquantized one of {ours}"
        )
    return found


def _finish(text: str, data: str, folder: str, stem: str) -> int:
    Console(width=None if sys.stdout.isatty() else 160).print(Markdown(text))
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for suffix, content in ((".md", text), (".json", data)):
            path = Path(folder) / f"{stem}{suffix}"
            path.write_text(content)
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
