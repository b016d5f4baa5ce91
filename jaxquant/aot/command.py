"""Implementation of the commands ``jaxquant audit`` and ``jaxquant coverage``.

An audit compiles the configured training step and the unquantized step, for a chip that need not be in this machine.
The command prints both reports side by side, and writes JSON and markdown. For several config strings, the unquantized
step is compiled once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.markdown import Markdown

from jaxquant import terminal
from jaxquant.aot import report
from jaxquant.aot.chips import CHIPS
from jaxquant.aot.compile import audit_program
from jaxquant.aot.invariance import CURES, VariantOperation, find_variant_operations
from jaxquant.aot.memory import largest_batch
from jaxquant.aot.plugin import load_program
from jaxquant.audit.coverage import coverage
from jaxquant.config.loader import load_yaml, parse_overrides
from jaxquant.config.quant_config import QuantConfig

CPU = "cpu"
"""Target that is this machine, for ``print_variant_operations``."""
TARGETS = (*CHIPS, CPU)

UNQUANTIZED = ("quantization=", "quant_backend=auto")


@dataclasses.dataclass(frozen=True)
class Request:
    """Options of an audit.

    Attributes:
      config: path of a YAML file.
      overrides: ``key=value`` arguments that replace fields of the file.
      target: name of the chip.
      topology: number of GPUs or TPU slice; "" for the smallest.
      out: folder for JSON and markdown; "" to write no files.
      step: function that builds the step, as ``MODULE:FUNCTION``.
    """

    config: str
    overrides: Sequence[str]
    target: str
    topology: str
    out: str
    step: str

    @property
    def label(self) -> str:
        return f"{self.target}-{self.topology}" if self.topology else self.target


def print_coverage(config: str, overrides: Sequence[str], step: str, check: bool, as_json: bool) -> int:
    """Print the coverage of a training step.

    Args:
      config: path of a YAML file.
      overrides: ``key=value`` arguments that replace fields of the file.
      step: function that builds the step, as ``MODULE:FUNCTION``.
      check: whether to check that every layer runs as its recipe defines.
      as_json: whether to print JSON.

    Returns:
      0 on success, 1 if the check finds a difference.
    """
    fields = load_yaml(config) | parse_overrides(overrides)
    known = {field.name for field in dataclasses.fields(QuantConfig)}
    quantization = QuantConfig.from_any({name: value for name, value in fields.items() if name in known})
    function, shapes = load_program(step)(config, overrides, jax.devices())
    found = coverage(function, *shapes, config=quantization)
    print(found.to_json() if as_json else found)
    try:
        if check:
            found.check()
            print("check passed", file=sys.stderr)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def print_audits(request: Request, strings: Sequence[str]) -> int:
    """Audit the configured step, or the step with each config string, and print every report.

    Returns:
      0 on success, 1 if an 8-bit matmul was compiled in a wider dtype, or a step does not fit the chip's memory.
    """
    return max(_print_audit(audit, request) for audit in _audits(request, strings))


def print_largest_batches(request: Request, strings: Sequence[str], unit: int) -> int:
    """Print the largest batch size with which each step fits the chip's memory; a multiple of ``unit``.

    Returns:
      0 on success, 1 if a step does not fit even with ``unit``.
    """
    return max([_print_largest(*step, request, unit) for step in _steps(request, strings)])


def print_variant_operations(request: Request, strings: Sequence[str], programs: Sequence[str]) -> int:
    """Print the operations of each program whose result for a row may depend on the batch, padding or chunks.

    Args:
      request: options of the audit; the target may be ``CPU``.
      strings: config strings; empty keeps the quantization of the config.
      programs: functions that build the programs, as ``MODULE:FUNCTION``, instead of the request's step.

    Returns:
      0 if the forward pass of every program is batch invariant, otherwise 1.
    """
    return max(
        _print_variant(dataclasses.replace(request, step=program, overrides=overrides), name)
        for name, overrides in _steps(request, strings)
        for program in programs
    )


def _print_variant(request: Request, name: str) -> int:
    title = f"{name} {request.step.rpartition(':')[2]}"
    operations = _variant_operations(request, title)
    shown = [
        {"kind": each.kind, "layer": each.layer, "types": each.types, "count": each.count, "use": CURES[each.kind]}
        for each in operations
        if each.is_forward
    ]
    verdict = (
        f"{len(shown)} kinds of operations may depend"
        if shown
        else "No operation of the forward pass was found that depends"
    )
    lines = [f"# {title} on {request.label}", "", f"{verdict} on the batch, on padding or on chunks.", ""]
    lines += [*(report.table(shown) if shown else ()), "", f"Backward pass: {len(operations) - len(shown)} kinds.", ""]
    data = json.dumps([dataclasses.asdict(each) for each in operations], indent=1) + "\n"
    print_and_write("\n".join(lines), data, request.out, f"invariant-{title.replace(' ', '-')}-{request.label}")
    return int(bool(shown))


def _variant_operations(request: Request, name: str) -> list[VariantOperation]:
    if request.target == CPU:
        jitted, shapes = load_program(request.step)(request.config, request.overrides, jax.devices("cpu")[:1])
        return find_variant_operations(jitted.lower(*shapes).compile())
    audit = _compile(request, request.overrides, name)
    if audit.refusal:
        raise ValueError(report.verdict(audit))
    return audit.variant_operations


def _audits(request: Request, strings: Sequence[str]) -> Iterator[report.Audit]:
    """Yield the audits of the quantized steps; the unquantized step is compiled once and comes first."""
    plain, is_compiled, stem = None, False, Path(request.config).stem
    for name, overrides in _steps(request, strings):
        audit = _compile(request, overrides, name)
        if audit.outcome.asked and not is_compiled:
            is_compiled = True
            try:
                plain = _compile(request, [*request.overrides, *UNQUANTIZED], f"{stem} unquantized")
            except (ValueError, TypeError, NotImplementedError) as error:
                print(f"the unquantized step does not compile, so there is no comparison: {error}", file=sys.stderr)
            else:
                yield plain
        audit.unquantized = plain if audit.outcome.asked else None
        yield audit


def _steps(request: Request, strings: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the name of each step to compile, and the ``key=value`` arguments that replace fields of the file."""
    stem = Path(request.config).stem
    given = [word.partition("=")[2] for word in request.overrides if word.startswith("quantization=")]
    steps = [(each, [*request.overrides, f"quantization={each}"]) for each in strings]
    return [
        (f"{stem} {string}".strip(), words) for string, words in steps or [("".join(given[-1:]), [*request.overrides])]
    ]


