"""The kernels, interpreted, on drawn problems: results and gradients against float64 numpy.

CI draws a few problems a test, as many as CONVJAX_DRAWS says. `-m slow` draws 2,000 in all and,
with `-s`, prints the worst errors.
"""

import importlib
import os
from contextlib import contextmanager
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels import Blocks, matmul
from tests.compiling import quick_jit
from tests.pallas_kernels.arrays import float64
from tests.pallas_kernels.convolutions import cases, forward, transposed
from tests.pallas_kernels.references import assert_agrees, epilogues, product

FEW, MANY = int(os.environ.get("CONVJAX_DRAWS", "5")), 500


@pytest.fixture(params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def draw(request):
    """Calls a check, which returns (dtype, error), with drawn arguments."""
    worst = {}

    def run(check, **strategies):
        # Without shrinking: what is drawn is small, and to compile it takes seconds.
        @settings(max_examples=request.param, phases=[Phase.generate])
        @given(**strategies)
        def each(**drawn):
            dtype, error = check(**drawn)
            worst[dtype] = max(worst.get(dtype, 0), error)

        each()

    yield run
    print(f"\n{request.node.name}, worst errors:", {d: f"{e:.1e}" for d, e in worst.items()})


@contextmanager
def every_launch_in(blocks):
    """Gradients have launches too, which the argument `blocks` does not reach."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("matmul", "implicit_gemm", "direct_chwn"):
            module = importlib.import_module(f"pallas_kernels.{name}")
            if blocks is not None:
                patch.setattr(module, "default_blocks", lambda *_, **__: blocks)
        yield


sides = st.sampled_from([16, 32])
blocks = st.none() | st.builds(
    Blocks, sides, sides, sides, splits=st.integers(1, 4), group=st.integers(1, 3)
)


@st.composite
def products(draw):
    """The shapes of a and b, whose sides are one, prime, a tile's, several tiles' or between."""
    m, n, k = (
        draw(st.sampled_from([1, 16, 47, 64]) | st.integers(1, most)) for most in (70, 70, 150)
    )
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    shared = draw(st.booleans())
    return (*batch, m, k), (k, n) if shared else (*batch, k, n)


def test_matmul(draw):
    def check(shapes, blocks, epilogue):
        with every_launch_in(blocks):
            operation = partial(matmul, backend="interpret")
            return epilogue.coarsest, assert_agrees(operation, product, *shapes, epilogue)

    draw(check, shapes=products(), blocks=blocks, epilogue=epilogues)


@st.composite
def ways(draw, *, products=()):
    """A layout, and an algorithm that has it."""
    layout = draw(st.sampled_from(["NHWC", "NHWC", "NCHW", "CHWN", "CHWN"]))
    batch_last = ["direct_chwn"] * 2 if layout == "CHWN" else []
    algorithm = draw(st.sampled_from([None, "implicit_gemm", *products, *batch_last]))
    return {"layout": layout, "algorithm": algorithm, "backend": "interpret"}


def test_conv2d(draw):
    def check(case, way, blocks, epilogue):
        with every_launch_in(blocks):
            return epilogue.coarsest, assert_agrees(*forward(case, **way), epilogue)

    draw(check, case=cases(), way=ways(products=["im2col"]), blocks=blocks, epilogue=epilogues)


def test_conv2d_transpose(draw):
    def check(case, way, blocks, epilogue):
        with every_launch_in(blocks):
            return epilogue.coarsest, assert_agrees(*transposed(case, **way), epilogue)

    draw(check, case=cases(), way=ways(), blocks=blocks, epilogue=epilogues)


def test_the_transpose_is_the_adjoint_exactly(draw):
    def check(case, way):
        draw = np.random.default_rng(0)
        x, w, y = (
            jnp.asarray(draw.integers(-3, 4, shape), jnp.float32)
            for shape in (case.x_shape, case.w_shape, case.y_shape)
        )

        @quick_jit
        def both(x, w, y):
            return forward(case, **way)[0](x, w), transposed(case, **way)[0](y, w)

        # float32 has all integers of this size, so both sums are exact.
        of_x, of_y = map(float64, both(x, w, y))
        assert np.vdot(of_x, float64(y)) == np.vdot(float64(x), of_y)
        return "float32", 0.0

    draw(check, case=cases(), way=ways())
