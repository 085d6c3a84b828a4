"""The kernels of max pooling: the largest values with their switches, and the way back.

A thread makes 16 bytes of the result, neighbouring channels of one pixel (images, where the batch
comes last). Forward, it looks at all taps of its window. Backward, it looks at the at most
⌈kh / stride⌉·⌈kw / stride⌉ windows that hold its pixel and adds those whose switch is its tap: one
pass, nothing scattered, always in the same order. A tap beyond the image is moved to the edge, to a
pixel that its window holds anyway, so that no load has a mask.

What the compiler makes of windows of 3×3 with stride 2 on sm_90 (Triton 3.9), for 16 bytes of the
result. Every load of x and y is of 128 bits, and all is read from global memory once: what windows
share is in the L1 cache.

                    bfloat16, float16       float32
                    registers   code    registers   code
  y                     29       368        34       168
  y and switches        37       448        35       208
  gradient              37       336        30       165
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels import launch
from pallas_kernels.blocks import Blocks, ceiling
from pallas_kernels.launch import Backend
from pallas_kernels.taps import divide, pixel_of
from pallas_kernels.tiles import Mask, as_column, spread, under
from pallas_kernels.windows import Pair, Windows

MOST_TAPS = 255
"""A switch is a byte."""

_UNROLLED = 16
"""Taps up to which a kernel has them one after another, without a loop."""


@dataclass(frozen=True)
class Problem:
    """All there is to know about a pooling but its arrays, [*batch, height, width, inner]."""

    rows: Windows
    columns: Windows
    backend: Backend
    blocks: Blocks | None = None

    @property
    def taps(self) -> int:
        return self.rows.taps * self.columns.taps

    @property
    def image(self) -> Pair:
        return self.rows.extent, self.columns.extent

    @property
    def counts(self) -> Pair:
        """Windows (down, across)."""
        return self.rows.count, self.columns.count


@dataclass(frozen=True)
class _Chunks:
    """Chunks of `width` neighbours of one pixel, a thread each."""

    index: Array
    """Of each chunk of the result, among all."""
    image: Array
    row: Array
    column: Array
    chunk: Array
    """Of the pixel."""
    width: int
    inner: int
    """Elements of a pixel."""
    inside: Mask
    """Which of the chunks there are; the others have the pixel of the last."""

    @classmethod
    def make(cls, size: int, shape: Pair, inner: int, blocks: Blocks, dtype: Any) -> "_Chunks":
        """Those of a block that makes `size` elements of pixels of images of `shape`."""
        width = _vector(inner, dtype)
        chunks, total = blocks.n // width, size // width
        index = pl.program_id(0) * chunks + lax.iota(jnp.int32, chunks)
        inside = index < total if total % chunks else None
        there = index if inside is None else jnp.minimum(index, total - 1)
        pixel, chunk = divide(there, inner // width)
        return cls(index, *pixel_of(pixel, *shape), chunk, width, inner, inside)

    def place(self, row: Array, column: Array, shape: Pair) -> Array:
        """Of the chunks of other pixels, in images of another shape."""
        pixel = (self.image * shape[0] + row) * shape[1] + column
        return self._places(pixel * (self.inner // self.width) + self.chunk)

    def store(self, ref: Any, value: Array) -> None:
        places = self._places(self.index)
        mask = None if self.inside is None else spread(as_column(self.inside), places.shape)
        launch.store(ref.at[places], value, mask)

    def _places(self, chunk: Array) -> Array:
        return (chunk * self.width)[:, None] + lax.iota(jnp.int32, self.width)[None, :]


def _pool(x_ref, y_ref, *switch_refs, problem: Problem, blocks: Blocks, inner: int):
    chunks = _Chunks.make(y_ref.shape[0], problem.counts, inner, blocks, x_ref.dtype)

    def tap(index, largest, switch):
        i, j = _divide(index, problem.columns.taps)
        row, i = _tap(chunks.row, i, problem.rows)
        column, j = _tap(chunks.column, j, problem.columns)
        value = launch.load(x_ref.at[chunks.place(row, column, problem.image)]).astype(jnp.float32)
        # Taps come from the last to the first, so that the first of equal values has the last word.
        take = (value >= largest) | (value != value)
        largest = jnp.where(take, value, largest)
        if not switch_refs:
            return largest, switch
        code = jnp.broadcast_to(i * problem.columns.taps + j, chunks.row.shape)
        return largest, jnp.where(take, jnp.broadcast_to(code[:, None], value.shape), switch)

    shape = (chunks.row.size, chunks.width)
    found = jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32)
    last = problem.taps - 1
    found = _repeat(problem.taps, lambda index, found: tap(last - index, *found), found)
    for ref, value in zip((y_ref, *switch_refs), found, strict=False):
        chunks.store(ref, value)


def _unpool(y_ref, switch_ref, x_ref, *, problem: Problem, blocks: Blocks, inner: int):
    rows, columns = problem.rows, problem.columns
    chunks = _Chunks.make(x_ref.shape[0], problem.image, inner, blocks, x_ref.dtype)
    down, across = (ceiling(axis.taps, axis.stride) for axis in (rows, columns))

    def window(index, total):
        u, v = _divide(index, across)
        p, i, row_there = _window(chunks.row, u, rows)
        q, j, column_there = _window(chunks.column, v, columns)
        place = chunks.place(p, q, problem.counts)
        code = jnp.where(row_there & column_there, i * columns.taps + j, -1)
        hit = launch.load(switch_ref.at[place]).astype(jnp.int32) == code[:, None]
        return total + jnp.where(hit, launch.load(y_ref.at[place]).astype(jnp.float32), 0)

    zero = jnp.zeros((chunks.row.size, chunks.width), jnp.float32)
    chunks.store(x_ref, _repeat(down * across, window, zero))


def _tap(position: Array, tap: Any, axis: Windows) -> tuple[Array, Any]:
    """The pixel at a window's tap and the tap; of one beyond the image, those at its edge."""
    first = position * axis.stride - axis.before
    if axis.before == 0 and axis.reach + axis.taps - 1 <= axis.extent:
        return first + tap, tap
    pixel = jnp.clip(first + tap, 0, axis.extent - 1)
    return pixel, pixel - first


