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

with j from i - (size - 1) // 2 to i + size // 2.

Both kernels hold a run of channels in registers, and each thread 16 bytes of every array.

  channels last     a thread's 16 bytes are a chunk of 8 or 4 channels of one pixel. It reads the
                    edges of the chunks beside its own too, which its neighbours have just brought
                    to the L1 cache. Shifted loads, one a channel of the window, would be of 2 bytes
                    each; a product with a banded matrix would round float32 to tf32.
  channels before   (batch last, or channels first) the 16 bytes are neighbouring images or pixels,
                    and a block walks along the channels with a window of them in registers.

Arithmetic is float32. s^-3/4 takes two reciprocal square roots, any other power exp and log.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import epilogue, launch
from pallas_kernels.blocks import Blocks, ceiling, side
from pallas_kernels.conv2d_algorithms import Layout
from pallas_kernels.launch import Backend
from pallas_kernels.matmul import MULTIPROCESSORS
from pallas_kernels.taps import divide
from pallas_kernels.tiles import Mask, as_column, both, spread, under
from pallas_kernels.transformations import batched, partitioned, prepared, typed

Convention = Literal["paper", "archive", "caffe"]

LARGEST_WINDOW = 32
"""Channels that the kernels' windows can have: all are in registers at one time."""

_STEP = 4
"""Channels that a block walks at a time."""


