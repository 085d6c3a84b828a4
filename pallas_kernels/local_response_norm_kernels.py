"""The kernels of local response normalisation: y of x, and dx of x and dy.

Both hold a run of channels in registers, and each thread 16 bytes of every array.

  channels last     a thread's 16 bytes are a chunk of 8 or 4 channels of one pixel. It reads the
                    edges of the chunks beside its own too, which its neighbours have just brought
                    to the L1 cache. Shifted loads, one a channel of the window, would be of 2 bytes
                    each; a product with a banded matrix would round float32 to tf32.
  channels before   (batch last, or channels first) the 16 bytes are neighbouring images or pixels,
                    and a block walks along the channels with a window of them in registers.

s^-3/4 takes two reciprocal square roots, any other power exp and log.

What the compiler makes of a window of 5 on sm_90 (Triton 3.9), in instructions for 16 bytes of the
result. Loads are of 128 bits, but for those of the chunks beside a thread's own.

                      bfloat16, float16       float32
                      registers   code    registers   code
  channels last, y        30       149        22        74
  channels last, dx       32       303        32       171
  batch last, y           80       128        48        65
  batch last, dx         136       236        86       116
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import launch
from pallas_kernels.blocks import Blocks, ceiling, side
from pallas_kernels.launch import Backend
from pallas_kernels.matmul import MULTIPROCESSORS
from pallas_kernels.taps import divide
from pallas_kernels.tiles import Mask, as_column, both, spread, under

LARGEST_WINDOW = 32
"""Channels that the kernels' windows can have: all are in registers at one time."""

_STEP = 4
"""Channels that a block walks at a time."""


@dataclass(frozen=True)
class Problem:
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


Channels = list[Array]
"""Consecutive channels in float32, an array of what a block holds of each."""


def _outputs(problem: Problem, x: Channels) -> Channels:
    """y of the channels whose windows are all in x."""
    outputs = []
    for first in range(len(x) - problem.size + 1):
        power, _ = problem.powers(_squares(x[first : first + problem.size]))
        outputs.append(x[first + problem.before] * power)
    return outputs


def _terms(problem: Problem, x: Channels, dy: Channels) -> tuple[Channels, Channels]:
    """(dy s^-β, dy x s^(-β-1)) of the channels of dy, whose windows are x."""
    own, shared = [], []
    for first, slope in enumerate(dy):
        power, inverse = problem.powers(_squares(x[first : first + problem.size]))
        own.append(slope * power)
        shared.append(own[-1] * x[first + problem.before] * inverse)
    return own, shared


def _gradients(problem: Problem, x: Channels, own: Channels, shared: Channels) -> Channels:
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
    def make(cls, ref: Any, problem: Problem, blocks: Blocks) -> "_Chunks":
        width = vector(ref.dtype)
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


def _forward_chunks(x_ref, y_ref, *, problem: Problem, blocks: Blocks):
    chunks = _Chunks.make(x_ref, problem, blocks)
    x = chunks.load(x_ref, problem.before, problem.after)
    chunks.store(y_ref, _outputs(problem, x))


def _backward_chunks(x_ref, dy_ref, dx_ref, *, problem: Problem, blocks: Blocks):
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
    def make(cls, problem: Problem, blocks: Blocks, inner: int) -> "_Walk":
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


def _forward_walk(x_ref, y_ref, *, problem: Problem, blocks: Blocks, inner: int):
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


def _backward_walk(x_ref, dy_ref, dx_ref, *, problem: Problem, blocks: Blocks, inner: int):
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


def run(*arrays: Float[Array, "..."], problem: Problem) -> Float[Array, "..."]:
    """One launch: y of x, or dx of (x, dy), of any axes before and after the channels'."""
    x = arrays[0]
    if x.size == 0:
        return x
    axis = x.ndim + problem.axis
    inner = math.prod(x.shape[axis + 1 :])
    groups = x.size // (problem.group * inner)
    shape = (groups, problem.group, inner)
    blocks = problem.blocks or default_blocks(shape, x.dtype, size=problem.size)
    forward = len(arrays) == 1
    if problem.axis == -1:
        kernel: Any = _forward_chunks if forward else _backward_chunks
        chunks = groups * ceiling(problem.group, vector(x.dtype))
        grid = (ceiling(chunks, blocks.n // vector(x.dtype)),)
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


def vector(dtype: DTypeLike) -> int:
    """Elements in 16 bytes."""
    return 16 // jnp.dtype(dtype).itemsize


def default_blocks(shape: tuple[int, int, int], dtype: DTypeLike, *, size: int = 5) -> Blocks:
    """Blocks for x as [groups of channels, channels of a group, what follows them].

    n neighbours in memory for a block, 16 bytes a thread; where channels do not come last, k of
    them one after another, and fewer bytes a thread where a window of `size` channels fills its
    registers. m is not used.
    """
    groups, group, inner = shape
    n, k = 128 * vector(dtype), side(group, 256)
    while inner > 1 and (size - 1) * n > 32 * 128 and n > 128:
        n //= 2
    while k > 32 and groups * ceiling(group, k) * ceiling(inner, n) < 4 * MULTIPROCESSORS:
        k //= 2
    return Blocks(16, n, k, warps=4, stages=1)


def search_space(shape: tuple[int, int, int], dtype: DTypeLike) -> list[Blocks]:
    """What a tuner tries, the default first."""
    first = default_blocks(shape, dtype)
    found = [first]
    for warps in (1, 2, 4, 8):
        for k in (first.k,) if shape[2] == 1 else (32, 64, 128, 256):
            blocks = Blocks(16, 32 * warps * vector(dtype), k, warps=warps, stages=1)
            if blocks not in found:
                found.append(blocks)
    return found
