"""Result of an audit, with its text as tables and as JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxquant.aot.chips import chip
from jaxquant.aot.invariance import VariantOperation
from jaxquant.aot.outcome import Outcome, locate
from jaxquant.aot.price import KERNEL_SHARE, Roofline
from jaxquant.aot.program import HloStep

Row = dict[str, Any]


ASSUMPTIONS = {
    "cuda": (
        "Every matmul runs at the chip's dense peak rate for its operands (the slower one if they differ) times the "
        "achieved share, or at its memory's speed if that takes longer.",
        "Everything else runs one after another at the memory's bandwidth times its share: operands and results, no "
        "cache.",
        "float32 matmuls run as TF32 at default precision.",
    ),
    "tpu": (
        "Every instruction takes the cycles that the compiler estimates; operands in VMEM cost no traffic.",
        f"Attention kernels run at {KERNEL_SHARE:.0%} of the peak rate: their cycles are unknown.",
        "The whole step takes at least the time of all memory traffic at full bandwidth.",
    ),
}
COMMON_ASSUMPTIONS = (
    "Communication runs at the rate of the links in one direction, an all-reduce in two rounds, and overlaps with the "
    "rest: the step takes the longer of the two.",
    "A causal attention kernel does half of the work; splash attention is assumed to be causal.",
)


@dataclasses.dataclass(repr=False)
class Audit:
    """Report on a step that was compiled for a chip. Counts, bytes and times are for one step on one device.

    If the compiler refuses the step, figures are None, tables and memory are empty, and the outcome has only the
    requested matmuls.

    Attributes:
      target: name of the chip.
      topology: requested number of GPUs or TPU slice.
      devices: number of devices of the program.
      fits: whether the step fits the device's memory.
      refusal: the compiler's message if the step does not compile, otherwise "".
      memory: bytes of arguments, outputs (without those that share memory with arguments), temporaries, peak, capacity.
      matmuls: one row per matmul: layer, pass, dtypes, operands, times, flops.
      counts: number of matmuls of a step by operand dtypes.
      outcome: comparison of the 8-bit matmuls.
      moved: bytes of all moves; see ``program.read_program``.
      big_moves: number of moves over 1 MB.
      moves: number of moves.
      largest_moves: the ten moves with the most bytes in a step.
      collectives: one row per kind and dtype: times, bytes.
      roofline: estimated time of the step, from ``price.estimate``.
      kernels: one row per custom call that multiplies: name, times, flops.
      choices: one row for each part of a quantized op: the selected implementation and the reason.
      unknown: names of custom calls with an unknown number of operations, counted as moves.
      parts: one row per part and dtype of the arguments: bytes, and bytes a parameter if there are parameters.
      variant_operations: operations whose result for a row may depend on the batch; see ``find_variant_operations``.
      unquantized: audit of the same step without quantization, if there is one.
    """

    name: str
    target: str
    topology: str
    devices: int
    fits: bool
    refusal: str
    memory: dict[str, int]
    outcome: Outcome
    compile_seconds: float
    versions: dict[str, str]
    unquantized: Audit | None = None
    matmuls: list[Row] = dataclasses.field(default_factory=list)
    counts: dict[str, int] | None = None
    moved: int | None = None
    big_moves: int | None = None
    moves: int | None = None
    largest_moves: list[Row] = dataclasses.field(default_factory=list)
    collectives: list[Row] = dataclasses.field(default_factory=list)
    roofline: Roofline | None = None
    kernels: list[Row] = dataclasses.field(default_factory=list)
    choices: list[Row] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    parts: list[Row] = dataclasses.field(default_factory=list)
    variant_operations: list[VariantOperation] = dataclasses.field(default_factory=list)

    def to_json(self) -> str:
        """Return the audit and the audit of the unquantized step as JSON, which ``core.typed.build`` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def __str__(self) -> str:
        return self.to_markdown()

    def __repr__(self) -> str:
        return f"<Audit: {self.name} on {self.devices} × {self.target}; {verdict(self)}>"

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def to_markdown(self) -> str:
        """Return the verdict and the tables as a page of markdown."""
        return "\n".join(_markdown(self)) + "\n"


def figures(program: HloStep) -> Row:
    """Return the fields of an ``Audit`` that describe a compiled program."""
    return {
        "matmuls": _matmul_rows(program),
        "counts": program.count(),
        "moved": program.moved,
        "big_moves": program.big_moves,
        "moves": sum(move.times for move in program.moves),
        "largest_moves": _largest_moves(program),
        "collectives": _collective_rows(program),
        "kernels": _kernel_rows(program),
        "unknown": program.unknown,
    }


