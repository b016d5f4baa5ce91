"""The matmuls, moves and collectives of a compiled step, read from the compiler's text.

Data flow: HLO text ── ``hlo.parse`` ──► computations ── ``read_program`` (loop bodies times their trip counts) ──►
``Matmul``, ``Kernel``, ``Move``, ``Collective``.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

from jaxquant.aot import kernels
from jaxquant.aot.hlo import CALLED, Array, Computation, Instruction, Module, bits, parse
from jaxquant.aot.kernels import Kernel
from jaxquant.aot.links import first_group

BIG = 1e6
"""Number of bytes above which a fusion or copy counts as big."""

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_PREFETCHES = ("copy-start", "slice-start", "async-start")
_FREE = frozenset(
    {"parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "optimization-barrier"}
    | {"after-all", "add-dependency", "domain", "partition-id", "replica-id", "rng-get-and-update-state"}
)
"""Instructions that move no data: they rename arrays, or end a move that is already counted."""


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matrix product that the compiler emitted.

    Attributes:
      lhs, rhs, out: types of operands and result.
      kind: library call or opcode.
      path: path in the traced program (``op_name``).
      times: number of runs in a step (loop trips).
      flops: floating (or integer) operations of one run: 2 · M · N · K · batch.
      cycles: the TPU compiler's estimate of one run, with fused instructions, or 0 without an estimate.
      bytes: HBM traffic of one run, with fused instructions.
    """

    lhs: Array
    rhs: Array
    out: Array
    kind: str
    path: str
    times: int
    flops: int
    cycles: int = 0
    bytes: int = 0

    @property
    def dtypes(self) -> str:
        """Operand dtypes: ``s8``, ``f8e4m3fn×f8e5m2`` if they differ, ``… in blocks`` if the chip scales blocks."""
        words = self.lhs.dtype if self.lhs.dtype == self.rhs.dtype else f"{self.lhs.dtype}×{self.rhs.dtype}"
        return f"{words} in blocks" if kernels.has_blocks(self.kind) else words

    @property
    def bits(self) -> int:
        """Bits of the wider operand."""
        return max(bits(self.lhs.dtype), bits(self.rhs.dtype))


@dataclasses.dataclass(frozen=True)
class Move:
    """A fusion, copy, transpose or other instruction that is not a matmul.

    Attributes:
      kind: opcode, or target of a custom call.
      bytes: operands and results in HBM.
      path: path in the traced program.
      times: number of runs in a step.
      types: types of operands and results.
      cycles: the TPU compiler's estimate of one run, or 0 without an estimate.
      is_unknown: whether the instruction is a custom call that is not in the registry (``kernels``).
    """

    kind: str
    bytes: int
    path: str
    times: int
    types: str = ""
    cycles: int = 0
    is_unknown: bool = False


