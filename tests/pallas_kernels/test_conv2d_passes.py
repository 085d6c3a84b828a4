"""XLA in a kernel's place, for each of the three passes: what the tuner mixes is one function."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels import conv2d_passes
from pallas_kernels.conv2d_passes import LAYOUTS
from pallas_kernels.implicit_gemm import Problem
from pallas_kernels.windows import Windows
from tests.pallas_kernels.arrays import assert_close, float64, normal

ROWS, COLUMNS = Windows(7, 3, 2, 1, 1, 0), Windows(6, 2, 1, 2, 0, 1)


def problem(groups):
    return Problem(
        ROWS, COLUMNS, groups, (4 // groups, 6 // groups), "ieee", jnp.float32, "interpret"
    )


def stored(kernel, size):
    return tuple(size[axis] for axis in LAYOUTS[kernel])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", LAYOUTS)
@pytest.mark.parametrize("direction", ["forward", "transposed"])
def test_a_gather_and_its_epilogue(kernel, groups, direction):
    image = {"N": 8, "H": ROWS.extent, "W": COLUMNS.extent, "C": 4}
    output = {"N": 8, "H": ROWS.count, "W": COLUMNS.count, "C": 6}
    source, result = (image, output) if direction == "forward" else (output, image)
    arrays = normal(0, stored(kernel, source)), normal(1, (3, 2, 4 // groups, 6))
    terms = normal(2, (result["C"],)), normal(3, stored(kernel, result))
    fused = replace(
        problem(groups), direction=direction, activation="gelu", biased=True, added=True, keeps=True
    )
    found, expected = (
        conv2d_passes.gather(replace(fused, backend=each), kernel, *arrays, terms)
        for each in ("xla", "interpret")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, float64(theirs), 1e-5)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", LAYOUTS)
def test_a_kernels_gradient(kernel, groups):
    x = normal(0, stored(kernel, {"N": 8, "H": ROWS.extent, "W": COLUMNS.extent, "C": 4}))
    dy = normal(1, stored(kernel, {"N": 8, "H": ROWS.count, "W": COLUMNS.count, "C": 6}))
    found, expected = (
        conv2d_passes._kernel_gradient(replace(problem(groups), backend=each), kernel, x, dy)
        for each in ("xla", "interpret")
    )
    assert_close(found, float64(expected), 1e-5)
