"""Convolution as a matrix product whose left matrix is never built: NHWC, on Tensor Cores.

  forward          y[b, p, q, o]  = Σ_{i, j, c} x[b, p·s + i·d - top, …, c] w[i, j, c, o]
  transposed       x[b, h, w, c]  = Σ_{i, j, o} y[b, (h + top - i·d) / s, …, o] w[i, j, c, o]
  kernel gradient  w[i, j, c, o]  = Σ_{b, p, q} x[b, p·s + i·d - top, …, c] y[b, p, q, o]

The first two are one kernel. Its rows are output pixels, its columns output channels, and its k
loop walks over the taps and the channels of the source (`taps`): a step loads, for every output
pixel of the tile, the source pixel under one tap, and zero where that is padding. What `im2col`
writes to memory is here an address. Where the taps of a kernel's row lie side by side (dilation 1,
one group), they and the channels are one run of kw·c numbers in x and in w alike, so that a stem of
three channels fills its tiles too.

The kernel gradient sums over all pixels of all images for few numbers: the sum is split over blocks
of threads, and XLA adds the parts, always in the same order.

What the compiler makes of 3×3, 128 → 128 channels, bfloat16, on sm_90, beside the matrix product
with the same tiles (Triton 3.9; in issue slots a matrix cycle, see `matmul`):

  m×n×k, warps, stages     convolution   product   ratio
  256×128×64, 8, 3                0.66      0.44    1.49     the default
  128×128×64, 8, 3                0.96      0.69    1.40
  128×256×64, 8, 3                0.54      0.39    1.39     256 → 256 channels

A 16-byte load of x takes 8 instructions here and 4 there: a shift of its address by the tap, and a
mask. To compare rows and columns with the image's sides in every step took 17 more an iteration
(142 for 125 at 128×128×64), so `taps.Seen` keeps one bit a tap; to add up the address of w in every
step, 12 of those 17.

FLOPs: 2·b·p·q·kh·kw·c·o/groups each. Bytes at best: every operand once; that taps overlap is the
caches' work. Nothing is kept.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import epilogue, launch
from pallas_kernels.blocks import Blocks, ceiling
from pallas_kernels.calls import Conv2d
from pallas_kernels.epilogue import Activation
from pallas_kernels.launch import Backend, Product
from pallas_kernels.matmul import default_blocks as matmul_blocks
from pallas_kernels.matmul import search_space as matmul_search_space
from pallas_kernels.taps import Direction, Seen, Taps, Walk, at, divide, pixel_of, taps
from pallas_kernels.tiles import Mask, as_column, as_row, both, order, spread, under
from pallas_kernels.windows import Windows


@dataclass(frozen=True)
class Problem:
    """All there is to know about a launch but its arrays."""

    rows: Windows
    columns: Windows
    groups: int
    channels_of_group: tuple[int, int]
    """(c_in, c_out) of one group."""
    product: Product
    out_dtype: Any
    backend: Backend
    blocks: Blocks | None = None
    direction: Direction = "forward"
    activation: Activation | None = None
    biased: bool = False
    added: bool = False
    """Whether there is a residual."""
    keeps: bool = False
    """Whether the activation's argument is an output too."""
    call: Conv2d | None = None
    """The convolution whose passes the tuner is asked about, if it is asked at all."""

    def terms(self, rest: Any) -> tuple[Any, Any]:
        """(bias, residual) of the operands after the source and the kernel."""
        bias = rest[0] if self.biased else None
        return bias, rest[self.biased] if self.added else None

    @property
    def axes(self) -> tuple[Taps, Taps]:
        """The taps down and across."""
        return taps(self.rows, self.direction), taps(self.columns, self.direction)

    @property
    def crowded(self) -> bool:
        return epilogue.crowds(self.activation, added=self.added, keeps=self.keeps)

    def flops(self, images: int, c_in: int, c_out: int) -> int:
        """Of c_in and c_out channels in all."""
        outputs = images * self.rows.count * self.columns.count
        return 2 * outputs * self.rows.taps * self.columns.taps * c_in * c_out // self.groups


