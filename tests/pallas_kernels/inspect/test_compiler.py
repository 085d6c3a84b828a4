"""Real kernels compiled for GPUs that are not there."""

from functools import cache

import pytest

pytest.importorskip("triton", reason="Triton's compiler is not installed: convjax[inspect]")

from pallas_kernels.blocks import Blocks
from pallas_kernels.calls import Conv2d, Matmul
from pallas_kernels.inspect import Query, inspect
from pallas_kernels.inspect.architectures import ARCHITECTURES
from pallas_kernels.inspect.compiler import CompilerError, compile_kernel
from pallas_kernels.inspect.roofline import default_gpu

PRODUCT = Matmul((4096, 4096), (4096, 4096))


@cache
def kernel(architecture, call=PRODUCT, **options):
    (answer,) = inspect(Query(call, default_gpu(architecture), **options))
    return answer


@pytest.mark.parametrize(
    ("architecture", "kind"), [("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA")]
)
def test_each_architecture_gets_its_own_matrix_instructions(architecture, kind):
    answer = kernel(architecture)
    code = answer.code
    assert set(code.matrix_instructions) == {kind}
    assert code.spill_bytes == 0
    assert code.loop_load_widths == {128: code.loop_load_widths[128]}
    assert code.threads == 32 * answer.launch.warps


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_loop_does_the_multiply_adds_of_the_tile(architecture):
    answer = kernel(architecture)
    blocks = answer.launch.blocks
    steps, rest = divmod(answer.code.loop_matrix_macs, blocks["m"] * blocks["n"] * blocks["k"])
    # More than one if the compiler unrolled the loop.
    assert steps >= 1
    assert rest == 0
    peak = ARCHITECTURES[architecture].matrix_macs
    scheduled = answer.launch.warps / 4 * answer.code.loop_instructions
    slots = scheduled / (answer.code.loop_matrix_macs / peak)
    assert answer.code.issue_slots_per_matrix_cycle == pytest.approx(slots)


def test_hoppers_schedulers_keep_up_with_its_tensor_cores():
    assert kernel("sm_90").code.issue_slots_per_matrix_cycle < 0.6


def test_a_tile_too_large_for_its_registers_spills():
    # 256 sums of float32 for each thread of four warps.
    code = kernel("sm_90", blocks=Blocks(128, 256, 64, warps=4)).code
    assert code.registers == 255
    assert code.spill_bytes > 100


def test_float32_is_tf32_unless_asked_and_then_has_no_matrix_instructions():
    call = Matmul((4096, 4096), (4096, 4096), dtype="float32")
    assert set(kernel("sm_90", call).code.matrix_instructions) == {"HGMMA"}
    exact = kernel("sm_90", call, precision="highest").code
    assert exact.matrix_instructions == {}
    assert exact.loop_instructions > 500
    assert exact.issue_slots_per_matrix_cycle is None


def test_a_convolution_is_compiled_too():
    call = Conv2d((32, 28, 28, 128), (3, 3, 128, 128))
    answer = kernel("sm_90", call, which="input_gradient")
    assert answer.launch.algorithm == "implicit_gemm"
    assert answer.code.matrix_instructions["HGMMA"] > 0


def test_what_the_compiler_refuses_is_one_line(capfd):
    with pytest.raises(CompilerError, match=r"^no machine code for sm_90: .+$"):
        compile_kernel("no Triton IR", warps=4, stages=3, architecture=ARCHITECTURES["sm_90"])