def _matmul_rows(program: HloStep) -> list[Row]:
    """Return a row for each matmul, with its layer and pass."""
    rows: list[Row] = []
    for matmul in program.matmuls:
        name, phase = locate(matmul.path)
        row = {"layer": name, "pass": phase, "dtypes": matmul.dtypes}
        row |= {"operands": f"{matmul.lhs} {matmul.rhs} → {matmul.out}", "times": matmul.times}
        rows.append(row | {"flops": matmul.flops, "kind": matmul.kind})
    return rows


def _totals(runs: Iterable[tuple[Any, int, int]]) -> Iterator[tuple[Any, int, int]]:
    """Add up runs (key, times, size of one run): return (key, times, total size) for each key."""
    times, sizes = collections.Counter[Any](), collections.Counter[Any]()
    for key, n, size in runs:
        times[key] += n
        sizes[key] += n * size
    return ((key, times[key], sizes[key]) for key in times)


def _kernel_rows(program: HloStep) -> list[Row]:
    """Return a row for each kind of custom call that multiplies, with totals."""
    found = _totals((each.name, each.times, each.flops) for each in program.kernels)
    return [{"kernel": name, "times": n, "TFLOP": round(flops / 1e12, 3)} for name, n, flops in found]


def memory_rows(audit: Audit) -> list[Row]:
    """Return the memory of a device: arguments by part and dtype, their padding, and temporaries."""
    rows = [dict(row) for row in audit.parts]
    known = next((row for row in audit.parts if row.get("bytes a parameter")), None)
    if audit.memory:
        more = {
            "padding of arguments": audit.memory["arguments"] - sum(row["bytes"] for row in rows),
            "outputs in separate memory": audit.memory["outputs"],
            "temporaries: gradients, activations": audit.memory["temporaries"],
        }
        rows += [{"part": part, "dtype": "", "bytes": size} for part, size in more.items()]
    if known:
        for row in rows:
            row["bytes a parameter"] = f"{row['bytes'] * known['bytes a parameter'] / known['bytes']:.3f}"
    return [row | {"bytes": _gb(row["bytes"])} for row in rows]


def _collective_rows(program: HloStep) -> list[Row]:
    """Return a row for each kind and dtype of collectives, with totals."""
    found = _totals(((each.kind, each.dtype), each.times, each.bytes) for each in program.collectives)
    rows = ({"kind": kind, "dtype": dtype, "times": n, "bytes": size} for (kind, dtype), n, size in found)
    return sorted(rows, key=lambda row: -row["bytes"])


def _largest_moves(program: HloStep) -> list[Row]:
    """Return the ten instructions that move the most bytes in a step."""
    moves = sorted(program.moves, key=lambda move: -move.bytes * move.times)[:10]
    return [{"kind": m.kind, "times": m.times, "bytes": m.bytes, "types": m.types, "path": m.path} for m in moves]


def layer_rows(audit: Audit) -> list[Row]:
    """Return a row for each layer: the dtypes of its matmuls, by pass."""
    found = collections.defaultdict[str, Any](lambda: collections.defaultdict(collections.Counter))
    for row in audit.matmuls:
        found[row["layer"]][row["pass"]][row["dtypes"]] += 1
    for path, host in {tuple(each.split(" → ")) for each in audit.outcome.merged}:
        name, phase = locate(path)
        found[name][phase][f"in {host}"] += 1
    phases = ("forward", "recomputed", "backward")
    return [
        {"layer": name} | {phase: _counted(passes[phase]) for phase in phases} for name, passes in sorted(found.items())
    ]


def _counted(counts: Any) -> str:
    return ", ".join(f"{n} {what}" if n > 1 else what for what, n in sorted(counts.items())) or "–"


