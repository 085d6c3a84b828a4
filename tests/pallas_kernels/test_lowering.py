"""What the interpreter cannot show: that Triton can lower every kernel. No GPU need be there."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import Blocks, conv2d, conv2d_transpose, matmul
from tests.pallas_kernels.convolutions import Case, to_layout
from tests.pallas_kernels.references import ACTIVATIONS

# jax 0.12 warns that a later one will drop this lowering.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

H200 = AbstractDevice("NVIDIA H200", 132, "cuda")


def kernels(function, *shapes, dtype=jnp.bfloat16):
    """The names of the Triton kernels in a function's program for a GPU."""
    mesh = AbstractMesh((1,), ("device",), (AxisType.Auto,), abstract_device=H200)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    names = re.findall(r' name = "(\w+)", num_stages', program)
    assert len(names) == program.count("custom_call @__gpu$xla.gpu.triton")
    return names


def with_gradients(operation, **options):
    """(result, gradients) of the operands, a bias, a residual and the result's cotangent."""

    def run(left, right, bias, residual, cotangent):
        def call(left, right, bias, residual):
            return operation(left, right, bias=bias, residual=residual, backend="triton", **options)

        y, pull = jax.vjp(call, left, right, bias, residual)
        return y, pull(cotangent)

    return run


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (jnp.bfloat16, {"activation": "gelu"}),
        (jnp.float16, {"activation": "silu"}),
        (jnp.float32, {"activation": "relu"}),
        (jnp.float32, {"precision": "high"}),
        (jnp.float32, {"precision": "highest"}),
        (jnp.bfloat16, {"blocks": Blocks(16, 32, 64, warps=2, splits=3)}),
    ],
)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_of_ragged_shapes(batch, dtype, options):
    shapes = (*batch, 37, 77), (*batch, 77, 21), (21,), (*batch, 37, 21), (*batch, 37, 21)
    assert kernels(with_gradients(matmul, **options), *shapes, dtype=dtype) == ["matmul"] * 3


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    call = partial(matmul, backend="triton", activation=activation)
    assert kernels(call, (64, 64), (64, 64)) == ["matmul"]


@pytest.mark.parametrize("shape", [(1, 1, 1), (512, 4096, 1000), (16, 65536, 16), (4096,) * 3])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_products_in_default_blocks(shape, dtype):
    m, k, n = shape
    call = partial(matmul, backend="triton")
    assert kernels(call, (m, k), (k, n), dtype=dtype) == ["matmul"]


WAYS = {
    "implicit_gemm": {"layout": "NHWC", "algorithm": "implicit_gemm"},
    "channels first": {"layout": "NCHW", "algorithm": "implicit_gemm"},
    "direct_chwn": {"layout": "CHWN", "algorithm": "direct_chwn"},
}
CASES = {
    "a stem of 49 taps and three channels": (
        Case((2, 33, 33, 3), (7, 7, 3, 64), (2, 2), ((3, 2), (3, 2))),
        {"activation": "relu"},
    ),
    "tiles that are full": (Case((8, 16, 16, 64), (3, 3, 64, 128)), {}),
    "strides and no multiple of a tile": (
        Case((3, 13, 9, 40), (3, 2, 40, 24), (2, 3)),
        {"activation": "gelu"},
    ),
    "groups, dilation and odd padding": (
        Case((2, 12, 11, 6), (3, 2, 3, 10), (1, 3), ((2, 0), (0, 1)), (2, 1), groups=2),
        {"activation": "silu"},
    ),
    "strides that skip pixels": (Case((2, 8, 9, 32), (1, 1, 32, 16), (2, 3)), {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_convolutions_and_their_gradients(name, way):
    case, options = CASES[name]
    x, y = (to_layout(np.empty(s), WAYS[way]["layout"]).shape for s in (case.x_shape, case.y_shape))
    run = with_gradients(conv2d, **case.options, **WAYS[way], **options)
    found = kernels(run, x, case.w_shape, case.y_shape[-1:], y, y)
    assert found == [WAYS[way]["algorithm"]] * 3


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("way", ["implicit_gemm", "direct_chwn"])
@pytest.mark.parametrize("name", CASES)
def test_transposed_convolutions(name, way, dtype):
    case, options = CASES[name]
    options = case.options | WAYS[way] | options | {"size": case.x_shape[1:3]}
    y = to_layout(np.empty(case.y_shape), options["layout"]).shape
    call = partial(conv2d_transpose, backend="triton", **options)
    assert kernels(call, y, case.w_shape, dtype=dtype) == [WAYS[way]["algorithm"]]


@pytest.mark.parametrize(
    ("case", "options", "expected"),
    [
        (Case((2, 8, 8, 32), (1, 1, 32, 16)), {}, ["matmul"]),
        (Case((2, 8, 8, 3), (4, 4, 3, 16), (4, 4), "VALID"), {}, ["matmul"]),
        (Case((2, 8, 8, 6), (3, 3, 3, 8), groups=2), {"algorithm": "im2col"}, ["matmul"] * 2),
        (Case((2, 8, 8, 32), (3, 3, 1, 32), groups=32), {}, []),
    ],
)
def test_convolutions_that_are_products_are_matmuls(case, options, expected):
    call = partial(conv2d, backend="triton", **case.options, **options)
    assert kernels(call, case.x_shape, case.w_shape) == expected


@pytest.mark.parametrize("operand", [0, 1])
def test_only_the_gradient_that_is_asked_for_is_computed(operand):
    def loss(x, w):
        return jnp.sum(conv2d(x, w, backend="triton"))

    assert kernels(jax.grad(loss, operand), (2, 8, 8, 16), (3, 3, 16, 16)) == ["implicit_gemm"]


def test_second_order_gradients():
    def loss(x, w):
        return jnp.sum(conv2d(x, w, backend="triton", activation="silu").astype(jnp.float32))

    second = jax.grad(lambda x, w: jnp.sum(jax.grad(loss, 1)(x, w).astype(jnp.float32)))
    assert set(kernels(second, (2, 8, 8, 16), (3, 3, 16, 16))) == {"implicit_gemm"}