@dataclasses.dataclass(frozen=True)
class Collective:
    """A communication between devices.

    ``bytes`` is the size of the result on one chip, or of the operand for a reduce-scatter. ``members`` are the devices
    of the first group, or () for all devices.
    """

    kind: str
    dtype: str
    bytes: int
    path: str
    times: int
    members: tuple[int, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass
class HloStep:
    """Matmuls, moves and collectives of a step, read from HLO text.

    Attributes:
      kernels: custom calls that multiply.
      prefetched: bytes that asynchronous copies move between HBM and the chip's small memory.
    """

    matmuls: list[Matmul] = dataclasses.field(default_factory=list)
    moves: list[Move] = dataclasses.field(default_factory=list)
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    prefetched: int = 0

    def count(self) -> dict[str, int]:
        """Return the number of matmuls of a step by operand dtypes."""
        counts: collections.Counter[str] = collections.Counter()
        for matmul in self.matmuls:
            counts[matmul.dtypes] += matmul.times
        return dict(counts)

    @property
    def moved(self) -> int:
        """Bytes that instructions other than matmuls and collectives move in a step."""
        return sum(move.bytes * move.times for move in self.moves)

    @property
    def unknown(self) -> list[str]:
        """Names of custom calls with an unknown number of operations."""
        return sorted({move.kind for move in self.moves if move.is_unknown})

    @property
    def cycles(self) -> tuple[int, int]:
        """Cycles of a step, as the TPU compiler estimates them: of matmuls with fused instructions, and of moves."""
        return tuple(sum(each.cycles * each.times for each in some) for some in (self.matmuls, self.moves))  # type: ignore[return-value]

    @property
    def big_moves(self) -> int:
        """Number of instructions in a step that move more than a megabyte each."""
        return sum(move.times for move in self.moves if move.bytes > BIG)


def read_program(text: str, is_optimized: bool = True) -> HloStep:
    """Read matmuls, moves and collectives of a program, from its entry through calls and loops.

    In an unoptimized program, paths in a called function are relative to the path of the call; both are joined here.

    Accounting: an instruction of the entry computation, or of a computation that it calls, is one launch; values inside
    a fusion stay on the chip. Its bytes are its operands and results in HBM, each counted once. Arrays in VMEM cost no
    traffic, and an asynchronous copy between the two memories is a prefetch, not a move. Loops over stacked layers have
    two exceptions: an operand that a fusion only slices counts as the slice, and a result updated in place counts as
    the update. A loop body is multiplied by its trip count: the compiler's, otherwise the constant with which the
    loop's counter is compared, otherwise 1 (``while_loop``). Each branch of a conditional counts once. A fusion around
    a matmul or a collective counts as that operation, not as a move. A fusion that contains an all-reduce and keeps
    only a slice of the result is a reduce-scatter, as TPU compilers write it.

    Args:
      text: HLO text.
      is_optimized: whether the text is the compiler's output rather than its input.

    Raises:
      ValueError: the text has no entry, or a matmul has no contracting dimensions.
    """
    module = parse(text)
    program = HloStep()
    _collect(module, module.entry, 1, None if is_optimized else "", program)
    return program


def _trip_count(module: Module, instruction: Instruction) -> int:
    """Return the trip count of a loop."""
    if found := _TRIPS.search(instruction.rest):
        return int(found[1])
    condition = next(name for role, name in CALLED.findall(instruction.rest) if role == "condition")
    root = next(each for each in module.computations[condition].values() if each.is_root)
    if root.opcode == "compare" and "direction=LT" in root.rest:
        limit = module.computations[condition][root.operands[1]]
        if limit.opcode == "constant":
            return int(limit.arguments)
    return 1


def _collect(module: Module, name: str, times: int, prefix: str | None, program: HloStep) -> None:
    computation = module.computations[name]
    for instruction in computation.values():
        opcode = _kind(instruction)
        path = _join(prefix, instruction.op_name)
        if opcode in _FREE or instruction.opcode.endswith(("-done", "-update")):
            continue
        if opcode == "while":  # the condition compares scalars and is not counted
            body = next(name for role, name in CALLED.findall(instruction.rest) if role == "body")
            _collect(module, body, times * _trip_count(module, instruction), prefix, program)
            continue
        if opcode in ("call", "conditional", "async"):
            for called in instruction.called:
                _collect(module, called, times, path if prefix is not None and opcode == "call" else prefix, program)
            continue
        if instruction.opcode in _PREFETCHES:
            program.prefetched += times * _prefetched(computation, instruction)
            continue
        unfused = list(_with_fused(module, computation, instruction, path))
        matmuls = [_read_matmul(*each, times) for each in unfused if _is_matmul(*each[1:])]
        sent = [each for each in unfused if _kind(each[1]) in COLLECTIVES]
        collectives = [_read_collective(*each, times, is_fused=each[1] is not instruction) for each in sent]
        program.collectives += collectives
        target = instruction.target
        if (collectives and not matmuls) or kernels.NO_WORK.fullmatch(target):
            continue
        moved = _traffic(module, computation, instruction)
        if matmuls:
            program.matmuls += [dataclasses.replace(matmuls[0], cycles=instruction.cycles, bytes=moved), *matmuls[1:]]
            continue
        operands = [array for name in instruction.operands for array in computation[name].arrays]
        if target and (found := kernels.find_kernel(instruction, operands, moved, path, times)):
            program.kernels.append(found)
            continue
        types = f"{', '.join(map(str, operands))} → {', '.join(map(str, instruction.arrays))}"
        is_unknown = bool(target) and not kernels.MOVES.fullmatch(target)
        program.moves.append(Move(target or opcode, moved, path, times, types, instruction.cycles, is_unknown))


def _prefetched(computation: Computation, instruction: Instruction) -> int:
    """Return the HBM bytes of an asynchronous copy between memories: its size for each end that is in HBM."""
    if instruction.opcode == "copy-start":  # destination, source, context
        return sum(array.bytes for array in instruction.arrays[:2] if array.in_hbm)
    ends = [array for array in instruction.arrays if array.shape]
    size = min((array.bytes for array in ends), default=0)  # the slice
    return size * (any(array.in_hbm for array in ends) + all(array.in_hbm for array in ends))


def _join(prefix: str | None, name: str) -> str:
    return "/".join(filter(None, (prefix, name)))


def _with_fused(
    module: Module, computation: Computation, instruction: Instruction, path: str
) -> Iterator[tuple[Computation, Instruction, str]]:
    """Yield an instruction with its computation and path; for a fusion, also yield all instructions in it."""
    yield computation, instruction, path
    for called in instruction.called if instruction.opcode == "fusion" else ():
        inner = module.computations[called]
        for each in inner.values():
            yield from _with_fused(module, inner, each, each.op_name or path)


def _is_matmul(instruction: Instruction, path: str) -> bool:
    is_product = instruction.opcode in ("dot", "convolution", "ragged-dot")
    return is_product or bool(kernels.product_name(instruction.target, path))


def _read_matmul(computation: Computation, instruction: Instruction, path: str, times: int) -> Matmul:
    lhs, rhs = (computation[name].arrays[0] for name in instruction.operands[:2])
    out = instruction.arrays[0]
    kind = kernels.product_name(instruction.target, path) or instruction.opcode
    if kernels.contracts_last(kind):  # each lhs element multiplies one row of a matrix, also in groups
        return Matmul(lhs, rhs, out, kind, path, times, 2 * math.prod(lhs.shape) * out.shape[-1])
    flops = 2 * math.prod(out.shape) * contracted_size(instruction, lhs, rhs)
    return Matmul(lhs, rhs, out, kind, path, times, flops)


def contracted_size(instruction: Instruction, lhs: Array, rhs: Array) -> int:
    """Return the size of the contracted dimensions."""
    found = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^}\]]*)', instruction.rest)
    if found:
        return math.prod(lhs.shape[int(axis.strip(' "'))] for axis in found[1].split(",") if axis.strip())
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if not labels:
        raise ValueError(f"matmul {instruction.name} has no contracting dimensions: {instruction.rest[:120]!r}")
    # TPU compilers write a matmul as a convolution. Further batch, free and contracting axes become window axes. A
    # window axis is a contracting axis if the output has size 1 there.
    out = dict(zip(labels[3], instruction.arrays[0].shape, strict=True))
    sizes = zip(labels[2], rhs.shape, strict=True)
    return math.prod(size for label, size in sizes if label == "i" or (label != "o" and out[label] == 1))


