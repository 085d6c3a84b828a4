"""What a kernel's machine code says of its speed, without running it.

A multiprocessor has four schedulers that issue one instruction a cycle each. An iteration of the
hot loop keeps them for `warps / 4 · loop_instructions` cycles, and the Tensor Cores for its
multiply-adds over those that they do in a cycle. The quotient of the first by the second is
`issue_slots_per_matrix_cycle`: well below 1 the Tensor Cores set the pace, above it all the other
instructions do.

ptxas unrolls a loop of few steps from end to end. Then the same is said of the stretch from the
first matrix instruction to the last, apart, for it has neither all loads of the first steps nor any
of the last.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pallas_kernels.inspect import sass
from pallas_kernels.inspect.architectures import Architecture, Occupancy, occupancy
from pallas_kernels.inspect.compiler import Binary
from pallas_kernels.inspect.sass import Instruction


@dataclass(frozen=True)
class MachineCode:
    """A binary in numbers."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    occupancy: Occupancy
    instructions: int
    matrix_instructions: dict[str, int]
    """By kind, in all of the code."""
    load_widths: dict[int, int]
    """Loads from global memory in all of the code, by bits that each thread reads."""
    loop_instructions: int
    """0 where there is no loop: the compiler unrolled it, or there is one step."""
    loop_matrix_instructions: int
    loop_load_widths: dict[int, int]
    loop_matrix_macs: int | None
    """A block's, by its matrix instructions in one iteration; None if the code does not tell."""
    issue_slots_per_matrix_cycle: float | None
    """Of the loop; None where there is none, or no matrix instruction in it."""
    unrolled_issue_slots_per_matrix_cycle: float | None
    """Of the stretch; None where there is a loop, or a single matrix instruction."""


def read(binary: Binary, architecture: Architecture) -> MachineCode:
    """The numbers of a binary that was compiled for `architecture`."""
    program = sass.parse(binary.sass)
    loop = sass.hot_loop(program)
    block_macs, tf32 = _block_instruction(binary.ptx)
    work_of = partial(sass.matrix_work, warps=binary.warps, block_macs=block_macs, tf32=tf32)

    def slots(instructions: Sequence[Instruction]) -> float | None:
        work = work_of(instructions)
        if work is None or not work.macs:
            return None
        matrix_cycles = work.sixteen_bit_macs / architecture.matrix_macs
        return binary.warps / 4 * len(instructions) / matrix_cycles

    work = work_of(loop)
    return MachineCode(
        registers=binary.registers,
        spill_bytes=binary.spill_bytes,
        shared_bytes=binary.shared_bytes,
        threads=binary.warps * 32,
        occupancy=occupancy(
            architecture,
            warps=binary.warps,
            registers=binary.registers,
            shared_bytes=binary.shared_bytes,
            tensor_columns=binary.tensor_columns,
        ),
        instructions=len(program),
        matrix_instructions=sass.count(program),
        load_widths=sass.global_loads(program),
        loop_instructions=len(loop),
        loop_matrix_instructions=sum(sass.count(loop).values()),
        loop_load_widths=sass.global_loads(loop),
        loop_matrix_macs=None if work is None else work.macs,
        issue_slots_per_matrix_cycle=slots(loop),
        unrolled_issue_slots_per_matrix_cycle=None if loop else slots(_stretch(program)),
    )


def _stretch(program: Sequence[Instruction]) -> Sequence[Instruction]:
    """From the first matrix instruction to the last, if there are two."""
    places = [place for place, instruction in enumerate(program) if instruction.is_matrix]
    return program[places[0] : places[-1] + 1] if len(places) > 1 else []


def _block_instruction(ptx: str) -> tuple[int | None, bool]:
    """(multiply-adds, whether of tf32) of Blackwell's matrix instruction, which PTX describes.

    Its shape is in a descriptor, n / 8 in bits 17 to 22 and m / 16 in bits 24 to 28, and its k is
    32 bytes of an operand: "PTX ISA", instruction descriptor of tcgen05.mma.
    """
    pattern = r"tcgen05\.mma\.cta_group::1\.kind::(\w+)\s+\[[^]]*\],\s*\S+,\s*\S+,\s*(%r\d+)"
    found = set()
    for kind, register in re.findall(pattern, ptx):
        constant = re.search(rf"mov\.b32\s+{register}, (\d+);", ptx)
        found.add((kind, int(constant[1]) if constant else None))
    if len(found) != 1:
        return None, False
    ((kind, descriptor),) = found
    depth = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}.get(kind)
    if descriptor is None or depth is None:
        return None, False
    n, m = (descriptor >> 17 & 0x3F) * 8, (descriptor >> 24 & 0x1F) * 16
    return m * n * depth, kind == "tf32"