def gather(
    source: Float[Array, "b h w c"], w: Float[Array, "kh kw c_in_per_group c_out"], *rest: Array,
    problem: Problem,
) -> list[Array]:  # fmt: skip
    """The launch of either direction.

    Returns:
      The direction's output, [b, h, w, c], and the activation's argument if it is kept.
    """
    down, across = problem.axes
    images, groups = source.shape[0], problem.groups
    inner = source.shape[3] // groups
    outer = w.shape[3] // groups if problem.direction == "forward" else w.shape[2]
    m, n = images * down.outputs * across.outputs, outer
    blocks = problem.blocks or default_blocks(
        (m, n, inner * problem.rows.taps * problem.columns.taps), source.dtype,
        product=problem.product, crowded=problem.crowded,
    )  # fmt: skip
    shape = (images, down.extent, across.extent, outer * groups)
    out = jax.ShapeDtypeStruct(
        (images * down.extent * across.extent * shape[3],), problem.out_dtype
    )
    if 0 in shape:
        return [jnp.zeros(shape, problem.out_dtype)] * (1 + problem.keeps)
    outputs = launch.call(
        partial(_gather, problem=problem, blocks=blocks, sizes=(m, n, inner)),
        *(operand.reshape(-1) for operand in (source, w, *rest)),
        grid=(ceiling(m, blocks.m) * ceiling(n, blocks.n), groups, down.phases * across.phases),
        out=[out] * (1 + problem.keeps),
        blocks=blocks,
        backend=problem.backend,
        algorithm="implicit_gemm",
        flops=problem.flops(images, inner * groups, outer * groups),
    )
    return [output.reshape(shape) for output in outputs]


def _gather(source_ref, w_ref, *rest, problem: Problem, blocks: Blocks, sizes):
    m, n, inner = sizes
    down, across = problem.axes
    group, phase = pl.program_id(1), pl.program_id(2)
    phase_down, phase_across = divide(phase, across.phases)
    tile_row, tile_column = order(pl.program_id(0), m, n, blocks)
    pixel = tile_row * blocks.m + lax.iota(jnp.int32, blocks.m)
    channel = tile_column * blocks.n + lax.iota(jnp.int32, blocks.n)
    image, row, column = pixel_of(pixel, down.outputs, across.outputs)

    merged = _merges(problem, inner, blocks)
    length = inner * problem.columns.taps if merged else inner
    walk = Walk(
        at(down.count, phase_down),
        1 if merged else at(across.count, phase_across),
        ceiling(length, blocks.k),
    )
    channels = inner * problem.groups
    source_row = row * down.stride + at(down.offset, phase_down)
    source_column = column * across.stride + at(across.offset, phase_across)
    if m % blocks.m:
        # A pixel that is not there sees rows that are not there, so one mask does for both.
        source_row = jnp.where(pixel < m, source_row, -(2**30))
    base = ((image * down.source + source_row) * across.source + source_column) * channels
    k = lax.iota(jnp.int32, blocks.k)
    places = (base + group * inner)[:, None] + k[None, :]
    always = m % blocks.m == 0
    seen = Seen.make(source_row, source_column, down, across, always=always, merged=merged)
    weights = Weights(problem, k, channel, group, sizes)

    def step(_, carry):
        u, v, block, accumulator = carry
        depth = block * blocks.k
        inside = depth + k < length if length % blocks.k else None
        mask = seen.run(u, channels, depth + k) if merged else as_column(seen.tap(u, v))
        shift = (u * (down.shift * across.source) + v * across.shift) * channels + depth
        pixels = launch.load(
            source_ref.at[places + shift], spread(both(mask, as_row(inside)), places.shape)
        )
        i = at(down.first, phase_down) + u * down.step
        j = at(across.first, phase_across) + v * across.step
        tile = weights.load(w_ref, i * problem.columns.taps + j, depth, inside)
        return *walk.next(u, v, block), launch.dot(pixels, tile, accumulator, problem.product)

    zero, start = jnp.zeros((blocks.m, blocks.n), jnp.float32), jnp.int32(0)
    *_, accumulator = lax.fori_loop(0, walk.steps, step, (start, start, start, zero))

    out_row = row * down.phases + phase_down
    out_column = column * across.phases + phase_across
    there: Mask = None
    if m % blocks.m:
        there = (pixel < m)[:, None]
    for axis, position in ((down, out_row), (across, out_column)):
        if axis.ragged:
            there = both(there, (position < axis.extent)[:, None])
    out_pixel = (image * down.extent + out_row) * across.extent + out_column
    finish(
        rest,
        accumulator,
        problem,
        places=(out_pixel * (n * problem.groups))[:, None] + (group * n + channel)[None, :],
        there=both(there, (channel < n)[None, :] if n % blocks.n else None),
        channel=(group * n + channel)[None, :],
    )


def _merges(problem: Problem, inner: int, blocks: Blocks) -> bool:
    """Whether the k loop takes a kernel's row and the channels as one run of numbers.

    They are one where taps are neighbours and channels in one group; where tiles are full anyway a
    mask of taps is cheaper.
    """
    one_run = problem.groups == 1 and problem.columns.dilation == 1
    return problem.direction == "forward" and one_run and inner % blocks.k > 0