def _compile(request: Request, overrides: Sequence[str], name: str) -> report.Audit:
    if request.target == CPU:
        raise ValueError(f"--target {CPU} requires --invariant, because a CPU has no estimate; add it, or pass a chip")
    chips = {"target": request.target, "topology": request.topology}
    return audit_program(request.step, request.config, overrides, name=name, **chips)


def _print_largest(name: str, overrides: list[str], request: Request, unit: int) -> int:
    size, rows = largest_batch(lambda n: _compile(request, [*overrides, f"batch_size={n}"], name), unit)
    told = f"The largest batch_size that fits is {size}." if size else f"batch_size {unit} does not fit."
    sizes = ("arguments", "outputs", "temporaries", "peak", "capacity")
    shown = [row | {key: f"{row[key] / 1e9:,.2f} GB" if key in row else "–" for key in sizes} for row in rows]
    lines = [f"# {name} on {request.label}", "", told, "", *report.table(shown), ""]
    stem = f"batch-{name.replace(' ', '-')}-{request.label}"
    print_and_write("\n".join(lines), json.dumps(rows, indent=1) + "\n", request.out, stem)
    return 0 if size else 1


def _print_audit(audit: report.Audit, request: Request) -> int:
    stem = f"audit-{audit.name.replace(' ', '-')}-{request.label}"
    print_and_write(audit.to_markdown(), audit.to_json(), request.out, stem)
    return 0 if audit.fits and not audit.outcome.fell_back else 1


def print_and_write(text: str, data: str, folder: str, stem: str) -> int:
    """Print markdown; unless ``folder`` is "", also write the markdown and its data there. Returns 0."""
    Console(width=terminal.columns() or 160).print(Markdown(text))
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for suffix, content in ((".md", text), (".json", data)):
            path = Path(folder) / f"{stem}{suffix}"
            path.write_text(content, encoding="utf-8")
            print(path)
    return 0
