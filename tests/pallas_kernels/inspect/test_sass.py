"""Machine code written out by hand, as nvdisasm prints it."""

import textwrap

import pytest

from pallas_kernels.inspect import sass


def program(*lines):
    """A program of instructions 16 bytes apart; a word with a colon is a label."""
    text, address = [], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{address:04x}*/ {line} ;")
            address += 16
    return sass.parse("\n".join(text))


HOPPER = textwrap.dedent("""\
    .text.matmul:
            /*0000*/                   LDC R1, c[0x0][0x28] ;
            /*0010*/                   LDGSTS.E.BYPASS.128 [R153+0x18000], desc[UR12][R8.64] ;
    .L_x_0:
            /*0020*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4].tnspB, R24 ;
            /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4].tnspB, R24, gsb0 ;
            /*0040*/                   LDGSTS.E.BYPASS.128 [R19+0x18000], desc[UR12][R10.64], !P0 ;
            /*0050*/               @P0 BRA `(.L_x_0) ;
            /*0060*/                   STG.E.128 desc[UR12][R2.64], R40 ;
            /*0070*/                   EXIT ;
    .L_x_1:
            /*0080*/                   BRA `(.L_x_1);
            /*0090*/                   NOP;
    """)


def test_a_loop_goes_from_the_label_to_the_branch_back():
    code = sass.parse(HOPPER)
    assert len(code) == 10
    loop = sass.hot_loop(code)
    assert [i.opcode for i in loop] == ["HGMMA", "HGMMA", "LDGSTS", "BRA"]
    assert sass.count(code) == sass.count(loop) == {"HGMMA": 2}
    assert (sass.global_loads(code), sass.global_loads(loop)) == ({128: 2}, {128: 1})


def test_code_that_jumps_back_from_behind_the_end_is_no_loop():
    # As Blackwell waits for a barrier: the slow way is behind EXIT, and comes back into the loop.
    code = program(
        "LDC R1, c[0x0][0x37c]",
        ".L_x_8:",
        "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR10], tmem[UR20], idesc[UR21], UPT",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR26], R4",
        "@!P2 BRA `(.L_x_7)",
        ".L_x_13:",
        "VIADD R18, R18, 0x1",
        "BRA.U UP0, `(.L_x_8)",
        "EXIT",
        ".L_x_7:",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR26], R4",
        "@!P2 BRA `(.L_x_7)",
        "BRA `(.L_x_13)",
    )
    assert [i.opcode for i in sass.hot_loop(code)] == ["UTCHMMA", "SYNCS", "BRA", "VIADD", "BRA"]


def test_the_innermost_loop_with_most_matrix_instructions_is_the_hot_one():
    code = program(
        ".L_x_0:",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        ".L_x_1:",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "@P0 BRA `(.L_x_1)",
        ".L_x_2:",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "@P1 BRA `(.L_x_2)",
        ".L_x_3:",
        "IADD3 R4, R8, R12, R4",
        "@P1 BRA `(.L_x_3)",
        "@P2 BRA `(.L_x_0)",
        "EXIT",
    )
    assert [i.opcode for i in sass.hot_loop(code)] == ["HMMA", "HMMA", "BRA"]


def test_an_unrolled_kernel_has_no_loop():
    code = program(
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        ".L_x_0:",
        "FFMA R4, R8, R12, R4",
        "@P0 BRA `(.L_x_0)",
        "EXIT",
    )
    assert sass.hot_loop(code) == []


def test_without_matrix_instructions_the_loop_of_multiply_adds_is_hot():
    code = program(
        ".L_x_0:",
        "IADD3 R4, R8, R12, R4",
        "@P0 BRA `(.L_x_0)",
        ".L_x_1:",
        "FFMA R4, R8, R12, R4",
        "FFMA R5, R8, R12, R5",
        "@P0 BRA `(.L_x_1)",
        "EXIT",
    )
    assert [i.opcode for i in sass.hot_loop(code)] == ["FFMA", "FFMA", "BRA"]


@pytest.mark.parametrize(
    ("line", "bits"),
    [
        ("LDG.E.128.CONSTANT R4, desc[UR4][R2.64]", 128),
        ("LDG.E.LTC128B.64 R4, desc[UR4][R2.64]", 64),
        ("LDG.E R4, desc[UR4][R2.64]", 32),
        ("@!P0 LDG.E.U16 R4, desc[UR4][R2.64]", 16),
        ("LDG.E.S8 R4, desc[UR4][R2.64]", 8),
        ("LDG.E.ENL2.256 R4, R8, desc[UR4][R2.64]", 256),
        ("LDGSTS.E.BYPASS.LTC128B.128 [R2], desc[UR4][R2.64], !P0", 128),
        ("LDGSTS.E.LTC128B [R2], desc[UR4][R2.64]", 32),
        ("LDGDEPBAR", None),
        ("LDS.128 R4, [R2]", None),
        ("LDL.128 R4, [R1]", None),
        ("STG.E.128 desc[UR12][R2.64], R40", None),
    ],
)
def test_the_width_of_a_global_load_is_a_word_of_its_name(line, bits):
    (instruction,) = program(line)
    assert instruction.global_load_bits == bits


@pytest.mark.parametrize(
    ("line", "macs", "sixteen_bit_macs"),
    [
        # A warp's, from each of 8 warps.
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", 8 * 2048, 8 * 2048),
        ("HMMA.1688.F32.TF32 R4, R8, R12, R4", 8 * 1024, 16 * 1024),
        ("IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4", 8 * 4096, 4 * 4096),
        # Four warps', from each of two groups of them.
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24", 2 * 131_072, 2 * 131_072),
        ("HGMMA.64x128x8.F32.TF32 R24, gdesc[UR4], R24", 2 * 65_536, 4 * 65_536),
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", 2 * 262_144, 262_144),
        ("IGMMA.64x64x32.S8.S8 R24, gdesc[UR4], R24", 2 * 131_072, 131_072),
        # A block's, whose name does not tell.
        ("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR10], tmem[UR20], idesc[UR21], UPT", 1000, 1000),
        ("UTCQMMA gdesc[UR4], gdesc[UR6], tmem[UR10], tmem[UR20], idesc[UR21], UPT", 1000, 500),
    ],
)
def test_the_work_of_a_matrix_instruction(line, macs, sixteen_bit_macs):
    work = sass.matrix_work(program(line), warps=8, block_macs=1000, tf32=False)
    assert work == sass.MatrixWork(macs, float(sixteen_bit_macs))


def test_the_work_of_an_unknown_shape_is_unknown():
    for line in ("HMMA.3333.F32 R4, R8, R12, R4", "UTCHMMA gdesc[UR4]"):
        assert sass.matrix_work(program(line), warps=8, block_macs=None, tf32=False) is None


def test_what_a_predicate_can_skip_does_not_end_the_code():
    code = program(
        "@P0 EXIT",
        ".L_x_0:",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "@!UP0 BRA `(.L_x_0)",
        "@!P1 BRA `(.L_x_0)",
        "EXIT",
    )
    assert [i.opcode for i in sass.hot_loop(code)] == ["HMMA", "BRA", "BRA"]
