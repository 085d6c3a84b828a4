"""Convolution by the Pallas kernels: which kernel, its gradients, and its place on a mesh.

A convolution is linear in x and in w, and the three operations of a training step are the
derivatives of each other: the output from (x, w), the gradient of x from (dy, w), the gradient of w
from (x, dy). So each has a gradient that is made of the other two, to any order of reverse mode.

Some convolutions are one matrix product, and `matmul`'s kernel does them: 1×1 kernels that skip no
pixel, kernels as large as their strides (patch embeddings), and `im2col` where it is asked for.
Depthwise ones have no product to make: on any backend they are XLA's shifted multiplications.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import (
    conv2d_algorithms,
    direct_chwn,
    epilogue,
    implicit_gemm,
    launch,
    windows,
)
from pallas_kernels.blocks import Blocks
from pallas_kernels.conv2d_algorithms import Algorithm, Convolution
from pallas_kernels.epilogue import Activation
from pallas_kernels.implicit_gemm import Problem
from pallas_kernels.launch import Backend
from pallas_kernels.matmul import matmul
from pallas_kernels.taps import Direction
from pallas_kernels.transformations import (
    batched,
    one_after_another,
    partitioned,
    prepared,
    typed,
)

Kernel = Literal["implicit_gemm", "direct_chwn"]

_LAYOUTS: dict[Kernel, str] = {"implicit_gemm": "NHWC", "direct_chwn": "CHWN"}
_MODULES = {"implicit_gemm": implicit_gemm, "direct_chwn": direct_chwn}


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


def covers(
    convolution: Convolution, images: int, dtype: DTypeLike, algorithm: Algorithm | None
) -> bool:
    """Whether a kernel is the better guess on a GPU, before a tuner has measured.

    It is for batch-last images, which cuDNN would transpose, and what is asked for by name.
    """
    if algorithm is not None:
        return algorithm in ("implicit_gemm", "direct_chwn")
    pixels = images * convolution.rows.extent * convolution.columns.extent
    countable = pixels * max(convolution.c_in, convolution.c_out) < launch.COUNTABLE
    batch_last = default_algorithm(convolution, images) == "direct_chwn"
    return dtype in (jnp.bfloat16, jnp.float16) and batch_last and countable


def convolve(
    source: Float[Array, "_ _ _ _"], w: Float[Array, "kh kw c_in_per_group c_out"], *,
    bias: Array | None, residual: Array | None, activation: Activation | None, out_dtype: Any,
    convolution: Convolution, direction: Direction, algorithm: Algorithm | None,
    blocks: Blocks | None, backend: Backend,
) -> Float[Array, "_ _ _ _"]:  # fmt: skip
    """activation(source * w + bias + residual), or of the transpose, by `direction`.

    Source, residual and result are in the convolution's layout.

    Raises:
      ValueError: `algorithm` cannot do this.
      NotImplementedError: no kernel has this dtype or precision.
    """
    layout, groups = convolution.layout, convolution.groups
    if algorithm is None:
        images = source.shape[layout.index("N")]
        algorithm = default_algorithm(convolution, images, direction)
    if reason := refusal(algorithm, convolution, direction):
        raise ValueError(f"algorithm={algorithm!r} cannot do this: {reason}")
    problem = Problem(
        convolution.rows, convolution.columns, groups,
        (convolution.c_in // groups, convolution.c_out // groups),
        launch.product(source.dtype, convolution.precision), out_dtype, backend, blocks,
        direction, activation, biased=bias is not None, added=residual is not None,
    )  # fmt: skip
    terms = [term for term in (bias, residual) if term is not None]
    names = {"N": "b", "H": "h", "W": "w"}
    c, o = ("c", "o") if groups == 1 else ("g", "g")
    inner, outer = (c, o) if direction == "forward" else (o, c)
    images = [
        " ".join({**names, "C": channels}[axis] for axis in layout) for channels in (inner, outer)
    ]
    out = images[1].replace("h", "p").replace("w", "q")
    weights = f"i j {'c' if groups == 1 else '_'} {o}"
    return typed(
        partial(_convolve, problem, algorithm, convolution),
        [source, w, *terms],
        [images[0], weights, *[outer] * problem.biased, *[out] * problem.added],
        " ".join("_" if axis in "pq" else axis for axis in out.split(" ")),
        sizes={"g": groups},
    )


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
        (y,) = _gather(problem, algorithm, source, w, tuple(rest))
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
        matmul(
            *(operands[group] for operands in split[:2] if operands is not None),
            bias=None if split[2] is None else split[2][group],
            residual=None if split[3] is None else split[3][group],
            activation=problem.activation,
            out_dtype=problem.out_dtype,
            precision=convolution.precision,
            backend=problem.backend,
            blocks=problem.blocks,
        )
        for group in range(groups)
    ]
    return jnp.concatenate(parts, axis=-1) if groups > 1 else parts[0]


def _compute(
    problem: Problem, kernel: Kernel, source: Array, w: Array, rest: tuple[Array, ...]
) -> list[Array]:
    """The direction's output, and the activation's argument if the problem keeps it."""
    axes = _Axes(problem, kernel)
    source_axes, source_channels, out_axes, out_channels = axes.x, axes.c, axes.y, axes.o
    if problem.direction == "transposed":
        source_axes, source_channels, out_axes, out_channels = axes.y, axes.o, axes.x, axes.c
    linear = problem.activation is None and not rest
    summed = [source_channels] if problem.groups == 1 else []
    return _on_any_mesh(
        partial(_launch_gather, problem=problem, kernel=kernel),
        (source, w, *rest),
        axes,
        operands=[
            source_axes,
            axes.w,
            *[out_channels] * problem.biased,
            *[out_axes] * problem.added,
        ],
        outputs=[out_axes] * (1 + problem.keeps),
        sums_over=summed if linear else [],
        gathers=[] if linear else summed,
    )


_gather = jax.custom_vjp(_compute, nondiff_argnums=(0, 1))


def _gather_forward(problem: Problem, kernel: Kernel, source, w, rest):
    keeps = problem.keeps or epilogue.keeps_argument(problem.activation)
    # Not the launch but the operation, so that a gradient has a gradient.
    outputs = _gather(replace(problem, keeps=keeps), kernel, source, w, rest)
    kept = outputs[-1] if epilogue.keeps_argument(problem.activation) else outputs[0]
    saved = source, w, kept if problem.activation else None, [jnp.zeros(0, x.dtype) for x in rest]
    return outputs[: 1 + problem.keeps], saved


def _gather_backward(problem: Problem, kernel: Kernel, saved, gradients: list[Array]):
    source, w, kept, terms = saved
    dy, *dz_itself = gradients
    dz32 = sum(dz_itself, epilogue.transpose(dy, kept, problem.activation))
    dz = dz32.astype(source.dtype)
    bare = _bare(problem, source.dtype)
    forward = problem.direction == "forward"
    (d_source,) = _gather(
        replace(bare, direction="transposed" if forward else "forward"), kernel, dz, w, ()
    )
    dw = _kernel_gradient(bare, kernel, *((source, dz) if forward else (dz, source)))
    d_rest = []
    bias, residual = problem.terms(terms)
    if bias is not None:
        channel = _LAYOUTS[kernel].index("C")
        d_rest.append(dz32.sum([axis for axis in range(4) if axis != channel]).astype(bias.dtype))
    if residual is not None:
        d_rest.append(dz32.astype(residual.dtype))
    return d_source, dw, tuple(d_rest)


_gather.defvjp(_gather_forward, _gather_backward)


def _compute_kernel_gradient(problem: Problem, kernel: Kernel, x: Array, dy: Array) -> Array:
    axes = _Axes(problem, kernel)
    (dw,) = _on_any_mesh(
        partial(_launch_kernel_gradient, problem=problem, kernel=kernel),
        (x, dy),
        axes,
        operands=[axes.x, axes.y],
        outputs=[axes.w],
        sums_over=["b"],
        gathers=[],
    )
    return dw


_kernel_gradient = jax.custom_vjp(_compute_kernel_gradient, nondiff_argnums=(0, 1))


def _kernel_gradient_forward(problem: Problem, kernel: Kernel, x: Array, dy: Array):
    return _kernel_gradient(problem, kernel, x, dy), (x, dy)


def _kernel_gradient_backward(problem: Problem, kernel: Kernel, saved, ddw: Array):
    x, dy = saved
    ddw = ddw.astype(x.dtype)
    (dx,) = _gather(replace(problem, direction="transposed"), kernel, dy, ddw, ())
    (ddy,) = _gather(problem, kernel, x, ddw, ())
    return dx, ddy


_kernel_gradient.defvjp(_kernel_gradient_forward, _kernel_gradient_backward)


def _bare(problem: Problem, dtype: Any) -> Problem:
    """The forward problem without an epilogue, or the blocks that its own launch was asked for."""
    return replace(
        problem,
        out_dtype=dtype,
        blocks=None,
        direction="forward",
        activation=None,
        biased=False,
        added=False,
        keeps=False,
    )


class _Axes:
    """Names of the axes of x, y and w, as a kernel stores them, and of their channels."""

    def __init__(self, problem: Problem, kernel: Kernel) -> None:
        self.groups = problem.groups
        self.c, self.o = ("c", "o") if self.groups == 1 else ("(g c)", "(g o)")
        self.w = f"i j c {self.o}"
        self.batch = _LAYOUTS[kernel].index("N")
        images = {"NHWC": "b {} {} {}", "CHWN": "{2} {0} {1} b"}[_LAYOUTS[kernel]]
        self.x, self.y = images.format("h", "w", self.c), images.format("p", "q", self.o)
        self.sizes = (
            {} if self.groups == 1 else {"g": self.groups, "o": problem.channels_of_group[1]}
        )


def _on_any_mesh(
    run: Any, arrays: tuple[Array, ...], axes: _Axes, *, operands: list[str],
    outputs: list[str], sums_over: list[str], gathers: list[str],
) -> list[Array]:  # fmt: skip
    """A launch under vmap and on a mesh."""
    named = set(" ".join([*operands, *outputs]).replace("(", "").replace(")", "").split(" "))
    whole = {"h", "w", "i", "j", "p", "q", *gathers}
    if axes.groups > 1:
        whole |= {"c", "o"}
    split = partitioned(
        run,
        operands=operands,
        outputs=outputs,
        sums_over=sums_over,
        gathers=list(whole & named),
        sizes=axes.sizes,
    )
    of_images = [len(each) > 1 and "b" in each.split(" ") for each in operands]

    def rule(size: int, has_axis: Sequence[bool], arrays: Sequence[Array]):
        if "b" in sums_over or list(has_axis) != of_images:
            return one_after_another(call, size, has_axis, arrays)
        together = [
            _fold(array, axes.batch) if has else array
            for array, has in zip(arrays, has_axis, strict=True)
        ]
        return [_unfold(y, size, axes.batch) for y in call(*together)]

    call = batched(split, rule)
    return call(*arrays)


def _fold(images: Array, batch: int) -> Array:
    """[v, …, b, …] → […, v·b, …]."""
    moved = jnp.moveaxis(images, 0, batch)
    return moved.reshape(*moved.shape[:batch], -1, *moved.shape[batch + 2 :])


def _unfold(images: Array, size: int, batch: int) -> Array:
    shape = (*images.shape[:batch], size, -1, *images.shape[batch + 1 :])
    return jnp.moveaxis(images.reshape(shape), batch, 0)


def _launch_gather(
    source: Array, w: Array, *rest: Array, problem: Problem, kernel: Kernel
) -> list[Array]:
    forward = problem.direction == "forward"
    problem = _on_shard(problem, kernel, source, problem.channels_of_group[not forward])
    return _MODULES[kernel].gather(source, w, *rest, problem=problem)


def _launch_kernel_gradient(
    x: Array, dy: Array, *, problem: Problem, kernel: Kernel
) -> list[Array]:
    problem = _on_shard(problem, kernel, x, problem.channels_of_group[0])
    return [_MODULES[kernel].kernel_gradient(x, dy, problem=problem)]


def _on_shard(problem: Problem, kernel: Kernel, images: Array, channels_of_group: int) -> Problem:
    """The problem of a device that has some of the groups."""
    if problem.groups == 1:
        return problem
    channels = images.shape[_LAYOUTS[kernel].index("C")]
    return replace(problem, groups=channels // channels_of_group)
