"""Local response normalisation: every channel is divided by the strength of those around it.

    y_i = x_i s_i^-β,   s_i = k + α' Σ_j x_j²,   j from i - size // 2 to i + (size - 1) // 2

A window of even size has one channel more before its centre than after, as in torch. Channels of
one group never see those of another; beyond the first and the last of a group there is nothing.

  convention   α'         k by default
  "paper"      α          2             Krizhevsky, Sutskever, Hinton, "ImageNet Classification with
                                        Deep Convolutional Neural Networks", 2012, section 3.3
  "archive"    α / size   2             its code, https://code.google.com/archive/p/cuda-convnet2
  "caffe"      α / size   1             Caffe, and frameworks after it

Bytes at best: x read and y written; backward x and dy read and dx written. Kept: x. The gradient
finds s again, and sums over the channels that have i in their window:

    dx_i = dy_i s_i^-β - 2 α' β x_i Σ_j dy_j x_j s_j^(-β-1)

with j from i - (size - 1) // 2 to i + size // 2. Arithmetic is float32, in XLA and in the kernels,
which are in `local_response_norm_kernels`.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import calls, epilogue, launch, selection
from pallas_kernels.blocks import Blocks
from pallas_kernels.conv2d_algorithms import Layout
from pallas_kernels.launch import Backend
from pallas_kernels.local_response_norm_kernels import (
    LARGEST_WINDOW,
    Problem,
    default_blocks,
    run,
    search_space,
    vector,
)
from pallas_kernels.transformations import batched, partitioned, prepared, typed

__all__ = ["Convention", "default_blocks", "local_response_norm", "reference", "search_space"]

Convention = Literal["paper", "archive", "caffe"]


def reference(
    x: Float[Array, "b h w c"], *, size: int, alpha: float, beta: float, k: float, groups: int = 1
) -> Float[Array, "b h w c"]:
    """The equation in float32, with α' as `alpha`: what every backend is measured against."""
    x = x.astype(jnp.float32).reshape(*x.shape[:3], groups, -1)
    edges = [(0, 0)] * 4 + [(size // 2, (size - 1) // 2)]
    ones, window = (1, 1, 1, 1, 1), (1, 1, 1, 1, size)
    total = lax.reduce_window(x * x, 0.0, lax.add, window, ones, edges)
    return (x * (k + alpha * total) ** -beta).reshape(*x.shape[:3], -1)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _equation(problem: Problem, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """y of x in float32, or in float64, whose channels of a group are one axis."""
    power, _ = problem.powers(_sum_of_shifts(problem, x * x))
    return x * power


@_equation.defjvp
def _equation_jvp(problem: Problem, primals, tangents):
    (x,), (dx,) = primals, tangents
    power, inverse = problem.powers(_sum_of_shifts(problem, x * x))
    y = x * power
    return y, dx * power - problem.slope() * y * inverse * _window_sum(problem, x * dx)


def _sum_of_shifts(problem: Problem, values: Array) -> Array:
    """The sum of each window, in one loop with what comes before and after it."""
    axis, channels = values.ndim + problem.axis, problem.group
    edges = [(0, 0, 0)] * values.ndim
    edges[axis] = (problem.before, problem.after, 0)
    padded = lax.pad(values, jnp.zeros((), values.dtype), edges)
    shifts = (lax.slice_in_dim(padded, i, i + channels, axis=axis) for i in range(problem.size))
    return sum(shifts, jnp.zeros_like(values))


def _window_sum(problem: Problem, values: Array) -> Array:
    """The same as a loop of its own: linear, and the transpose of one that is.

    A sum of shifts in the gradient would be fused with all that it sums, once for each shift: on a
    CPU that takes 5 times as long.
    """
    axis = values.ndim + problem.axis
    edges, window = [(0, 0)] * values.ndim, [1] * values.ndim
    edges[axis], window[axis] = (problem.before, problem.after), problem.size
    return lax.reduce_window(values, 0.0, lax.add, window, (1,) * values.ndim, edges)


def _by_xla(problem: Problem, x: Float[Array, "..."]) -> Float[Array, "..."]:
    axis = x.ndim + problem.axis
    groups = x.shape[axis] // max(problem.group, 1)
    grouped = x.reshape(*x.shape[:axis], groups, problem.group, *x.shape[axis + 1 :])
    # All but x is computed again in the backward pass: it is less than to keep and read it.
    equation = jax.checkpoint(partial(_equation, problem))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return equation(grouped.astype(wide)).astype(x.dtype).reshape(x.shape)


def _on_any_mesh(*arrays: Float[Array, "..."], problem: Problem) -> Float[Array, "..."]:
    """`run` under vmap and on a mesh, where groups may be split but not a group's channels."""
    x = arrays[0]
    groups = x.shape[problem.axis] // problem.group
    names = [f"a{axis}" for axis in range(x.ndim)]
    names[problem.axis] = "c" if groups == 1 else "(g c)"
    split = partitioned(
        partial(run, problem=problem),
        operands=[" ".join(names)] * len(arrays),
        outputs=[" ".join(names)],
        gathers=["c"],
        sizes={} if groups == 1 else {"g": groups, "c": problem.group},
    )

    def rule(size, has_axis, operands):
        together = (
            operand if has else jnp.broadcast_to(operand, (size, *operand.shape))
            for operand, has in zip(operands, has_axis, strict=True)
        )
        return _on_any_mesh(*together, problem=problem)

    return batched(split, rule)(*arrays)


def _compute(problem: Problem, x: Array) -> Array:
    return _on_any_mesh(x, problem=problem)


_normalise = jax.custom_vjp(_compute, nondiff_argnums=(0,))


def _compute_gradient(problem: Problem, x: Array, dy: Array) -> Array:
    return _on_any_mesh(x, dy, problem=replace(problem, blocks=None))


_gradient = jax.custom_vjp(_compute_gradient, nondiff_argnums=(0,))


def _by_xla_gradient(problem: Problem, x: Array, dy: Array) -> Array:
    _, pull = jax.vjp(partial(_by_xla, problem), x)
    return pull(dy)[0]


_normalise.defvjp(
    lambda problem, x: (_normalise(problem, x), x),
    lambda problem, x, dy: (_gradient(problem, x, dy),),
)
# The gradient's own gradient, which is seldom asked for, is XLA's.
_gradient.defvjp(
    lambda problem, x, dy: (_gradient(problem, x, dy), (x, dy)),
    lambda problem, saved, ddx: jax.vjp(partial(_by_xla_gradient, problem), *saved)[1](ddx),
)


def local_response_norm(
    x: Float[Array, "_ _ _ _"],
    *,
    size: int = 5,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float | None = None,
    convention: Convention = "paper",
    groups: int = 1,
    layout: Layout = "NHWC",
    backend: Backend = "auto",
    blocks: Blocks | None = None,
) -> Float[Array, "_ _ _ _"]:
    """x / (k + α' Σ x²)^β, the sum over `size` channels around each, in the shape of x.

    Args:
      x: images in `layout`.
      size: channels of a window.
      alpha: α, which the convention makes α' of.
      beta: the exponent.
      k: what a window of zeros is divided by, to the power of β; by default the convention's.
      convention: "paper", "archive" or "caffe": see the top of this file.
      groups: equal parts of the channels that do not see each other, as AlexNet's two towers.
      layout: the order of the axes of x.
      backend: "xla", differentiable in both modes; "triton", the kernel, on a GPU, in reverse mode
        only; "interpret", the kernel's arithmetic on any hardware; or "auto", on a GPU the kernel
        where a thread's 16 bytes are of one image, else XLA.
      blocks: the forward kernel's; by default `default_blocks`.

    Raises:
      TypeError: x is not floating.
      ValueError: x has not four axes, groups do not divide its channels, a number is out of range,
        or a name or `blocks` is refused.
      NotImplementedError: the kernel was asked for by name and has no such dtype or window, or its
        forward-mode derivative was asked for.
    """
    epilogue.check_floating(x=x)
    channels = _check(x, size=size, groups=groups, layout=layout)
    if convention not in get_args(Convention):
        names = ", ".join(map(repr, get_args(Convention)))
        raise ValueError(f"convention={convention!r} must be one of {names}")
    if k is None:
        k = 1.0 if convention == "caffe" else 2.0
    if not (k > 0 and alpha >= 0 and math.isfinite(k + alpha + beta)):
        raise ValueError(f"{k=}, {alpha=} and {beta=} must be finite, k > 0 and alpha at least 0")
    problem = Problem(
        size,
        float(alpha if convention == "paper" else alpha / size),
        float(beta),
        float(k),
        channels // groups,
        layout.index("C") - 4,
        "xla",
        blocks,
    )
    refusal = _refusal(problem, x)
    backend, blocks = selection.resolve(
        calls.LocalResponseNorm(x.shape, size, groups, layout, dtype=x.dtype.name),
        backend,
        possible=refusal is None,
        guess=_covers(problem, x),
        blocks=blocks,
    )
    if backend == "xla":
        call = partial(_by_xla, problem)
    elif refusal is None:
        call = partial(_normalise_prepared, replace(problem, backend=backend, blocks=blocks))
    else:
        raise NotImplementedError(f"{refusal}; backend='xla' takes any")
    axes = " ".join(f"a{axis}" for axis in range(4)).replace(f"a{layout.index('C')}", "g")
    return typed(call, [x], [axes], axes, sizes={"g": groups})


def _normalise_prepared(problem: Problem, x: Array) -> Array:
    return _normalise(problem, *prepared(x))


def _check(x: Array, *, size: int, groups: int, layout: str) -> int:
    """The number of channels."""
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r} must be one of {', '.join(get_args(Layout))}")
    if x.ndim != 4:
        raise ValueError(f"x of shape {x.shape} must have four axes")
    for name, value in (("size", size), ("groups", groups)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number from 1 on")
    channels = x.shape[layout.index("C")]
    if channels % groups:
        raise ValueError(f"groups={groups} must divide c={channels}")
    return channels


def _refusal(problem: Problem, x: Array) -> str | None:
    """Why the kernels cannot do this, or None where they can."""
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x of {x.dtype} has no kernel: bfloat16, float16 and float32 have"
    if problem.size > LARGEST_WINDOW:
        return f"size={problem.size} has no kernel: windows of at most {LARGEST_WINDOW} have"
    return None


def _covers(problem: Problem, x: Array) -> bool:
    """Whether the kernels read x in loads of 16 bytes."""
    run = problem.group if problem.axis == -1 else math.prod(x.shape[x.ndim + problem.axis + 1 :])
    return launch.is_countable(x) and run % vector(x.dtype) == 0 and problem.size <= 9
