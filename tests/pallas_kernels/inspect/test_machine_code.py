"""The numbers of binaries made up for the purpose, against the ones worked out by hand."""

import pytest

from pallas_kernels.inspect.architectures import ARCHITECTURES
from pallas_kernels.inspect.compiler import Binary
from pallas_kernels.inspect.machine_code import read


def loop(instruction, count, length):
    """A program of one loop of `length`, `count` of them the given instruction."""
    lines = [instruction] * count + ["NOP"] * (length - count - 1) + ["@P0 BRA `(.L_x_0)"]
    lines = [f"/*{16 * i:04x}*/ {line} ;" for i, line in enumerate([*lines, "EXIT"])]
    return "\n".join([".L_x_0:", *lines])


def binary(sass, ptx="", warps=8):
    return Binary(ptx, sass, warps, registers=128, spill_bytes=0, shared_bytes=0, tensor_columns=0)


@pytest.mark.parametrize(
    ("architecture", "instruction", "count", "length", "slots"),
    [
        # 128×128×64: 4 steps of 16, two halves of 64 rows, and 155 or 106 instructions.
        ("sm_90", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24", 4, 155, 1.21),
        ("sm_90", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24", 4, 106, 0.83),
        # 128×256×64.
        ("sm_90", "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24", 4, 118, 0.46),
        # 128×128×64 on Ampere: 512 matrix instructions of 8 warps.
        ("sm_80", "HMMA.16816.F32.BF16 R4, R8, R12, R4", 64, 150, 0.29),
        # tf32 has half the rate: 128×128×32 takes as long as 128×128×64 of bfloat16.
        ("sm_90", "HGMMA.64x128x8.F32.TF32 R24, gdesc[UR4], R24", 4, 155, 1.21),
    ],
)
def test_issue_slots_per_matrix_cycle(architecture, instruction, count, length, slots):
    code = read(binary(loop(instruction, count, length)), ARCHITECTURES[architecture])
    assert code.loop_instructions == length
    assert code.loop_matrix_instructions == count
    assert round(code.issue_slots_per_matrix_cycle, 2) == slots


@pytest.mark.parametrize(
    ("kind", "macs", "slots"), [("f16", 128 * 256 * 16, 0.92), ("tf32", 128 * 256 * 8, 0.92)]
)
def test_blackwells_shape_is_in_the_descriptor(kind, macs, slots):
    # 0x8410490: m = 128 and n = 256.
    ptx = f"""
        mov.b32 \t%r101, 138478736;
        @%p9 tcgen05.mma.cta_group::1.kind::{kind} [ %r368 + 0 ], %rd41, %rd42, %r101, %p8;
    """
    text = loop("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR10], tmem[UR20], idesc[UR21], UPT", 4, 118)
    code = read(binary(text, ptx), ARCHITECTURES["sm_100"])
    assert code.loop_matrix_macs == 4 * macs
    assert round(code.issue_slots_per_matrix_cycle, 2) == slots


def test_where_no_shape_is_known_there_are_no_slots():
    text = loop("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR10], tmem[UR20], idesc[UR21], UPT", 4, 118)
    code = read(binary(text), ARCHITECTURES["sm_100"])
    assert (code.loop_matrix_instructions, code.loop_matrix_macs) == (4, None)
    assert code.issue_slots_per_matrix_cycle is None


def test_code_without_matrix_instructions_has_a_loop_and_no_slots():
    code = read(binary(loop("FFMA R4, R8, R12, R4", 64, 80)), ARCHITECTURES["sm_90"])
    assert (code.loop_instructions, code.loop_matrix_instructions) == (80, 0)
    assert code.matrix_instructions == {}
    assert code.issue_slots_per_matrix_cycle is None


def test_unrolled_steps_are_measured_from_the_first_matrix_instruction_to_the_last():
    instruction = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24"
    lines = ["NOP"] * 50 + [instruction, *["NOP"] * 29] * 7 + [instruction, "STG", "EXIT"]
    text = "\n".join(f"/*{16 * i:04x}*/ {line} ;" for i, line in enumerate(lines))
    code = read(binary(text), ARCHITECTURES["sm_90"])
    assert (code.loop_instructions, code.issue_slots_per_matrix_cycle) == (0, None)
    # 8 matrix instructions of 64 cycles for 8 warps, among 7 · 30 + 1.
    assert code.unrolled_issue_slots_per_matrix_cycle == 2 * 211 / (8 * 64)
