"""Parser of a compiler's program (HLO text) into computations of instructions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Bits of an element by HLO dtype; for other dtypes, the first number in their names."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_CONTINUES = re.compile(r'"|\}[^,\s]|\}, (?!execution_thread)')
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e[0-9]+m[0-9]+[a-z0-9]*)?)\[([0-9,<= ]*)\](?:\{([^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**62
"""Limit of an estimate: the compiler for v7x writes about 2⁶³ cycles if it has no estimate."""
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array: HLO dtype, shape, and whether it is in HBM.

    TPU compilers write the memory space into the layout: ``S(1)`` means VMEM, and a layout without ``S`` means HBM.
    """

    dtype: str
    shape: tuple[int, ...]
    in_hbm: bool = dataclasses.field(default=True, compare=False)

    @property
    def bytes(self) -> int:
        return math.ceil(math.prod(self.shape) * bits(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def bits(dtype: str) -> int:
    """Return the bits of an element of an HLO dtype."""
    if dtype in _BITS:
        return _BITS[dtype]
    return int(re.findall(r"\d+", dtype)[0])


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      arrays: types of the result; several for a tuple.
      arguments: text in the parentheses after the opcode.
      operands: names of instructions of the same computation.
      rest: text after the parentheses, with the attributes.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    arguments: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool = False

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        """Bytes of the results in HBM."""
        return sum(array.bytes for array in self.arrays if array.in_hbm)

    @property
    def cycles(self) -> int:
        """Cycles of one run, as the TPU compiler estimates them, or 0 without an estimate."""
        cycles = int(self._attribute(_CYCLES) or 0)
        return cycles if cycles < _NO_ESTIMATE else 0

    @property
    def called(self) -> list[str]:
        branches = [name.strip().lstrip("%") for found in _BRANCHES.findall(self.rest) for name in found.split(",")]
        return [name for _, name in CALLED.findall(self.rest)] + branches

    @property
    def target(self) -> str:
        return self._attribute(_TARGET)

    @property
    def op_name(self) -> str:
        return self._attribute(_OP_NAME)

    def _attribute(self, pattern: re.Pattern[str]) -> str:
        found = pattern.search(self.rest)
        return found[1] if found else ""


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed program."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Parse HLO text, optimized or not.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in _join_lines(text):
        if found := _COMPUTATION.match(line):
            current = computations.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current[found[1]] = _parse_instruction(found[1], found[2], line.lstrip().startswith("ROOT "))
    if not entry:
        raise ValueError("HLO text has no ENTRY computation")
    return Module(computations, entry)


def _join_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, with the lines of one instruction joined: kernel attributes may contain line ends."""
    waiting = ""
    for line in text.splitlines():
        if waiting and not _CONTINUES.match(line):
            yield waiting
            waiting = ""
        if not waiting and not _INSTRUCTION.match(line):
            yield line
        else:
            waiting += line
    yield waiting


def _closing_bracket(text: str, start: int) -> int:
    """Return the position of the bracket that closes the bracket at ``start``."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if not depth:
            return index
    raise ValueError(f"HLO line has an open bracket: {text[:80]!r}")


def _parse_instruction(name: str, text: str, is_root: bool) -> Instruction:
    end = _closing_bracket(text, 0) + 1 if text.startswith("(") else text.index(" ")
    result, text = text[:end], text[end:].lstrip()
    opening = text.index("(")
    opcode, closing = text[:opening], _closing_bracket(text, opening)
    arguments = text[opening + 1 : closing]
    operands = tuple(_NAME.findall(arguments)) if "%" in arguments else _bare_names(opcode, arguments)
    return Instruction(name, opcode, tuple(_parse_arrays(result)), arguments, operands, text[closing + 1 :], is_root)


def _bare_names(opcode: str, arguments: str) -> tuple[str, ...]:
    """Return the operands of an instruction whose names have no percent sign."""
    if opcode in ("parameter", "constant"):
        return ()
    return tuple(part.split()[-1] for part in arguments.split(", ") if part.strip())


def _parse_arrays(text: str) -> Iterator[Array]:
    for dtype, dims, layout in _ARRAY.findall(text):
        shape = tuple(int(size.strip(" <=")) for size in dims.split(",") if size.strip())
        space = _SPACE.search(layout)
        yield Array(dtype, shape, space is None or space[1] == "0")
