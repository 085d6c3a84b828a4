"""Machine code as text (SASS, as `nvdisasm` prints it): its instructions and its loops."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MATRIX = frozenset(
    {
        "HMMA", "IMMA", "QMMA", "OMMA", "DMMA", "HGMMA", "IGMMA", "QGMMA",
        "UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA",
    }
)  # fmt: skip
"""Instructions of the Tensor Cores. H: 16-bit and tf32; Q: 8-bit floats; I: integers; D: float64;
O: 4-bit floats. -MMA: a warp's, from registers; -GMMA: four warps', from shared memory (Hopper);
UTC-: a block's, into tensor memory (Blackwell)."""

_EIGHT_BITS = frozenset({"IMMA", "QMMA", "IGMMA", "QGMMA", "UTCIMMA", "UTCQMMA"})

_WARP_MACS = {
    "884": 8 * 8 * 4,
    "1684": 16 * 8 * 4,
    "1688": 16 * 8 * 8,
    "16816": 16 * 8 * 16,
    "16832": 16 * 8 * 32,
    "16864": 16 * 8 * 64,
}
"""Multiply-adds of a warp's matrix instruction by its shape, m·n·k without the points between."""

_LINE = re.compile(
    r"^(?P<label>\.[\w.$]+):\s*$"
    r"|/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)(?P<rest>[^;]*);",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Instruction:
    """One instruction, at an index of its program."""

    opcode: str
    """HGMMA of HGMMA.64x128x16.F32.BF16."""
    modifiers: tuple[str, ...]
    guarded: bool
    """Whether a predicate can skip it."""
    target: int | None
    """Where it jumps to."""

    @property
    def is_matrix(self) -> bool:
        """Whether the Tensor Cores run it."""
        return self.opcode in MATRIX

    @property
    def is_multiply_add(self) -> bool:
        """Whether it is a multiply-add of float32 on the CUDA cores."""
        return self.opcode in ("FFMA", "FFMA2")

    @property
    def global_load_bits(self) -> int | None:
        """How much of global memory each thread reads; None for other instructions."""
        if self.opcode not in ("LDG", "LDGSTS"):
            return None
        for modifier in self.modifiers:
            # Whole words: LTC128B is the L2 cache's prefetch, not a width.
            if match := re.fullmatch(r"[US]?(8|16|64|128|256)", modifier):
                return int(match[1])
        return 32


def parse(text: str) -> list[Instruction]:
    """The instructions of a disassembled kernel, in order of address."""
    labels: dict[str, int] = {}
    found: list[re.Match[str]] = []
    for match in _LINE.finditer(text):
        if match["label"]:
            labels[match["label"]] = len(found)
        else:
            found.append(match)
    return [_instruction(match, labels) for match in found]


def _instruction(match: re.Match[str], labels: dict[str, int]) -> Instruction:
    opcode, *modifiers = match["name"].split(".")
    target, guarded = None, match["guard"] is not None
    if opcode in ("BRA", "JMP") and (jump := re.search(r"`\((\.[\w.$]+)\)", match["rest"])):
        target = labels.get(jump[1])
        # A predicate of all threads is an operand: BRA.U UP0, `(.L_x_0).
        guarded = guarded or "," in match["rest"]
    return Instruction(opcode, tuple(modifiers), guarded, target)


def count(instructions: Iterable[Instruction]) -> dict[str, int]:
    """How many instructions of each kind the Tensor Cores run."""
    return dict(Counter(i.opcode for i in instructions if i.is_matrix))


def global_loads(instructions: Iterable[Instruction]) -> dict[int, int]:
    """How many loads from global memory there are of each width in bits."""
    widths = Counter(i.global_load_bits for i in instructions)
    return {width: widths[width] for width in sorted(w for w in widths if w is not None)}


def hot_loop(program: Sequence[Instruction]) -> Sequence[Instruction]:
    """The innermost loop with the most matrix instructions; empty if they are in no loop.

    Of a program without matrix instructions, the one with the most multiply-adds.
    """
    has_matrix = any(instruction.is_matrix for instruction in program)

    def heat(body: range) -> int:
        loop = [program[i] for i in body]
        return sum(i.is_matrix if has_matrix else i.is_multiply_add for i in loop)

    bodies = [body for body in _loops(program) if heat(body)]
    innermost = [
        body
        for body in bodies
        if not any(body != other and other[0] in body and other[-1] in body for other in bodies)
    ]
    return [program[i] for i in max(innermost, key=heat)] if innermost else []


def _loops(program: Sequence[Instruction]) -> list[range]:
    """The loops, each from the instruction that is jumped back to, to the one that jumps.

    Only a jump to an instruction without which there is no way to the jump makes a loop. The
    compiler moves what seldom runs (a wait for a barrier that is not ready) behind the code; the
    jump back from there is none.
    """
    last: dict[int, int] = {}
    for index, instruction in enumerate(program):
        target = instruction.target
        if target is not None and target <= index and index not in _reached(program, target):
            last[target] = index
    return [range(start, stop + 1) for start, stop in last.items()]


def _reached(program: Sequence[Instruction], without: int) -> set[int]:
    """The instructions that can be run if `without` cannot."""
    reached: set[int] = set()
    waiting = [0]
    while waiting:
        index = waiting.pop()
        if index == without or index in reached or index >= len(program):
            continue
        reached.add(index)
        instruction = program[index]
        if instruction.target is not None:
            waiting.append(instruction.target)
        if instruction.guarded or (
            instruction.target is None and instruction.opcode not in ("EXIT", "RET")
        ):
            waiting.append(index + 1)
    return reached


@dataclass(frozen=True)
class MatrixWork:
    """What a block's Tensor Cores do for some instructions."""

    macs: int
    sixteen_bit_macs: float
    """As many 16-bit multiply-adds take the same time."""


def matrix_work(
    instructions: Iterable[Instruction], *, warps: int, block_macs: int | None, tf32: bool
) -> MatrixWork | None:
    """The work of matrix instructions that each of a block's warps runs once.

    Args:
      instructions: others are passed over.
      warps: of the block.
      block_macs: multiply-adds of a block's instruction (UTC-), whose name does not tell.
      tf32: whether a block's instructions multiply tf32, which their name does not tell either.

    Returns:
      None if an instruction's shape is not known.
    """
    macs, sixteen_bit_macs = 0, 0.0
    for instruction in instructions:
        if not instruction.is_matrix:
            continue
        one = _macs(instruction, warps, block_macs)
        if one is None:
            return None
        macs += one
        is_tf32 = tf32 if instruction.opcode.startswith("UTC") else "TF32" in instruction.modifiers
        speed = 2 if instruction.opcode in _EIGHT_BITS else 0.5 if is_tf32 else 1
        sixteen_bit_macs += one / speed
    return MatrixWork(macs, sixteen_bit_macs)


def _macs(instruction: Instruction, warps: int, block_macs: int | None) -> int | None:
    if instruction.opcode.startswith("UTC"):
        return block_macs
    shape = instruction.modifiers[0] if instruction.modifiers else ""
    if "GMMA" in instruction.opcode:
        m, n, k = map(int, shape.split("x"))
        return m * n * k * warps // 4
    return _WARP_MACS[shape] * warps if shape in _WARP_MACS else None
