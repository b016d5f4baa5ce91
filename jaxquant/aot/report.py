"""What an audit found, as a value, as a table and as JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from jaxquant.aot.chips import Chip, chip
from jaxquant.aot.hlo import bits
from jaxquant.aot.outcome import Outcome, layer
from jaxquant.aot.program import Program

Row = dict[str, Any]


def kind(dtype: str) -> str:
    """Return the peak rate at which a matmul of that operand dtype runs: fp4, fp8, int8, bf16 or f32.

    Integers of more than 8 bits have no unit of their own, and are priced as f32.

    Args:
      dtype: HLO's name.
    """
    if dtype.startswith("f4"):
        return "fp4"
    if dtype.startswith("f8"):
        return "fp8"
    if dtype[0] in "su":
        return "int8" if bits(dtype) <= 8 else "f32"
    return "f32" if dtype in ("f32", "f64") else "bf16"


@dataclasses.dataclass
class Roofline:
    """An estimate of a step's time on one chip, in seconds, from peak rates: a bound from below, not a forecast."""

    matmul: float
    moves: float
    communication: float

    @property
    def step(self) -> float:
        return max(self.matmul + self.moves, self.communication)


ASSUMPTIONS = (
    "Every matmul runs at the chip's dense peak rate for its operands, the slower one's if they differ, or at its "
    "memory's speed where that is longer.",
    "Everything else runs one after another at the memory's full bandwidth: operands plus results, no cache.",
    "Communication runs at the full rate of all links and hides behind the rest: the step is the longer of the two.",
    "float32 matmuls at default precision: TF32 on NVIDIA, one pass of bf16 on TPU.",
    "Calls of hand-written kernels count as moves.",
)


