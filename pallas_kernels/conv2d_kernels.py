"""Convolution by the Pallas kernels: which of them, for which convolution.

`conv2d_passes` has the three passes of training. Some convolutions are one matrix product, and
`matmul`'s kernel does them: 1×1 kernels that skip no pixel, kernels as large as their strides
(patch embeddings), and `im2col` where it is asked for.
Depthwise ones have no product to make: on any backend they are XLA's shifted multiplications.
"""

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import (
    conv2d_algorithms,
    conv2d_passes,
    epilogue,
    launch,
    selection,
    windows,
)
from pallas_kernels.blocks import Blocks
from pallas_kernels.calls import Conv2d
from pallas_kernels.conv2d_algorithms import Algorithm, Convolution
from pallas_kernels.conv2d_passes import LAYOUTS
from pallas_kernels.epilogue import Activation
from pallas_kernels.implicit_gemm import Problem
from pallas_kernels.launch import Backend
from pallas_kernels.matmul import kernel_product
from pallas_kernels.selection import Choice
from pallas_kernels.taps import Direction
from pallas_kernels.transformations import prepared, typed


def default_algorithm(
    convolution: Convolution, images: int, direction: Direction = "forward"
) -> Algorithm:
    """What the kernels do with a convolution of `images` unless another way is asked for.

    Batch-last images stay so where 8 of them fill a 16-byte load.
    """
    rows, columns = convolution.rows, convolution.columns
    if convolution.depthwise and convolution.groups > 1:
        return "shifted"
    unpadded_product = convolution.groups == 1 and direction == "forward"
    if unpadded_product and (rows.stride, columns.stride) == (1, 1):
        if conv2d_algorithms.refusal("pointwise", convolution) is None:
            return "pointwise"
    elif unpadded_product and conv2d_algorithms.refusal("patches", convolution) is None:
        return "patches"
    return "direct_chwn" if convolution.layout == "CHWN" and images % 8 == 0 else "implicit_gemm"


def refusal(
    algorithm: Algorithm, convolution: Convolution, direction: Direction = "forward"
) -> str | None:
    """Why the kernels cannot compute `convolution` by `algorithm`, or None where they can."""
    rows, columns = convolution.rows, convolution.columns
    if algorithm == "direct":
        return "it is the XLA backend's"
    if algorithm == "direct_chwn" and convolution.layout != "CHWN":
        return f"layout={convolution.layout!r} must be 'CHWN'"
    if algorithm == "shifted" and not convolution.depthwise:
        return f"the kernels have it for groups={convolution.groups} = c_in={convolution.c_in} only"
    if direction == "transposed" and algorithm in ("im2col", "pointwise", "patches"):
        return "the kernels have no transpose of it"
    if algorithm in ("pointwise", "patches") and convolution.groups > 1:
        return f"groups={convolution.groups} must be 1 in a kernel"
    if algorithm == "pointwise" and (rows.stride, columns.stride) != (1, 1):
        return f"the strides {(rows.stride, columns.stride)} must be 1 in a kernel"
    if algorithm in ("implicit_gemm", "direct_chwn"):
        return None
    return conv2d_algorithms.refusal(algorithm, convolution)


def preferred(
    convolution: Convolution, images: int, dtype: DTypeLike, algorithm: Algorithm | None,
    call: Conv2d | None,
) -> bool:  # fmt: skip
    """Whether kernels are the better choice on a GPU.

    They are where one was measured to be the fastest way to do a pass of `call`. Where nothing was
    measured they are for batch-last images, which cuDNN would transpose, and for what is asked for
    by name.
    """
    if algorithm is not None:
        return algorithm in ("implicit_gemm", "direct_chwn")
    measured = None if call is None else selection.kernel_measured(call)
    if measured is not None:
        return measured
    rows, columns = convolution.rows, convolution.columns
    largest = max(
        rows.extent * columns.extent * convolution.c_in,
        rows.count * columns.count * convolution.c_out,
    )
    countable = images * largest < launch.COUNTABLE
    batch_last = default_algorithm(convolution, images) == "direct_chwn"
    return dtype in (jnp.bfloat16, jnp.float16) and batch_last and countable