def _line(cells: Any) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def table(rows: list[Row]) -> list[str]:
    """Return rows as the lines of a markdown table."""
    return (
        [_line(rows[0]), _line(["---"] * len(rows[0])), *(_line(row.values()) for row in rows)] if rows else ["(none)"]
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


_FIGURES: dict[str, Callable[[Any], str]] = {
    "matmuls": lambda audit: _counted(audit.counts),
    "moved outside matmuls": lambda audit: _gb(audit.moved),
    "moves, over 1 MB": lambda audit: f"{audit.moves}, {audit.big_moves}",
    "communicated": lambda audit: _gb(sum(row["bytes"] for row in audit.collectives)),
    "peak memory": lambda audit: memory_text(audit),
    "estimate: matmuls and kernels": lambda audit: _ms(audit.roofline.matmul),
    "estimate: moves": lambda audit: _ms(audit.roofline.moves),
    "estimate: communication": lambda audit: _ms(audit.roofline.communication),
    "estimate: step": lambda audit: _ms(audit.roofline.step),
    "compiled in": lambda audit: f"{audit.compile_seconds:.0f} s",
}
_FIGURES_OF_REFUSED = ("peak memory", "compiled in")


def summary_rows(audit: Audit) -> list[Row]:
    """Return the figures of an audit and of the unquantized step; "–" for unknown figures of a refused step."""
    columns = {"quantized": audit, "unquantized": audit.unquantized} if audit.unquantized else {"step": audit}

    def cell(each: Audit, name: str) -> str:
        return _FIGURES[name](each) if not each.refusal or name in _FIGURES_OF_REFUSED else "–"

    return [{"": name} | {column: cell(each, name) for column, each in columns.items()} for name in _FIGURES]


def memory_text(audit: Audit) -> str:
    """Return the peak memory of a step and the capacity of the device, as text."""
    if audit.refusal:
        return "does not fit"
    fits = "fits" if audit.fits else "DOES NOT FIT"
    return f"{_gb(audit.memory['peak'])} of {_gb(audit.memory['capacity'])}: {fits}"


def verdict(audit: Audit) -> str:
    """Return a sentence on whether the requested 8-bit matmuls run in 8 bits."""
    if audit.refusal:
        return f"The compiler for {audit.target} refuses this step: {audit.refusal}"
    total = sum(audit.outcome.asked.values())
    if not total:
        return "No matmul was requested in 8 bits."
    if audit.outcome.fell_back:
        return (
            f"FELL BACK: {len(audit.outcome.fell_back)} of {total} matmuls requested in 8 bits do not run in 8 bits: "
            + "; ".join(audit.outcome.fell_back)
        )
    removed, merged = len(audit.outcome.removed), len(audit.outcome.merged)
    share = f"{total - removed} of {total}" if removed else f"All {total}"
    ends = [f"{merged} inside another matmul"] if merged else []
    ends += [f"{removed} unused and removed"] if removed else []
    return f"{share} matmuls requested in 8 bits run in 8 bits{': ' if ends else ''}{', '.join(ends)}."


def speedup(audit: Audit) -> str:
    """Return a sentence that compares the step with the unquantized step, or "" if a figure is missing."""
    plain: Any = audit.unquantized
    if not plain or audit.refusal or plain.refusal:
        return ""
    this: Any = audit
    return (
        f"Estimate: {plain.roofline.step / this.roofline.step:.2f}× the speed of the unquantized step. Quantization "
        f"moves {(this.moved - plain.moved) / 1e9:+,.2f} GB outside the matmuls, in "
        f"{this.big_moves - plain.big_moves:+} instructions over 1 MB."
    )


def assumptions(target: str) -> list[str]:
    """Return the assumptions of the estimate, with the chip's figures."""
    described = chip(target)
    rates = ", ".join(f"{name} {rate / 1e12:,.0f}" for name, rate in described.peak.items())
    memory = f"memory {described.bandwidth / 1e12:.2f} TB/s, {described.memory / 1e9:.0f} GB"
    links = f"links {described.link / 2e9:.0f} GB/s one way"
    if described.domain:
        links += f" among {described.domain} chips, {described.network / 1e9:.0f} GB/s beyond"
    lines = [f"{target}, per chip: peak TFLOP/s {rates}; {memory}; {links}."]
    if described.shares:
        lines.append(f"Shares achieved: {', '.join(f'{n} {s:.1%}' for n, s in described.shares.items())}.")
    if described.clock:
        lines.append(f"The clock is {described.clock / 1e9:.2f} GHz.")
    if described.devices > 1:
        lines.append(f"A device is one of {described.devices} on a chip and has its share of these.")
    return [*lines, *ASSUMPTIONS[described.platform], *COMMON_ASSUMPTIONS]


def _markdown(audit: Audit) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in audit.versions.items())
    lines = [f"# {audit.name} on {audit.devices} × {audit.target}", "", verdict(audit), speedup(audit), ""]
    lines += [f"Compiled without the chip; one step, per device. {versions}.", "", *table(summary_rows(audit)), ""]
    if audit.parts:
        lines += ["## Memory", "", *table(memory_rows(audit)), ""]
    if audit.refusal:
        return lines
    if audit.unknown:
        lines += [f"Custom calls with unknown work, counted as moves: {', '.join(audit.unknown)}.", ""]
    lines += ["## Matmuls by layer", "", *table(layer_rows(audit)), ""]
    if audit.kernels:
        lines += ["## Kernels", "", *table(audit.kernels), ""]
    if audit.choices:
        lines += ["## Implementations", "", *table(audit.choices), ""]
    lines += ["## Communication", ""]
    lines += [*table([row | {"bytes": _gb(row["bytes"])} for row in audit.collectives]), "", "## Largest moves", ""]
    shown = [
        row | {"bytes": f"{row['bytes'] / 1e6:,.1f} MB", "types": row["types"][:90]} for row in audit.largest_moves
    ]
    lines += [*table(shown), "", "## Assumptions", "", *(f"- {each}" for each in assumptions(audit.target))]
    return lines