@dataclass(frozen=True)
class _Problem:
    """All there is to know about a normalisation but its arrays."""

    size: int
    alpha: float
    """α', by which the sum is multiplied."""
    beta: float
    k: float
    group: int
    """Channels of a group."""
    axis: int
    """Of the channels, from the end: vmap puts axes in front."""
    backend: Backend
    blocks: Blocks | None = None

    @property
    def before(self) -> int:
        """Channels of a window before its centre."""
        return self.size // 2

    @property
    def after(self) -> int:
        return (self.size - 1) // 2

    def powers(self, squares: Array) -> tuple[Array, Array]:
        """(s^-β, 1 / s), of the sum of a window's squares."""
        s = self.k + self.alpha * squares
        if self.beta == 0.75:
            root = lax.rsqrt(s)
            # Where s is infinite, root is 0: without the bound this would be 0 · ∞.
            return root * (root * lax.rsqrt(jnp.maximum(root, 1e-30))), root * root
        return jnp.exp(-self.beta * jnp.log(s)), 1 / s

    def slope(self) -> float:
        """What the gradient's sum is multiplied by, beside x."""
        return 2 * self.alpha * self.beta


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
def _equation(problem: _Problem, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """y of x in float32, or in float64, whose channels of a group are one axis."""
    power, _ = problem.powers(_sum_of_shifts(problem, x * x))
    return x * power


@_equation.defjvp
def _equation_jvp(problem: _Problem, primals, tangents):
    (x,), (dx,) = primals, tangents
    power, inverse = problem.powers(_sum_of_shifts(problem, x * x))
    y = x * power
    return y, dx * power - problem.slope() * y * inverse * _window_sum(problem, x * dx)


def _sum_of_shifts(problem: _Problem, values: Array) -> Array:
    """The sum of each window, in one loop with what comes before and after it."""
    axis, channels = values.ndim + problem.axis, problem.group
    edges = [(0, 0, 0)] * values.ndim
    edges[axis] = (problem.before, problem.after, 0)
    padded = lax.pad(values, jnp.zeros((), values.dtype), edges)
    shifts = (lax.slice_in_dim(padded, i, i + channels, axis=axis) for i in range(problem.size))
    return sum(shifts, jnp.zeros_like(values))


def _window_sum(problem: _Problem, values: Array) -> Array:
    """The same as a loop of its own: linear, and the transpose of one that is.

    A sum of shifts in the gradient would be fused with all that it sums, once for each shift: on a
    CPU that takes 5 times as long.
    """
    axis = values.ndim + problem.axis
    edges, window = [(0, 0)] * values.ndim, [1] * values.ndim
    edges[axis], window[axis] = (problem.before, problem.after), problem.size
    return lax.reduce_window(values, 0.0, lax.add, window, (1,) * values.ndim, edges)


def _by_xla(problem: _Problem, x: Float[Array, "..."]) -> Float[Array, "..."]:
    axis = x.ndim + problem.axis
    groups = x.shape[axis] // max(problem.group, 1)
    grouped = x.reshape(*x.shape[:axis], groups, problem.group, *x.shape[axis + 1 :])
    # All but x is computed again in the backward pass: it is less than to keep and read it.
    run = jax.checkpoint(partial(_equation, problem))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return run(grouped.astype(wide)).astype(x.dtype).reshape(x.shape)


Channels = list[Array]
"""Consecutive channels in float32, an array of what a block holds of each."""


def _outputs(problem: _Problem, x: Channels) -> Channels:
    """y of the channels whose windows are all in x."""
    outputs = []
    for first in range(len(x) - problem.size + 1):
        power, _ = problem.powers(_squares(x[first : first + problem.size]))
        outputs.append(x[first + problem.before] * power)
    return outputs


def _terms(problem: _Problem, x: Channels, dy: Channels) -> tuple[Channels, Channels]:
    """(dy s^-β, dy x s^(-β-1)) of the channels of dy, whose windows are x."""
    own, shared = [], []
    for first, slope in enumerate(dy):
        power, inverse = problem.powers(_squares(x[first : first + problem.size]))
        own.append(slope * power)
        shared.append(own[-1] * x[first + problem.before] * inverse)
    return own, shared


def _gradients(problem: _Problem, x: Channels, own: Channels, shared: Channels) -> Channels:
    """dx of the channels x, from their own terms and those of all that see them."""
    return [
        slope - problem.slope() * channel * sum(shared[first + 1 : first + problem.size], term)
        for first, (channel, slope, term) in enumerate(zip(x, own, shared, strict=False))
    ]


def _squares(x: Channels) -> Array:
    return sum((channel * channel for channel in x[1:]), x[0] * x[0])


@dataclass(frozen=True)
class _Chunks:
    """Channels last: a chunk of `width` channels of one pixel for each of `n` threads."""

    index: Array
    """Of each chunk, among all."""
    width: int
    group: int
    total: int

    @classmethod
    def make(cls, ref: Any, problem: _Problem, blocks: Blocks) -> "_Chunks":
        width = _vector(ref.dtype)
        chunks = blocks.n // width
        total = ref.shape[0] // problem.group * ceiling(problem.group, width)
        index = pl.program_id(0) * chunks + lax.iota(jnp.int32, chunks)
        return cls(index, width, problem.group, total)

    def load(self, ref: Any, before: int, after: int) -> Channels:
        """The chunks' channels, with so many more before the first and after the last."""
        far, near = ceiling(before, self.width), ceiling(after, self.width)
        channels = []
        for chunk in range(-far, near + 1):
            place, mask = self._view(chunk)
            tile = launch.load(ref.at[place], mask).astype(jnp.float32)
            channels += [c.reshape(-1) for c in jnp.split(tile, self.width, axis=1)]
        first = far * self.width - before
        return channels[first : first + before + self.width + after]

    def store(self, ref: Any, channels: Channels) -> None:
        place, mask = self._view(0)
        tile = jnp.broadcast_to(channels[0][:, None], place.shape)
        lane = lax.broadcasted_iota(jnp.int32, place.shape, 1)
        for i, channel in enumerate(channels):
            # The compiler knows which lane each register is: this selects nothing, it is a name.
            tile = jnp.where(lane == i, jnp.broadcast_to(channel[:, None], place.shape), tile)
        launch.store(ref.at[place], tile, mask)

    def _view(self, shift: int) -> tuple[Array, Mask]:
        """Places of the chunks `shift` from these, and which of them are in the same group."""
        chunks = ceiling(self.group, self.width)
        group, chunk = divide(self.index, chunks)
        lane = lax.iota(jnp.int32, self.width)
        mask: Mask = None
        if self.total % self.index.size:
            mask = as_column(self.index < self.total)
        if self.group % self.width:
            channel = ((chunk + shift) * self.width)[:, None] + lane[None, :]
            mask = both(mask, under(channel, self.group))
            place = (group * self.group)[:, None] + channel
        else:
            if shift:
                mask = both(mask, as_column(under(chunk + shift, chunks)))
            place = ((self.index + shift) * self.width)[:, None] + lane[None, :]
        return place, spread(mask, place.shape)


def _forward_chunks(x_ref, y_ref, *, problem: _Problem, blocks: Blocks):
    chunks = _Chunks.make(x_ref, problem, blocks)
    x = chunks.load(x_ref, problem.before, problem.after)
    chunks.store(y_ref, _outputs(problem, x))


def _backward_chunks(x_ref, dy_ref, dx_ref, *, problem: _Problem, blocks: Blocks):
    chunks = _Chunks.make(x_ref, problem, blocks)
    # A channel is in the windows of those from `after` before it to `before` after it.
    x = chunks.load(x_ref, problem.size - 1, problem.size - 1)
    dy = chunks.load(dy_ref, problem.after, problem.before)
    own, shared = _terms(problem, x, dy)
    inside = slice(problem.size - 1, problem.size - 1 + chunks.width)
    chunks.store(dx_ref, _gradients(problem, x[inside], own[problem.after :], shared))


@dataclass(frozen=True)
class _Walk:
    """Channels before: `n` neighbours in memory, and `k` channels of them one after another."""

    start: Any
    """Of the walk's channels in its group."""
    stop: Any
    place: Array
    """Of each neighbour in the first channel of its group."""
    inside: Mask
    """Which of them there are."""
    group: int
    inner: int
    """Elements from a channel to the next."""

    @classmethod
    def make(cls, problem: _Problem, blocks: Blocks, inner: int) -> "_Walk":
        channels = min(blocks.k, problem.group)
        start = pl.program_id(1) * channels
        neighbour = pl.program_id(0) * blocks.n + lax.iota(jnp.int32, blocks.n)
        place = pl.program_id(2) * (problem.group * inner) + neighbour
        inside = neighbour < inner if inner % blocks.n else None
        return cls(start, start + channels, place, inside, problem.group, inner)

    def load(self, ref: Any, first: Any) -> Channels:
        """The next channels from `first` on, zero where the group has none."""
        return [
            launch.load(ref.at[self._places(first + i)], self._mask(under(first + i, self.group)))
            .astype(jnp.float32)
            for i in range(_STEP)
        ]  # fmt: skip

    def store(self, ref: Any, first: Any, channels: Channels) -> None:
        """Writes those of the channels that are the walk's."""
        for i, channel in enumerate(channels):
            own = (first + i >= self.start) & (first + i < jnp.minimum(self.stop, self.group))
            launch.store(ref.at[self._places(first + i)], channel, self._mask(own))

    def _places(self, channel: Any) -> Array:
        return self.place + channel * self.inner

    def _mask(self, there: Any) -> Mask:
        return both(self.inside, jnp.broadcast_to(there, self.place.shape))


def _forward_walk(x_ref, y_ref, *, problem: _Problem, blocks: Blocks, inner: int):
    walk = _Walk.make(problem, blocks, inner)
    seen = problem.size - 1
    start = walk.start - problem.before

    def step(index, x):
        newest = start + index * _STEP
        x = [*x, *walk.load(x_ref, newest)]
        walk.store(y_ref, newest - problem.after, _outputs(problem, x))
        return x[_STEP:]

    steps = ceiling(min(blocks.k, problem.group) + seen, _STEP)
    lax.fori_loop(0, steps, step, [jnp.zeros(blocks.n, jnp.float32)] * seen)


def _backward_walk(x_ref, dy_ref, dx_ref, *, problem: _Problem, blocks: Blocks, inner: int):
    walk = _Walk.make(problem, blocks, inner)
    seen = problem.size - 1
    start = walk.start - seen

    def step(index, carry):
        x, own, shared = carry
        newest = start + index * _STEP
        x = [*x, *walk.load(x_ref, newest)]
        terms = _terms(problem, x, walk.load(dy_ref, newest - problem.after))
        own, shared = [*own, *terms[0]], [*shared, *terms[1]]
        walk.store(dx_ref, newest - seen, _gradients(problem, x[:_STEP], own, shared))
        return x[_STEP:], own[_STEP:], shared[_STEP:]

    zero = jnp.zeros(blocks.n, jnp.float32)
    steps = ceiling(min(blocks.k, problem.group) + 2 * seen, _STEP)
    lax.fori_loop(0, steps, step, ([zero] * seen, [zero] * problem.before, [zero] * seen))


def _launch(*arrays: Float[Array, "..."], problem: _Problem) -> Float[Array, "..."]:
    """One launch: y of x, or dx of (x, dy), of any axes before and after the channels'."""
    x = arrays[0]
    if x.size == 0:
        return x
    axis = x.ndim + problem.axis
    inner = math.prod(x.shape[axis + 1 :])
    groups = x.size // (problem.group * inner)
    blocks = problem.blocks or default_blocks((groups, problem.group, inner), x.dtype)
    forward = len(arrays) == 1
    if problem.axis == -1:
        kernel = partial(_forward_chunks if forward else _backward_chunks)
        chunks = groups * ceiling(problem.group, _vector(x.dtype))
        grid = (ceiling(chunks, blocks.n // _vector(x.dtype)),)
    else:
        kernel = partial(_forward_walk if forward else _backward_walk, inner=inner)
        walks = ceiling(problem.group, min(blocks.k, problem.group))
        grid = (ceiling(inner, blocks.n), walks, groups)
    (output,) = launch.call(
        partial(kernel, problem=problem, blocks=blocks),
        *(array.reshape(-1) for array in arrays),
        grid=grid,
        out=[jax.ShapeDtypeStruct((x.size,), x.dtype)],
        blocks=blocks,
        backend=problem.backend,
        algorithm="local_response_norm" + ("" if forward else "_gradient"),
        flops=(2 * problem.size + 8) * x.size * len(arrays),
    )
    return output.reshape(x.shape)


def _on_any_mesh(*arrays: Float[Array, "..."], problem: _Problem) -> Float[Array, "..."]:
    """`_launch` under vmap and on a mesh, where groups may be split but not a group's channels."""
    x = arrays[0]
    groups = x.shape[problem.axis] // problem.group
    names = [f"a{axis}" for axis in range(x.ndim)]
    names[problem.axis] = "c" if groups == 1 else "(g c)"
    split = partitioned(
        partial(_launch, problem=problem),
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


def _compute(problem: _Problem, x: Array) -> Array:
    return _on_any_mesh(x, problem=problem)


_normalise = jax.custom_vjp(_compute, nondiff_argnums=(0,))


def _compute_gradient(problem: _Problem, x: Array, dy: Array) -> Array:
    return _on_any_mesh(x, dy, problem=replace(problem, blocks=None))


_gradient = jax.custom_vjp(_compute_gradient, nondiff_argnums=(0,))


def _by_xla_gradient(problem: _Problem, x: Array, dy: Array) -> Array:
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
    problem = _Problem(
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
    kernel_first = launch.platform() == "gpu" and refusal is None and _covers(problem, x)
    backend = launch.resolve(
        "local_response_norm", backend, available=launch.ranked(kernel_first), blocks=blocks
    )
    if backend == "xla":
        run = partial(_by_xla, problem)
    elif refusal is None:
        run = partial(_normalise_prepared, replace(problem, backend=backend))
    else:
        raise NotImplementedError(f"{refusal}; backend='xla' takes any")
    axes = " ".join(f"a{axis}" for axis in range(4)).replace(f"a{layout.index('C')}", "g")
    return typed(run, [x], [axes], axes, sizes={"g": groups})


def _normalise_prepared(problem: _Problem, x: Array) -> Array:
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


def _refusal(problem: _Problem, x: Array) -> str | None:
    """Why the kernels cannot do this, or None where they can."""
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x of {x.dtype} has no kernel: bfloat16, float16 and float32 have"
    if problem.size > LARGEST_WINDOW:
        return f"size={problem.size} has no kernel: windows of at most {LARGEST_WINDOW} have"
    return None


def _covers(problem: _Problem, x: Array) -> bool:
    """Whether the kernels read x in loads of 16 bytes."""
    run = problem.group if problem.axis == -1 else math.prod(x.shape[x.ndim + problem.axis + 1 :])
    return run % _vector(x.dtype) == 0 and x.size < launch.COUNTABLE and problem.size <= 9


def _vector(dtype: DTypeLike) -> int:
    """Elements in 16 bytes."""
    return 16 // jnp.dtype(dtype).itemsize


def default_blocks(shape: tuple[int, int, int], dtype: DTypeLike) -> Blocks:
    """Blocks for x as [groups of channels, channels of a group, what follows them].

    n neighbours in memory for a block, 16 bytes a thread; where channels do not come last, k of
    them one after another. m is not used.
    """
    groups, group, inner = shape
    n, k = 128 * _vector(dtype), side(group, 256)
    while k > 32 and groups * ceiling(group, k) * ceiling(inner, n) < 4 * MULTIPROCESSORS:
        k //= 2
    return Blocks(16, n, k, warps=4, stages=1)


def search_space(shape: tuple[int, int, int], dtype: DTypeLike) -> list[Blocks]:
    """What a tuner tries, the default first."""
    first = default_blocks(shape, dtype)
    found = [first]
    for warps in (1, 2, 4, 8):
        for k in (first.k,) if shape[2] == 1 else (32, 64, 128, 256):
            blocks = Blocks(16, 32 * warps * _vector(dtype), k, warps=warps, stages=1)
            if blocks not in found:
                found.append(blocks)
    return found