def convolve(
    source: Float[Array, "_ _ _ _"], w: Float[Array, "kh kw c_in_per_group c_out"], *,
    bias: Array | None, residual: Array | None, activation: Activation | None, out_dtype: Any,
    convolution: Convolution, direction: Direction, algorithm: Algorithm | None,
    blocks: Blocks | None, backend: Backend, call: Conv2d | None = None,
) -> Float[Array, "_ _ _ _"]:  # fmt: skip
    """activation(source * w + bias + residual), or of the transpose, by `direction`.

    Source, residual and result are in the convolution's layout. A pass of `call` is done by the
    kernel that was measured to be the fastest, or by XLA's own convolution where XLA was.

    Raises:
      ValueError: `algorithm` cannot do this.
      NotImplementedError: no kernel has this dtype or precision.
    """
    layout, groups = convolution.layout, convolution.groups
    if algorithm is None:
        images = source.shape[layout.index("N")]
        algorithm = default_algorithm(convolution, images, direction)
    if call is not None:
        choice = selection.choose(call, "forward" if direction == "forward" else "input_gradient")
        algorithm, backend, blocks = _chosen(choice, algorithm, convolution, direction)
    if reason := refusal(algorithm, convolution, direction):
        raise ValueError(f"algorithm={algorithm!r} cannot do this: {reason}")
    _check_blocks(blocks, algorithm)
    problem = Problem(
        convolution.rows, convolution.columns, groups,
        (convolution.c_in // groups, convolution.c_out // groups),
        launch.product(source.dtype, convolution.precision), out_dtype, backend, blocks,
        direction, activation, biased=bias is not None, added=residual is not None, call=call,
    )  # fmt: skip
    terms = [term for term in (bias, residual) if term is not None]
    return typed(
        partial(_convolve, problem, algorithm, convolution),
        [source, w, *terms],
        *named_axes(convolution, direction, biased=problem.biased, added=problem.added),
        sizes={"g": groups},
    )


def named_axes(
    convolution: Convolution, direction: Direction, *, biased: bool, added: bool
) -> tuple[list[str], str]:
    """The axes of the operands (images, kernel, bias, residual) and of the result, for `typed`."""
    names, layout = {"N": "b", "H": "h", "W": "w"}, convolution.layout
    c, o = ("c", "o") if convolution.groups == 1 else ("g", "g")
    inner, outer = (c, o) if direction == "forward" else (o, c)
    images = [
        " ".join({**names, "C": channels}[axis] for axis in layout) for channels in (inner, outer)
    ]
    out = images[1].replace("h", "p").replace("w", "q")
    weights = f"i j {'c' if convolution.groups == 1 else '_'} {o}"
    operands = [images[0], weights, *[outer] * biased, *[out] * added]
    return operands, " ".join("_" if axis in "pq" else axis for axis in out.split(" "))


def _check_blocks(blocks: Blocks | None, algorithm: Algorithm) -> None:
    if blocks is not None and algorithm == "shifted":
        raise ValueError(f"blocks={blocks} must be None: a depthwise convolution is no kernel's")
    if blocks is not None and blocks.splits > 1 and algorithm in LAYOUTS:
        raise ValueError(
            f"blocks of splits={blocks.splits} must have 1: of {algorithm}'s sums, only those of a "
            "kernel's gradient are split"
        )


def _chosen(
    choice: Choice | None, algorithm: Algorithm, convolution: Convolution, direction: Direction
) -> tuple[Algorithm, Backend, Blocks | None]:
    """How the forward pass is done, if it is by `algorithm` where nothing was measured."""
    if choice is None:
        return algorithm, "triton", None
    chosen = next((name for name in get_args(Algorithm) if name == choice.algorithm), None)
    if choice.backend == "xla" or not chosen or refusal(chosen, convolution, direction):
        # XLA's own way, on arrays that are stored as the kernels of the gradients want them.
        return algorithm, "xla", None
    return chosen, "triton", choice.blocks


def _convolve(
    problem: Problem, algorithm: Algorithm, convolution: Convolution, source: Array, w: Array,
    *terms: Array,
) -> Float[Array, "_ _ _ _"]:  # fmt: skip
    layout = convolution.layout
    stored = "CHWN" if algorithm == "direct_chwn" else "NHWC"
    to_stored = [layout.index(axis) for axis in stored]
    source = source.transpose(to_stored)
    if problem.added:
        terms = (*terms[: problem.biased], terms[-1].transpose(to_stored))
    if algorithm in ("implicit_gemm", "direct_chwn"):
        source, w, *rest = prepared(source, w, *terms)
        (y,) = conv2d_passes.gather(problem, algorithm, source, w, tuple(rest))
    elif algorithm == "shifted":
        bias, residual = problem.terms(terms)
        y = epilogue.apply(
            _shifted(source, w, replace(convolution, layout="NHWC"), problem.direction),
            bias=bias,
            residual=residual,
            activation=problem.activation,
            out_dtype=problem.out_dtype,
        )
    else:
        y = _as_product(algorithm, source, w, convolution, *problem.terms(terms), problem)
    return y.transpose([stored.index(axis) for axis in layout])


def _shifted(
    source: Array, w: Array, convolution: Convolution, direction: Direction
) -> Float[Array, "b h w c"]:
    """Elementwise products of shifted images: depthwise."""

    # The backward pass shifts again: a copy of the images for each tap is not kept.
    @jax.checkpoint
    def run(x: Array, w: Array) -> Array:
        return conv2d_algorithms.run("shifted", x, w, convolution, jnp.float32)

    if direction == "forward":
        return run(source, w)
    rows, columns = convolution.rows, convolution.columns
    shape = (source.shape[0], rows.extent, columns.extent, convolution.c_in)
    image = jax.ShapeDtypeStruct(shape, source.dtype)
    transpose = jax.linear_transpose(lambda x: run(x, w), image)
    (x,) = transpose(source.astype(jnp.float32))
    return x


def _as_product(
    algorithm: Algorithm, x: Float[Array, "b h w c"], w: Array, convolution: Convolution,
    bias: Array | None, residual: Array | None, problem: Problem,
) -> Float[Array, "b p q o"]:  # fmt: skip
    """The convolution as one matrix product for each group."""
    groups = convolution.groups
    rows, columns = convolution.rows, convolution.columns
    if algorithm == "pointwise":
        patches = x
    elif algorithm == "patches":
        seen = x[:, : rows.count * rows.taps, : columns.count * columns.taps]
        split = seen.reshape(
            x.shape[0], rows.count, rows.taps, columns.count, columns.taps, x.shape[3]
        )
        patches = split.swapaxes(2, 3).reshape(x.shape[0], rows.count, columns.count, -1)
    else:
        shifts = jnp.stack(list(windows.shifts(x, rows, columns)), axis=3)
        by_group = shifts.reshape(*shifts.shape[:4], groups, -1).swapaxes(3, 4)
        patches = by_group.reshape(*shifts.shape[:3], -1)
    matrix = w.reshape(-1, w.shape[3])
    split = [
        None if term is None else jnp.split(term, groups, axis=-1)
        for term in (patches, matrix, bias, residual)
    ]
    parts = [
        kernel_product(
            *(operands[group] for operands in split[:2] if operands is not None),
            bias=None if split[2] is None else split[2][group],
            residual=None if split[3] is None else split[3][group],
            activation=problem.activation,
            out_dtype=problem.out_dtype,
            product=problem.product,
            backend=problem.backend,
            blocks=problem.blocks,
            call=problem.call,
        )
        for group in range(groups)
    ]
    return jnp.concatenate(parts, axis=-1) if groups > 1 else parts[0]
