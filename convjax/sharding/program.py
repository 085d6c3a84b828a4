"""A compiled program as XLA prints it: computations of instructions, in the order that they run.

    program = Program.parse(compiled.as_text())
    for visit in program.visits():
        print(visit.times, visit.instruction.opcode, visit.instruction.op_name)

What is read is XLA's text form of HLO, of any backend; nothing is executed. Only what a plan asks
for is kept of it: opcodes, operands, shapes in bytes, called computations, and `op_name`, jax's own
name of the operation that an instruction came from.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_START = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r"\b(?:body|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)"
    r"|\bbranch_computations=\{([^}]*)\}|\bcalled_computations=\{([^}]*)\}"
)
_INDEX = re.compile(r"\bindex=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")

_KERNELS = {
    "all-reduce",
    "fusion",
    "map",
    "reduce",
    "reduce-scatter",
    "reduce-window",
    "scatter",
    "select-and-scatter",
    "sort",
}
"""What these apply is the inside of one kernel, such as the sum of two numbers."""


@dataclass(frozen=True)
class Instruction:
    """One operation of a compiled program.

    Attributes:
      name: unique in the program.
      opcode: as XLA calls it: "all-gather-start", "fusion", "while".
      shape: of the result, in XLA's words.
      operands: names of instructions of the same computation.
      attributes: the rest of the line, metadata and configuration.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str = field(repr=False)

    @property
    def op_name(self) -> str:
        """The operation of jax that this came from, with what was around it; "" if not known."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def size(self) -> int:
        """Bytes of the result, all arrays of a tuple together."""
        return size_of(self.shape)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs or applies."""
        names = []
        for found in _CALLED.finditer(self.attributes):
            names += [found[1]] if found[1] else _OPERAND.findall(found[2] or found[3] or "")
        return tuple(names)

    @property
    def trips(self) -> int | None:
        """How often a loop runs its body; None if XLA does not know, or this is no loop."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def index(self) -> int | None:
        """The element that it gets of a tuple; None if it gets none."""
        found = _INDEX.search(self.attributes)
        return int(found[1]) if found and self.opcode == "get-tuple-element" else None


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text, which is a schedule where XLA made one."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """Who reads an instruction's result, by its name."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                if operand in users:
                    users[operand].append(instruction)
        return users

    def sources(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results it reads."""
        return [self.instructions[name] for name in instruction.operands]


@dataclass(frozen=True)
class Visit:
    """An instruction that runs in one step.

    Attributes:
      instruction: which.
      computation: where it stands.
      caller: the visit of the loop, branch or call around it, if any.
      times: how often it runs in a step; None inside of a loop whose trips XLA does not know.
    """

    instruction: Instruction
    computation: Computation
    caller: "Visit | None"
    times: int | None


@dataclass(frozen=True)
class Program:
    """The computations of a compiled program, by name, and the one that runs first."""

    computations: Mapping[str, Computation]
    entry: Computation

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Read what `compiled.as_text()` gives.

        Raises:
          ValueError: the text is not a program's.
        """
        computations: dict[str, Computation] = {}
        entry: Computation | None = None
        lines = iter(text.splitlines())
        for line in lines:
            header = _HEADER.match(line)
            if header:
                computation = _computation(header[2], lines)
                computations[computation.name] = computation
                entry = computation if header[1] else entry
        if entry is None:
            raise ValueError(f"no ENTRY computation in a text of {len(text)} characters")
        return cls(computations, entry)

    def visits(self) -> Iterator[Visit]:
        """Every instruction that runs in a step, those in loops, branches and calls included."""
        yield from self._visits(self.entry, None, 1)

    def _visits(
        self, computation: Computation, caller: Visit | None, times: int | None
    ) -> Iterator[Visit]:
        for instruction in computation.instructions.values():
            visit = Visit(instruction, computation, caller, times)
            yield visit
            if instruction.opcode.removesuffix("-start") in _KERNELS:
                continue
            if instruction.opcode.endswith(("-update", "-done")):  # of what its start runs
                continue
            inside = times
            if instruction.opcode == "while":
                trips = instruction.trips
                inside = None if times is None or trips is None else times * trips
            for name in instruction.called:
                if name in self.computations:
                    yield from self._visits(self.computations[name], visit, inside)


def size_of(shape: str) -> int:
    """Bytes of a shape as XLA writes it, "f32[128,55,55,96]{3,2,1,0}" or a tuple of such."""
    return sum(
        prod(int(side.removeprefix("<=")) for side in sides.split(",") if side) * _bits(kind) // 8
        for kind, sides in _ARRAY.findall(shape)
    )


def elements_of(shape: str) -> list[str]:
    """The shapes in a tuple's shape, or the one shape of an array."""
    if not shape.startswith("("):
        return [shape]
    elements, depth, start = [], 0, 1
    for i, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            elements.append(shape[start:i].strip())
            start = i + 1
    return [element for element in elements if element]


def _bits(kind: str) -> int:
    """The width of an element: 32 for "f32", 8 for "f8e4m3fn" and "pred", none for "token"."""
    if kind == "pred":
        return 8
    digits = re.search(r"\d+", kind)
    return int(digits[0]) if digits else 0


def _computation(name: str, lines: Iterator[str]) -> Computation:
    """Read the instructions up to the closing brace."""
    instructions: dict[str, Instruction] = {}
    root = ""
    for line in lines:
        if line.startswith("}"):
            break
        start = _START.match(line)
        if start:
            instructions[start[2]] = _instruction(start[2], line[start.end() :])
            root = start[2] if start[1] else root
    return Computation(name, instructions, root or next(reversed(instructions), ""))


def _instruction(name: str, rest: str) -> Instruction:
    """Read `shape opcode(operands), attributes`."""
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        raise ValueError(f"no opcode in the instruction {name} = {rest[:80]}")
    close = _closing(rest, opcode.end() - 1)
    operands = tuple(_OPERAND.findall(rest[opcode.end() : close]))
    return Instruction(name, opcode[1], rest[:end], operands, rest[close:])


def _closing(text: str, start: int) -> int:
    """The index after the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"a parenthesis is not closed in {text[start : start + 80]}")