@dataclass(frozen=True)
class Weights:
    """The [k, n] tiles of w that a tile of the output is multiplied with."""

    problem: Problem
    k: Int[Array, " k"]
    channel: Int[Array, " n"]
    group: Any
    sizes: tuple[int, int, int]

    def load(self, w_ref: Any, tap: Any, depth: Any, inside: Mask) -> Float[Array, "k n"]:
        """The tile of channels depth + k of the source, at a tap of the kernel."""
        _, n, inner = self.sizes
        there = self.channel < n if n % self.channel.shape[0] else None
        channels_forward, channels_transposed = n * self.problem.groups, inner * self.problem.groups
        # All that does not change from step to step is added up first: it is made once.
        if self.problem.direction == "forward":
            fixed = (self.k * channels_forward)[:, None]
            fixed = fixed + (self.group * n + self.channel)[None, :]
            places = fixed + (tap * inner + depth) * channels_forward
            mask = both(as_column(inside), as_row(there))
            return launch.load(w_ref.at[places], spread(mask, places.shape))
        fixed = (self.channel * channels_transposed + self.group * inner)[:, None]
        places = fixed + self.k[None, :] + (tap * n * channels_transposed + depth)
        mask = both(as_column(there), as_row(inside))
        return launch.load(w_ref.at[places], spread(mask, places.shape)).T


def finish(
    rest: Any, accumulator: Array, problem: Problem, *, places: Array, there: Mask, channel: Array
) -> None:
    """Applies the epilogue to a tile and writes it.

    Args:
      rest: references to the bias, the residual and the outputs, each of one axis.
      accumulator: the tile's sums.
      problem: whose epilogue it is.
      places: of the tile's elements in the residual and the outputs.
      there: which of them the outputs have.
      channel: of the tile's rows or columns, in a shape that broadcasts.
    """
    bias_ref, residual_ref = problem.terms(rest)
    mask = spread(there, accumulator.shape)
    bias = residual = None
    if bias_ref is not None:
        bias = launch.load(bias_ref.at[channel], spread(channel < bias_ref.shape[0], channel.shape))
    if residual_ref is not None:
        residual = launch.load(residual_ref.at[places], mask)
    y, z = epilogue.apply_in_kernel(
        accumulator, bias=bias, residual=residual, activation=problem.activation
    )
    for ref, value in zip(rest[problem.biased + problem.added :], (y, z), strict=False):
        launch.store(ref.at[places], value, mask)


def kernel_gradient(
    x: Float[Array, "b h w c"], dy: Float[Array, "b p q o"], *, problem: Problem
) -> Float[Array, "kh kw c_in_per_group o"]:
    """The launch of the kernel's gradient."""
    groups = problem.groups
    inner, n = x.shape[3] // groups, dy.shape[3] // groups
    pixels = dy.shape[0] * problem.rows.count * problem.columns.count
    merged = problem.groups == 1 and problem.columns.dilation == 1 and inner < 128
    runs = problem.rows.taps * (1 if merged else problem.columns.taps)
    length = inner * problem.columns.taps if merged else inner
    blocks = problem.blocks or default_blocks(
        (length, n, pixels),
        x.dtype,
        product=problem.product,
        batch=runs * groups,
        sums=True,
        narrow=inner % 8 > 0,
    )
    size = runs * length * n * groups
    dtype = problem.out_dtype if blocks.splits == 1 else jnp.float32
    (parts,) = launch.call(
        partial(
            _sum_over_pixels, problem=problem, blocks=blocks, sizes=(inner, length, n, pixels, runs)
        ),
        x.reshape(-1),
        dy.reshape(-1),
        grid=(runs * ceiling(length, blocks.m) * ceiling(n, blocks.n), blocks.splits, groups),
        out=[jax.ShapeDtypeStruct((blocks.splits * size,), dtype)],
        blocks=blocks,
        backend=problem.backend,
        algorithm="implicit_gemm",
        flops=problem.flops(x.shape[0], inner * groups, n * groups),
    )
    if blocks.splits > 1:
        parts = parts.reshape(blocks.splits, size).sum(0).astype(problem.out_dtype)
    return parts.reshape(problem.rows.taps, problem.columns.taps, inner, n * groups)


