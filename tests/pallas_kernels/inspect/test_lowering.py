"""The kernels that a call's three passes launch, found without a GPU."""

import pytest

from pallas_kernels.blocks import Blocks
from pallas_kernels.calls import Conv2d, Conv2dTranspose, Matmul, MatmulFp8
from pallas_kernels.inspect.lowering import lower
from pallas_kernels.inspect.roofline import GPUS

H200 = GPUS["H200"]
PASSES = Matmul.passes


def test_a_launch_is_what_the_operation_asked_for():
    blocks = Blocks(64, 128, 32, warps=8, stages=4)
    trace = lower(Matmul((256, 512), (512, 384)), "forward", H200, blocks=blocks)
    (launch,) = trace.launches
    assert launch.algorithm == "matmul"
    assert launch.grid == (4 * 3, 1, 1)
    assert launch.blocks == {
        "m": 64, "n": 128, "k": 32, "warps": 8, "stages": 4, "splits": 1, "group": 8,
    }  # fmt: skip
    assert (launch.warps, launch.stages) == (8, 4)
    assert launch.flops == 2 * 256 * 512 * 384
    assert launch.bytes_moved == 2 * (256 * 512 + 512 * 384 + 256 * 384)
    assert launch.ttir.count("tt.dot ") == 1
    assert "loc(" not in launch.ttir
    assert "pallas_call" in trace.jaxpr


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize(
    "call",
    [
        Matmul((128, 96), (96, 64)),
        Matmul((3, 40, 96), (96, 64), bias=True, residual=True, activation="gelu"),
        Matmul((3, 40, 96), (3, 96, 64), dtype="float32"),
        Conv2d((2, 14, 14, 32), (3, 3, 32, 64)),
        Conv2d((2, 14, 14, 32), (3, 3, 32, 64), bias=True, activation="relu", dtype="float16"),
        Conv2d((2, 14, 14, 32), (3, 3, 32, 64), strides=(2, 2), padding=((1, 1), (1, 1))),
        Conv2d((2, 14, 14, 32), (3, 3, 16, 64), groups=2),
        Conv2d((32, 14, 14, 16), (3, 3, 32, 64), layout="CHWN"),
        Conv2dTranspose((2, 7, 7, 64), (3, 3, 32, 64), (2, 2), bias=True, residual=True),
    ],
    ids=lambda call: call.operation,
)
def test_a_pass_has_its_own_kernel_and_no_other(call, which):
    (launch,) = lower(call, which, H200).launches
    assert launch.flops == call.work(which).flops
    assert launch.bytes_moved >= call.work().bytes_moved


@pytest.mark.parametrize("which", PASSES)
def test_a_product_of_8_bit_floats_moves_a_byte_a_number(which):
    (launch,) = lower(MatmulFp8((2, 2048, 512), (512, 2048), bias=True), which, H200).launches
    assert (launch.algorithm, launch.blocks["splits"]) == ("matmul_fp8", 1)
    assert launch.flops == 2 * 4096 * 512 * 2048
    a, b, y = 4096 * 512, 512 * 2048, 4096 * 2048
    made = {"forward": y, "input_gradient": a, "kernel_gradient": b}[which]
    scale_and_bias = 4 + (4 * 2048 if which == "forward" else 0)
    assert launch.bytes_moved == a + b + y + made + scale_and_bias


def test_the_adjoint_of_a_convolution_is_its_gradient():
    call = Conv2dTranspose((2, 7, 7, 64), (3, 3, 32, 64), (2, 2), size=(13, 14))
    assert call.adjoint == Conv2d((2, 13, 14, 32), (3, 3, 32, 64), (2, 2))
    (made,) = lower(call, "forward", H200).launches
    (gradient,) = lower(call.adjoint, "input_gradient", H200).launches
    assert (made.ttir, made.grid) == (gradient.ttir, gradient.grid)


def test_the_gradients_are_those_of_the_two_operands():
    call = Matmul((512, 64), (64, 128))
    shapes = {"forward": (512, 128), "input_gradient": (512, 64), "kernel_gradient": (64, 128)}
    for which, (m, n) in shapes.items():
        (launch,) = lower(call, which, H200).launches
        assert launch.grid[0] == m // launch.blocks["m"] * (n // launch.blocks["n"])


@pytest.mark.parametrize("which", PASSES)
def test_a_depthwise_convolution_launches_no_kernel(which):
    call = Conv2d((2, 14, 14, 32), (3, 3, 1, 32), groups=32)
    assert lower(call, which, H200).launches == ()


def test_precision_changes_the_product():
    call = Matmul((64, 64), (64, 64), dtype="float32")
    found = {
        precision: lower(call, "forward", H200, precision=precision).launches[0].ttir
        for precision in (None, "high", "highest")
    }
    assert "inputPrecision = tf32 :" in found[None] or "inputPrecision = tf32\n" in found[None]
    assert "tf32x3" in found["high"]
    assert "tf32" not in found["highest"]


def test_what_the_operation_refuses_is_refused(unchecked):
    with pytest.raises(ValueError, match="a has k=4 columns but b has k=5 rows"):
        lower(Matmul((4, 4), (5, 4)), "forward", H200)
