"""``python -m jaxquant.audit CONFIG.yml [key=value ...] --target h200``: what a chip's compiler makes of a step.

The chip need not be here. The training step is compiled as configured and with ``quantization=`` laid over it; both are
printed side by side, and written as JSON and markdown. ``--strings fp8 int8`` does so for several config strings, with
one compilation of the unquantized step. ``--yardstick`` measures one MLP step of jaxquant and its peers instead,
``--kernels`` the hand-written kernels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from jaxquant import terminal
from jaxquant.aot import report
from jaxquant.aot.anchors import MISSING
from jaxquant.aot.chips import CHIPS, chip
from jaxquant.aot.compile import audit_program
from jaxquant.aot.plugin import PROGRAM, find_trainer
from jaxquant.aot.schedules import gpu_dump, tpu_dump
from jaxquant.aot.topology import environment, require_compiler

UNQUANTIZED = ("quantization=", "quant_backend=auto")
NAME = "python -m jaxquant.audit"


def _parse(arguments: Sequence[str] | None, name: str = NAME) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="?", help="YAML file, such as configs/quickstart.yml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields laid over the file")
    parser.add_argument("--target", default="h200", choices=list(CHIPS), help="chip (default: %(default)s)")
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
    parser.add_argument("--strings", nargs="+", default=[], metavar="S", help="config strings to lay over the file")
    parser.add_argument("--yardstick", action="store_true", help="an MLP step of jaxquant and its peers")
    parser.add_argument("--anchors", action="store_true", help="published measurements beside what the audit predicts")
    parser.add_argument("--kernels", action="store_true", help="cycles or registers of the hand-written kernels")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="with --yardstick: entries named so")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="with --yardstick (default: %(default)s)")
    options = parser.parse_intermixed_args(arguments)
    if bool(options.config) + options.yardstick + options.anchors + options.kernels != 1:
        parser.error("give a CONFIG.yml, --yardstick, --anchors or --kernels, one of them")
    return options


def main(arguments: Sequence[str] | None = None, name: str = NAME) -> int:
    """Run the command.

    Args:
      arguments: the command line; None is that of the process.
      name: what was called, for its usage.

    Returns:
      0 on success, 1 where 8-bit matmuls fell back or the step does not fit, 2 where it could not be audited.
    """
    options = _parse(arguments, name)
    terminal.accept_all_characters()
    try:
        if options.anchors:
            return _print_anchors(options)
        if options.kernels:
            return _print_kernels(options)
        if options.yardstick:
            require_compiler(chip(options.target))
            command = [sys.executable, "-m", "jaxquant.aot.yardstick", options.target, str(options.tokens)]
            done = subprocess.run([*command, *options.only], env=environment(), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the yardstick failed:\n{done.stderr[-4000:]}")
            rows, notes = json.loads(done.stdout)
            tokens = "" if options.tokens == 4096 else f"-{options.tokens}"
            title = f"# One MLP step on {options.target}, {options.tokens} tokens"
            text = "\n".join([title, "", *report.table(rows), notes])
            stem = f"audit-yardstick-{options.target}{tokens}"
            return _print_and_write(text, json.dumps(rows, indent=1) + "\n", options.out, stem)
        return max(_print_audit(found, options) for found in audits(options))  # every one is printed
    except (ValueError, TypeError, NotImplementedError, OSError, ModuleNotFoundError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _print_anchors(options: argparse.Namespace) -> int:
    require_compiler(chip("h200"))
    find_trainer()
    command = [sys.executable, "-m", "jaxquant.aot.anchors", *options.only]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the anchors failed:\n{done.stderr[-4000:]}")
    rows = json.loads(done.stdout)
    missing = [{"anchor": who, "published": ratio, "not compiled here": what} for who, ratio, what in MISSING]
    text = "\n".join(["# Predicted and published ratios", "", *report.table(rows), "", *report.table(missing)])
    return _print_and_write(text + "\n", json.dumps(rows, indent=1) + "\n", options.out, "audit-anchors")


def _print_kernels(options: argparse.Namespace) -> int:
    target = chip(options.target)
    require_compiler(target)
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        dump = gpu_dump(notes) if target.platform == "cuda" else tpu_dump(notes)
        command = [sys.executable, "-m", "jaxquant.aot.kernel_table", options.target, str(notes)]
        done = subprocess.run(command, env=environment() | dump, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the kernels failed:\n{done.stderr[-4000:]}")
    rows = json.loads(done.stdout.splitlines()[-1])
    text = "\n".join([f"# Kernels as compiled for {options.target}", "", *report.table(rows)]) + "\n"
    return _print_and_write(text, json.dumps(rows, indent=1) + "\n", options.out, f"kernels-{options.target}")


def audits(options: argparse.Namespace) -> Iterator[report.Audit]:
    """Audit the steps of a command line, quantized ones beside the unquantized one, which is compiled once.

    Args:
      options: the parsed command line.
    """

    def compiled(overrides: Sequence[str], name: str) -> report.Audit:
        where = {"target": options.target, "topology": options.topology}
        return audit_program(options.program, options.config, overrides, name=name, **where)

    stem = Path(options.config).stem
    given = [word.partition("=")[2] for word in options.overrides if word.startswith("quantization=")]
    steps = [(each, [*options.overrides, f"quantization={each}"]) for each in options.strings]
    plain, is_asked = None, False
    for string, overrides in steps or [("".join(given[-1:]), options.overrides)]:
        found = compiled(overrides, f"{stem} {string}".strip())
        if found.outcome.asked and not is_asked:
            is_asked = True
            try:
                plain = compiled([*options.overrides, *UNQUANTIZED], f"{stem} unquantized")
            except (ValueError, TypeError, NotImplementedError) as error:
                print(f"no unquantized step to compare with: {error}", file=sys.stderr)
            else:
                yield plain
        found.unquantized = plain if found.outcome.asked else None
        yield found


def _print_audit(found: report.Audit, options: argparse.Namespace) -> int:
    stem = f"audit-{found.name.replace(' ', '-')}-{options.target}{f'-{options.topology}' if options.topology else ''}"
    _print_and_write(found.to_markdown(), found.to_json(), options.out, stem)
    return 0 if found.fits and not found.outcome.fell_back else 1


def _print_and_write(text: str, data: str, folder: str, stem: str) -> int:
    Console(width=terminal.columns() or 160).print(Markdown(text))
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for suffix, content in ((".md", text), (".json", data)):
            path = Path(folder) / f"{stem}{suffix}"
            path.write_text(content, encoding="utf-8")
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