def _traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that an instruction reads and writes."""
    operands = [computation[name] for name in instruction.operands]
    if instruction.opcode in ("dynamic-slice", "gather"):
        source = instruction.bytes if operands[0].hbm_bytes else 0
        return source + instruction.hbm_bytes
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        update = operands[-1 if instruction.opcode == "scatter" else 1]
        return (update.bytes if instruction.hbm_bytes else 0) + update.hbm_bytes
    if instruction.opcode != "fusion":
        return sum(operand.hbm_bytes for operand in operands) + instruction.hbm_bytes
    inner = module.computations[instruction.called[0]]
    parameters = {int(each.arguments): each for each in inner.values() if each.opcode == "parameter"}
    read = sum(_bytes_read(inner, parameters[number], operand.hbm_bytes) for number, operand in enumerate(operands))
    root = next(each for each in inner.values() if each.is_root)
    written = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    places = [array.in_hbm for array in instruction.arrays]
    in_hbm = places if len(places) == len(written) else [True] * len(written)
    return read + sum(_bytes_written(inner, each) for each, there in zip(written, in_hbm, strict=True) if there)


def _bytes_read(inner: Computation, parameter: Instruction, whole: int) -> int:
    """Return the bytes that a fusion reads of an operand: its slices if it is sliced, 0 if it is updated in place."""
    total, names = 0, [parameter.name]
    while names:
        name = names.pop()
        for user in (each for each in inner.values() if name in each.operands):
            if user.opcode == "bitcast":
                names.append(user.name)
            elif user.opcode in ("dynamic-slice", "gather") and user.operands[0] == name:
                total += user.bytes
            elif user.opcode not in ("dynamic-update-slice", "scatter") or user.operands[0] != name:
                return whole
    return min(total, whole)


def _bytes_written(inner: Computation, result: Instruction) -> int:
    """Return how many bytes of a result a fusion writes, only those of the update if an operand is updated in place."""
    while result.opcode == "bitcast":
        result = inner[result.operands[0]]
    if result.opcode in ("dynamic-update-slice", "scatter"):
        return inner[result.operands[-1 if result.opcode == "scatter" else 1]].bytes
    return result.bytes


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _is_only_sliced(inner: Computation, name: str) -> bool:
    """Check whether a fusion keeps only slices of a value."""
    users = [each for each in inner.values() if name in each.operands]
    return bool(users) and all(each.opcode == "dynamic-slice" or _is_only_sliced(inner, each.name) for each in users)


def _read_collective(
    computation: Computation, instruction: Instruction, path: str, times: int, *, is_fused: bool
) -> Collective:
    """Return a communication. The result of an asynchronous communication is a tuple that begins with the operands.

    An all-reduce counts as a reduce-scatter if the fusion around it keeps only slices.
    """
    kind = _kind(instruction)
    arrays = [array for name in instruction.operands for array in computation[name].arrays]
    if kind == "all-gather":
        results = [array for array in instruction.arrays if array.shape]
        arrays = results[-len(instruction.operands) :] if results else arrays
    if is_fused and kind == "all-reduce" and _is_only_sliced(computation, instruction.name):
        kind = "reduce-scatter"
    dtypes = sorted({array.dtype for array in arrays})
    size = sum(array.bytes for array in arrays)
    return Collective(kind, "+".join(dtypes), size, path, times, first_group(instruction.rest))
