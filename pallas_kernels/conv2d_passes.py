"""The three passes of a convolution by kernels, as each other's derivatives, under vmap and on a
mesh.

A convolution is linear in x and in w: the output is made from (x, w), the gradient of x from
(dy, w), the gradient of w from (x, dy). So each has a gradient that is made of the other two, to
any order of reverse mode. Each may be computed in its own way: by another kernel than the others,
or by XLA, where the tuner has found that to be faster.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import (
    conv2d_algorithms,
    direct_chwn,
    epilogue,
    implicit_gemm,
    launch,
    selection,
)
from pallas_kernels.calls import Pass
from pallas_kernels.conv2d_algorithms import Convolution, Layout
from pallas_kernels.implicit_gemm import Problem
from pallas_kernels.transformations import batched, one_after_another, partitioned

Kernel = Literal["implicit_gemm", "direct_chwn"]

LAYOUTS: dict[str, str] = {"implicit_gemm": "NHWC", "direct_chwn": "CHWN"}
"""How a kernel's images are stored."""

_MODULES = {"implicit_gemm": implicit_gemm, "direct_chwn": direct_chwn}


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
        problem,
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


gather = jax.custom_vjp(_compute, nondiff_argnums=(0, 1))


def _gather_forward(problem: Problem, kernel: Kernel, source, w, rest):
    keeps = problem.keeps or epilogue.keeps_argument(problem.activation)
    # Not the launch but the operation, so that a gradient has a gradient.
    outputs = gather(replace(problem, keeps=keeps), kernel, source, w, rest)
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
    other = replace(bare, direction="transposed" if forward else "forward")
    (d_source,) = _measured(gather, other, kernel, (dz,), w, ())
    dw = _measured(_kernel_gradient, bare, kernel, (source, dz) if forward else (dz, source))
    d_rest = []
    bias, residual = problem.terms(terms)
    if bias is not None:
        channel = LAYOUTS[kernel].index("C")
        d_rest.append(dz32.sum([axis for axis in range(4) if axis != channel]).astype(bias.dtype))
    if residual is not None:
        d_rest.append(dz32.astype(residual.dtype))
    return d_source, dw, tuple(d_rest)


gather.defvjp(_gather_forward, _gather_backward)