def _sum_over_pixels(x_ref, dy_ref, out_ref, *, problem: Problem, blocks: Blocks, sizes):
    inner, length, n, pixels, runs = sizes
    groups, part, group = problem.groups, pl.program_id(1), pl.program_id(2)
    down, across = problem.axes
    tiles_of_run = ceiling(length, blocks.m) * ceiling(n, blocks.n)
    run, tile = divide(pl.program_id(0), tiles_of_run)
    tile_row, tile_column = order(tile, length, n, blocks)
    merged = length > inner
    i, j = (run, 0) if merged else divide(run, problem.columns.taps)

    depth = tile_row * blocks.m + lax.iota(jnp.int32, blocks.m)
    channel = tile_column * blocks.n + lax.iota(jnp.int32, blocks.n)
    depth_there = depth < length if length % blocks.m else None
    channel_there = channel < n if n % blocks.n else None
    channels = inner * groups
    row_offset, column_offset = down.offset[0] + i * down.shift, across.offset[0] + j * across.shift
    k = lax.iota(jnp.int32, blocks.k)
    steps = ceiling(ceiling(pixels, blocks.k), blocks.splits)

    def step(index, accumulator):
        pixel = (part * steps + index) * blocks.k + k
        pixel_there = pixel < pixels if pixels % (steps * blocks.splits * blocks.k) else None
        image, row, column = pixel_of(pixel, down.outputs, across.outputs)
        row = row * down.stride + row_offset
        column = column * across.stride + column_offset
        base = ((image * down.source + row) * across.source + column) * channels + group * inner
        mask = both(as_column(pixel_there), as_row(depth_there))
        if down.leave:
            mask = both(mask, under(row, down.source)[:, None])
        if across.leave and merged:
            place = (column * channels)[:, None] + depth[None, :]
            mask = both(mask, under(place, across.source * channels))
        elif across.leave:
            mask = both(mask, under(column, across.source)[:, None])
        seen = launch.load(
            x_ref.at[base[:, None] + depth[None, :]], spread(mask, (blocks.k, blocks.m))
        )
        gradient = launch.load(
            dy_ref.at[(pixel * (n * groups))[:, None] + (group * n + channel)[None, :]],
            spread(both(as_column(pixel_there), as_row(channel_there)), (blocks.k, blocks.n)),
        )
        return launch.dot(seen.T, gradient, accumulator, problem.product)

    zero = jnp.zeros((blocks.m, blocks.n), jnp.float32)
    accumulator = lax.fori_loop(0, steps, step, zero)
    place = (part * runs + run) * length + depth
    launch.store(
        out_ref.at[(place * (n * groups))[:, None] + (group * n + channel)[None, :]],
        accumulator,
        spread(both(as_column(depth_there), as_row(channel_there)), (blocks.m, blocks.n)),
    )


def default_blocks(
    shape: tuple[int, int, int],
    dtype: DTypeLike,
    *,
    product: Product | None = None,
    crowded: bool = False,
    batch: int = 1,
    sums: bool = False,
    narrow: bool = False,
) -> Blocks:
    """Blocks for the product (m, n, k) that a convolution is: see `matmul.default_blocks`.

    Args:
      shape: of forward and transposed: output pixels, output channels, taps times source channels;
        of the kernel's gradient: a run of taps and channels, output channels, output pixels.
      dtype: of the operands.
      product: how float32 is multiplied.
      crowded: that the epilogue leaves too few registers for the largest tiles.
      batch: products of this shape in the launch.
      sums: that it is a kernel's gradient, the only one whose sum may be split.
      narrow: that channels fill no 16-byte load: with more, smaller loads the tiles are shallower.
    """
    blocks = matmul_blocks(
        shape, dtype, product=product, batch=batch, crowded=crowded or sums, splits=sums
    )
    # Both addresses of a gradient change in every step: deeper tiles spill, on sm_80 or elsewhere.
    if narrow:
        blocks = replace(blocks, m=max(blocks.m, 64), k=min(blocks.k, 32))
    # With 80 registers a thread, three stages of tf32 are too many on sm_80.
    wide = jnp.dtype(dtype).itemsize > 2
    if wide and blocks.m * blocks.n == (64 * 64 if narrow else 128 * 64):
        blocks = replace(blocks, stages=2)
    if sums and not narrow and blocks.m * blocks.n in (128 * 64, 128 * 16):
        return replace(blocks, k=min(blocks.k, 32), stages=3)
    return blocks


def search_space(
    shape: tuple[int, int, int], dtype: DTypeLike, *, sums: bool = False
) -> list[Blocks]:
    """What a tuner tries for a convolution, the default first: see `default_blocks`."""
    found = [default_blocks(shape, dtype, sums=sums)]
    for blocks in matmul_search_space(shape, dtype):
        if (sums or blocks.splits == 1) and blocks not in found:
            found.append(blocks)
    return found