def _window(pixel: Array, number: Any, axis: Windows) -> tuple[Array, Array, Array]:
    """The last window but `number` that may hold a pixel, the pixel's tap, and whether it does."""
    window, tap = divide(pixel + axis.before, axis.stride)
    window, tap = window - number, tap + number * axis.stride
    there = under(window, axis.count) & (tap < axis.taps)
    return jnp.clip(window, 0, axis.count - 1), tap, there


def _divide(value: Any, divisor: int) -> tuple[Any, Any]:
    return divmod(value, divisor) if isinstance(value, int) else divide(value, divisor)


def _repeat(times: int, step: Any, carry: Any) -> Any:
    if times > _UNROLLED:
        return lax.fori_loop(0, times, step, carry)
    for index in range(times):
        carry = step(index, carry)
    return carry


def pool(x: Array, *, problem: Problem, switches: bool) -> list[Array]:
    """The launch of y, and of the switches where they are asked for."""
    shape = (*x.shape[:-3], *problem.counts, x.shape[-1])
    dtypes = [x.dtype, jnp.uint8][: 1 + switches]
    if 0 in shape:
        return [jnp.zeros(shape, dtype) for dtype in dtypes]
    return _launch(_pool, "max_pool", x, shape=shape, dtypes=dtypes, problem=problem)


def unpool(y: Array, switches: Array, *, problem: Problem) -> list[Array]:
    shape = (*y.shape[:-3], *problem.image, y.shape[-1])
    if 0 in shape:
        return [jnp.zeros(shape, y.dtype)]
    problem = replace(problem, blocks=None)
    return _launch(
        _unpool, "max_unpool", y, switches, shape=shape, dtypes=[y.dtype], problem=problem
    )


def _launch(
    kernel: Any, name: str, *arrays: Array, shape: tuple[int, ...], dtypes: list[Any],
    problem: Problem,
) -> list[Array]:  # fmt: skip
    size, inner, dtype = math.prod(shape), shape[-1], arrays[0].dtype
    blocks = problem.blocks or default_blocks(shape, dtype)
    width = _vector(inner, dtype)
    outputs = launch.call(
        partial(kernel, problem=problem, blocks=blocks, inner=inner),
        *(array.reshape(-1) for array in arrays),
        grid=(ceiling(size // width, blocks.n // width),),
        out=[jax.ShapeDtypeStruct((size,), dtype) for dtype in dtypes],
        blocks=blocks,
        backend=problem.backend,
        algorithm=name,
        flops=math.prod(shape[:-3]) * math.prod(problem.counts) * inner * problem.taps,
    )
    return [output.reshape(shape) for output in outputs]


def _vector(inner: int, dtype: DTypeLike) -> int:
    """Neighbours that a thread has: those in 16 bytes, or fewer where they are not of one pixel."""
    return math.gcd(inner, 16 // jnp.dtype(dtype).itemsize)


def default_blocks(shape: tuple[int, ...], dtype: DTypeLike) -> Blocks:
    """Blocks for a result [*batch, height, width, inner].

    n elements of it for a block, 16 bytes a thread where pixels allow; m and k are not used.
    """
    return Blocks(16, 128 * _vector(shape[-1], dtype), 16, warps=4, stages=1)


def search_space(shape: tuple[int, ...], dtype: DTypeLike) -> list[Blocks]:
    """What a tuner tries, the default first."""
    first = default_blocks(shape, dtype)
    found = [first]
    for warps in (1, 2, 4, 8):
        for chunks in (1, 2):
            n = 32 * warps * chunks * _vector(shape[-1], dtype)
            blocks = Blocks(16, n, 16, warps=warps, stages=1)
            if blocks not in found:
                found.append(blocks)
    return found