def _compute_kernel_gradient(problem: Problem, kernel: Kernel, x: Array, dy: Array) -> Array:
    axes = _Axes(problem, kernel)
    (dw,) = _on_any_mesh(
        partial(_launch_kernel_gradient, problem=problem, kernel=kernel),
        (x, dy),
        problem,
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
    ddw, problem = ddw.astype(x.dtype), replace(problem, blocks=None)
    (dx,) = gather(replace(problem, direction="transposed"), kernel, dy, ddw, ())
    (ddy,) = gather(problem, kernel, x, ddw, ())
    return dx, ddy


_kernel_gradient.defvjp(_kernel_gradient_forward, _kernel_gradient_backward)


def _measured(run: Any, problem: Problem, kernel: Kernel, images: tuple[Array, ...], *rest: Any):
    """A gradient in the way that was measured to be the fastest; else by the forward's kernel."""
    passes: dict[Any, Pass] = {"forward": "forward", "transposed": "input_gradient"}
    which = passes[problem.direction] if run is gather else "kernel_gradient"
    choice = None if problem.call is None else selection.choose(problem.call, which)
    if choice is None or (choice.backend == "triton" and choice.algorithm not in LAYOUTS):
        return run(problem, kernel, *images, *rest)
    if choice.backend == "xla":
        return run(replace(problem, backend="xla"), kernel, *images, *rest)
    chosen = cast(Kernel, choice.algorithm)
    images = tuple(_stored(image, kernel, chosen) for image in images)
    result = run(replace(problem, backend="triton", blocks=choice.blocks), chosen, *images, *rest)
    return [_stored(y, chosen, kernel) for y in result] if run is gather else result


def _stored(images: Array, kernel: Kernel, other: Kernel) -> Array:
    """Images that are stored for a kernel, as another one wants them."""
    return images.transpose([LAYOUTS[kernel].index(axis) for axis in LAYOUTS[other]])


def _bare(problem: Problem, dtype: Any) -> Problem:
    """The forward problem without an epilogue, or the blocks that its own launch was asked for."""
    call = problem.call
    return replace(
        problem,
        call=call and replace(call, bias=False, residual=False, activation=None, out_dtype=None),
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
        self.batch = LAYOUTS[kernel].index("N")
        images = {"NHWC": "b {} {} {}", "CHWN": "{2} {0} {1} b"}[LAYOUTS[kernel]]
        self.x, self.y = images.format("h", "w", self.c), images.format("p", "q", self.o)
        self.sizes = (
            {} if self.groups == 1 else {"g": self.groups, "o": problem.channels_of_group[1]}
        )


def _on_any_mesh(
    run: Any, arrays: tuple[Array, ...], problem: Problem, axes: _Axes, *, operands: list[str],
    outputs: list[str], sums_over: list[str], gathers: list[str],
) -> list[Array]:  # fmt: skip
    """A launch under vmap and on a mesh, which XLA does by itself for what is its own."""
    if problem.backend == "xla":
        return run(*arrays)
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
    if problem.backend == "xla":
        return _gather_by_xla(source, w, *rest, problem=problem, kernel=kernel)
    forward = problem.direction == "forward"
    problem = _on_shard(problem, kernel, source, problem.channels_of_group[not forward])
    return _MODULES[kernel].gather(source, w, *rest, problem=problem)


def _launch_kernel_gradient(
    x: Array, dy: Array, *, problem: Problem, kernel: Kernel
) -> list[Array]:
    if problem.backend == "xla":
        c_in_per_group, c_out = problem.channels_of_group[0], dy.shape[LAYOUTS[kernel].index("C")]
        w = jax.ShapeDtypeStruct(
            (problem.rows.taps, problem.columns.taps, c_in_per_group, c_out), x.dtype
        )
        forward = partial(_by_xla, x, problem=problem, kernel=kernel)
        (dw,) = jax.linear_transpose(lambda w: forward(w), w)(dy.astype(x.dtype))
        return [dw.astype(problem.out_dtype)]
    problem = _on_shard(problem, kernel, x, problem.channels_of_group[0])
    return [_MODULES[kernel].kernel_gradient(x, dy, problem=problem)]


def _on_shard(problem: Problem, kernel: Kernel, images: Array, channels_of_group: int) -> Problem:
    """The problem of a device that has some of the groups."""
    if problem.groups == 1:
        return problem
    channels = images.shape[LAYOUTS[kernel].index("C")]
    return replace(problem, groups=channels // channels_of_group)


def _gather_by_xla(
    source: Array, w: Array, *rest: Array, problem: Problem, kernel: Kernel
) -> list[Array]:
    """What the kernel would make, by XLA's own convolution."""
    forward = problem.direction == "forward"
    if forward:
        y = _by_xla(source, w, problem=problem, kernel=kernel)
    else:
        images = source.shape[LAYOUTS[kernel].index("N")]
        size = {"N": images, "H": problem.rows.extent, "W": problem.columns.extent}
        size["C"] = problem.groups * problem.channels_of_group[0]
        x = jax.ShapeDtypeStruct(tuple(size[axis] for axis in LAYOUTS[kernel]), source.dtype)
        run = partial(_by_xla, w=w, problem=problem, kernel=kernel)
        (y,) = jax.linear_transpose(lambda x: run(x), x)(source)
    bias, residual = problem.terms(rest)
    finish = partial(
        epilogue.apply,
        y.astype(jnp.float32),
        bias=bias,
        residual=residual,
        out_dtype=problem.out_dtype,
        channel_axis=LAYOUTS[kernel].index("C"),
    )
    return [finish(activation=each) for each in (problem.activation, None)[: 1 + problem.keeps]]


def _by_xla(x: Array, w: Array, *, problem: Problem, kernel: Kernel) -> Array:
    c_in, c_out = (problem.groups * channels for channels in problem.channels_of_group)
    layout, precision = cast(Layout, LAYOUTS[kernel]), launch.precision(problem.product)
    convolution = Convolution(
        problem.rows, problem.columns, c_in, c_out, problem.groups, layout, precision
    )
    return conv2d_algorithms.run("direct", x, w, convolution, x.dtype)