@dataclasses.dataclass
class Audit:
    """What the compiler of an absent chip made of a step. Counts, bytes and times are of one step on one device.

    Where the compiler refuses the step, what it would have made is not known: figures are None, tables and memory are
    empty, and of the outcome only what was asked for is told.

    Attributes:
      target, topology, devices: chip, slice as given, number of devices of the program.
      fits: whether it fits the device's memory; ``refusal`` is the compiler's word where it does not compile.
      memory: bytes: arguments, outputs (without those that share memory with arguments), temporaries, peak, capacity.
      matmuls: one row a matmul: layer, pass, dtypes, operands, times, flops.
      counts: matmuls of a step by operand dtypes.
      outcome: what became of the 8-bit ones.
      moved, big_moves, moves: bytes, number over 1 MB and number of what is no matmul (see ``program.read_program``).
      largest_moves: the ten that move most in a step.
      collectives: one row a kind and dtype: times, bytes.
      roofline: estimate from peak rates.
      unquantized: the same step without quantization, where there is one.
    """

    name: str
    target: str
    topology: str
    devices: int
    fits: bool
    refusal: str
    memory: dict[str, int]
    matmuls: list[Row]
    counts: dict[str, int] | None
    outcome: Outcome
    moved: int | None
    big_moves: int | None
    moves: int | None
    largest_moves: list[Row]
    collectives: list[Row]
    roofline: Roofline | None
    bf16_matmul: float | None
    compile_seconds: float
    versions: dict[str, str]
    unquantized: Audit | None = None

    @property
    def is_low_precision(self) -> bool:
        """Whether something was asked for in 8 bits, the compiler took the step, and nothing of it fell back."""
        return bool(self.outcome.asked) and not self.refusal and not self.outcome.fell_back

    def to_json(self) -> str:
        """Write everything, the unquantized step's audit included, as JSON; ``from_json`` reads it."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def __str__(self) -> str:
        return self.to_markdown()

    def to_markdown(self) -> str:
        """Write the verdict and the tables as a page of markdown."""
        return "\n".join(_markdown(self)) + "\n"


def from_json(data: Row) -> Audit:
    """Read what ``Audit.to_json`` wrote, as ``json.loads`` returns it."""
    below = data.get("unquantized")
    data = dict(data)
    outcome = data.pop("fate", None) or data["outcome"]  # "fate" is its name in older files
    return Audit(
        **data
        | {
            "outcome": Outcome(**outcome),
            "roofline": None if data["roofline"] is None else Roofline(**data["roofline"]),
            "unquantized": None if below is None else from_json(below),
        }
    )


def estimate(chip: Chip, program: Program) -> tuple[Roofline, float]:
    """Estimate a step from peak rates; also the time of its matmuls if the 8-bit ones were in bf16.

    Args:
      chip: that runs it.
      program: as its compiler made it.
    """
    seconds, bf16 = 0.0, 0.0
    for matmul in program.matmuls:
        size = sum(array.bytes for array in (matmul.lhs, matmul.rhs, matmul.out)) / chip.bandwidth
        kinds = {kind(matmul.lhs.dtype), kind(matmul.rhs.dtype)}
        rate = min(chip.peak[each] for each in kinds)  # two kinds run at the slower one's rate
        seconds += matmul.times * max(matmul.flops / rate, size)
        slow = "f32" if "f32" in kinds else "bf16"
        bf16 += matmul.times * max(matmul.flops / chip.peak[slow], size)
    communication = sum(each.times * each.bytes for each in program.collectives) / chip.link
    devices = chip.devices
    return Roofline(
        seconds * devices, program.moved / chip.bandwidth * devices, communication * devices
    ), bf16 * devices


def matmul_rows(program: Program) -> list[Row]:
    """List matmuls with the layer and the pass they belong to."""
    rows = []
    for matmul in program.matmuls:
        name, phase = layer(matmul.path)
        rows.append(
            {
                "layer": name,
                "pass": phase,
                "dtypes": matmul.dtypes,
                "operands": f"{matmul.lhs} {matmul.rhs} → {matmul.out}",
                "times": matmul.times,
                "flops": matmul.flops,
                "kind": matmul.kind,
            }
        )
    return rows


def collective_rows(program: Program) -> list[Row]:
    """Add collectives up by kind and dtype."""
    found: dict[tuple[str, str], list[int]] = {}
    for each in program.collectives:
        total = found.setdefault((each.kind, each.dtype), [0, 0])
        total[0] += each.times
        total[1] += each.times * each.bytes
    rows = ({"kind": kind, "dtype": dtype, "times": n, "bytes": size} for (kind, dtype), (n, size) in found.items())
    return sorted(rows, key=lambda row: -row["bytes"])


def largest_moves(program: Program) -> list[Row]:
    """List the ten instructions that move most in a step."""
    moves = sorted(program.moves, key=lambda move: -move.bytes * move.times)[:10]
    return [{"kind": m.kind, "times": m.times, "bytes": m.bytes, "types": m.types, "path": m.path} for m in moves]


def layer_rows(audit: Audit) -> list[Row]:
    """List for each layer the dtypes in which its matmuls run, by pass."""
    found: dict[str, dict[str, collections.Counter[str]]] = {}
    for row in audit.matmuls:
        passes = found.setdefault(row["layer"], {})
        passes.setdefault(row["pass"], collections.Counter())[row["dtypes"]] += 1
    merged = {tuple(each.split(" → ")) for each in audit.outcome.merged}
    for path, host in merged:
        name, phase = layer(path)
        found.setdefault(name, {}).setdefault(phase, collections.Counter())[f"in {host}"] += 1
    rows = []
    for name, passes in sorted(found.items()):
        cells = {phase: _counted(passes.get(phase, {})) for phase in ("forward", "recomputed", "backward")}
        rows.append({"layer": name} | cells)
    return rows


def _counted(counts: Any) -> str:
    return ", ".join(f"{n} {what}" if n > 1 else what for what, n in sorted(counts.items())) or "–"


def _line(cells: Any) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def table(rows: list[Row]) -> list[str]:
    """Write rows as a markdown table."""
    return (
        [_line(rows[0]), _line(["---"] * len(rows[0])), *(_line(row.values()) for row in rows)] if rows else ["(none)"]
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


_FIGURES: dict[str, Callable[[Any], str]] = {
    "matmuls": lambda audit: _counted(audit.counts),
    "moved beside matmuls": lambda audit: _gb(audit.moved),
    "moves, over 1 MB": lambda audit: f"{audit.moves}, {audit.big_moves}",
    "communicated": lambda audit: _gb(sum(row["bytes"] for row in audit.collectives)),
    "peak memory": lambda audit: _memory(audit),
    "roofline: matmuls": lambda audit: _ms(audit.roofline.matmul),
    "roofline: moves": lambda audit: _ms(audit.roofline.moves),
    "roofline: communication": lambda audit: _ms(audit.roofline.communication),
    "roofline: step": lambda audit: _ms(audit.roofline.step),
    "compiled in": lambda audit: f"{audit.compile_seconds:.0f} s",
}
_KNOWN_OF_REFUSED = ("peak memory", "compiled in")


def summary_rows(audit: Audit) -> list[Row]:
    """List the figures of an audit beside those of the unquantized step; "–" is one that a refused step lacks."""
    columns = {"quantized" if audit.unquantized else "step": audit}
    if audit.unquantized:
        columns["unquantized"] = audit.unquantized
    rows: list[Row] = []
    for name, write in _FIGURES.items():
        is_known = {column: not each.refusal or name in _KNOWN_OF_REFUSED for column, each in columns.items()}
        rows.append(
            {"": name} | {column: write(columns[column]) if known else "–" for column, known in is_known.items()}
        )
    return rows


def _memory(audit: Audit) -> str:
    if audit.refusal:
        return "does not fit"
    fits = "fits" if audit.fits else "DOES NOT FIT"
    return f"{_gb(audit.memory['peak'])} of {_gb(audit.memory['capacity'])}: {fits}"


def verdict(audit: Audit) -> str:
    """Describe in a sentence whether the 8-bit matmuls are there."""
    if audit.refusal:
        return f"The compiler for {audit.target} refuses this step: {audit.refusal}"
    asked = sum(audit.outcome.asked.values())
    if not asked:
        return "Nothing was asked for in 8 bits."
    if audit.outcome.fell_back:
        return (
            f"FELL BACK: {len(audit.outcome.fell_back)} of {asked} matmuls asked for in 8 bits are not: "
            + "; ".join(audit.outcome.fell_back)
        )
    removed, merged = len(audit.outcome.removed), len(audit.outcome.merged)
    share = f"{asked - removed} of {asked}" if removed else f"All {asked}"
    ends = [f"{merged} inside another"] if merged else []
    ends += [f"{removed} not needed and removed"] if removed else []
    return f"{share} matmuls asked for in 8 bits are 8-bit ones{': ' if ends else ''}{', '.join(ends)}."


def speedup(audit: Audit) -> str:
    """Compare with the unquantized step."""
    time, plain = audit.roofline, audit.unquantized
    if time is None or audit.moved is None or audit.big_moves is None or audit.bf16_matmul is None:
        return ""
    if plain and plain.roofline and plain.moved is not None and plain.big_moves is not None:
        ratio = plain.roofline.step / time.step
        extra, more = audit.moved - plain.moved, audit.big_moves - plain.big_moves
        return (
            f"Roofline estimate: {ratio:.2f}× the speed of the unquantized step. "
            f"Quantization moves {extra / 1e9:+,.2f} GB beside the matmuls, in {more:+} instructions over 1 MB."
        )
    ratio = max(audit.bf16_matmul + time.moves, time.communication) / time.step
    return (
        f"Roofline estimate: {ratio:.2f}× the speed of the same step with its matmuls in bf16 (and the same moves: no "
        "unquantized step was compiled)."
    )


def assumptions(target: str) -> list[str]:
    """List what the estimate assumes, with the chip's figures."""
    described = chip(target)
    rates = ", ".join(f"{name} {rate / 1e12:,.0f}" for name, rate in described.peak.items())
    memory = f"memory {described.bandwidth / 1e12:.2f} TB/s, {described.memory / 1e9:.0f} GB"
    figures = f"{target}, per chip: peak TFLOP/s {rates}; {memory}; links {described.link / 1e9:.0f} GB/s."
    shared = (
        [f"A device is one of {described.devices} of a chip and has its share of these."]
        if described.devices > 1
        else []
    )
    return [figures, *shared, *ASSUMPTIONS]


def _markdown(audit: Audit) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in audit.versions.items())
    lines = [f"# {audit.name} on {audit.devices} × {audit.target}", "", verdict(audit), speedup(audit), ""]
    lines += [f"Compiled without the chip; one step, per device. {versions}.", "", *table(summary_rows(audit)), ""]
    if audit.refusal:
        return lines
    lines += ["## Matmuls by layer", "", *table(layer_rows(audit)), "", "## Communication", ""]
    lines += [*table([row | {"bytes": _gb(row["bytes"])} for row in audit.collectives]), "", "## Largest moves", ""]
    shown = [
        row | {"bytes": f"{row['bytes'] / 1e6:,.1f} MB", "types": row["types"][:90]} for row in audit.largest_moves
    ]
    lines += [*table(shown), "", "## Assumptions", "", *(f"- {each}" for each in assumptions(audit.target))]
    return lines
