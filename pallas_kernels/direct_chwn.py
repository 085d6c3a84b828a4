"""Direct convolution of images stored batch last, [c, h, w, b], after the design of 2012.

Krizhevsky's cuda-convnet kept the batch as the last axis so that the 32 threads of a warp read the
same pixel of 32 images: neighbours in memory, whatever the stride of the convolution. A block of
threads loads the pixels under a tap for a tile of images once, into shared memory, and multiplies
them with many filters, each thread keeping its sums in registers. So the more filters a block has
(`blocks.m`), the fewer bytes it reads for a multiplication:

  bytes read for a FLOP = itemsize / 2 · (1 / filters + 1 / pixels and images)

  filters a block            16      32      64     128     counted in the machine code of sm_90:
  bytes for a FLOP        0.070   0.039   0.023   0.016     bfloat16, 128 pixels and images, and
  registers a thread         63      84     112     159     every load of 128 bits

The same design here, with the multiplications on Tensor Cores. Rows of the product are filters;
columns are output pixels and, fastest, images, 8 of which are one 16-byte load in 16 bits. There is
no im2col matrix, and no transposition to another layout. The patch of one tap lives in shared
memory, not that of all taps: Triton cannot index it, so that taps overlap is the L1 cache's work.

  forward          y[o, p, q, b]  = Σ_{i, j, c} w[i, j, c, o] x[c, p·s + i·d - top, …, b]
  transposed       x[c, h, w, b]  = Σ_{i, j, o} w[i, j, c, o] y[o, (h + top - i·d) / s, …, b]
  kernel gradient  w[i, j, c, o]  = Σ_{p, q, b} x[c, p·s + i·d - top, …, b] y[o, p, q, b]

FLOPs: 2·b·p·q·kh·kw·c·o/groups each. Nothing is kept.
Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks",
2012; the code: https://code.google.com/archive/p/cuda-convnet.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import launch
from pallas_kernels.blocks import Blocks, ceiling
from pallas_kernels.implicit_gemm import Problem, Weights, default_blocks, finish, search_space
from pallas_kernels.taps import Seen, Walk, at, divide
from pallas_kernels.tiles import Mask, as_column, as_row, both, order, spread, under

# The blocks of the same product with its sides exchanged: m filters, n pixels and images.
__all__ = ["default_blocks", "gather", "kernel_gradient", "search_space"]


def gather(
    source: Float[Array, "c h w b"], w: Float[Array, "kh kw c_in_per_group c_out"], *rest: Array,
    problem: Problem,
) -> list[Array]:  # fmt: skip
    """The launch of either direction.

    Returns:
      The direction's output, [c, h, w, b], and the activation's argument if it is kept.
    """
    down, across = problem.axes
    images, groups = source.shape[3], problem.groups
    inner = source.shape[0] // groups
    outer = w.shape[3] // groups if problem.direction == "forward" else w.shape[2]
    m, n = outer, down.outputs * across.outputs * images
    blocks = problem.blocks or default_blocks(
        (m, n, inner * problem.rows.taps * problem.columns.taps), source.dtype,
        product=problem.product, crowded=problem.crowded,
    )  # fmt: skip
    shape = (outer * groups, down.extent, across.extent, images)
    out = jax.ShapeDtypeStruct(
        (shape[0] * down.extent * across.extent * images,), problem.out_dtype
    )
    if 0 in shape:
        return [jnp.zeros(shape, problem.out_dtype)] * (1 + problem.keeps)
    outputs = launch.call(
        partial(_gather, problem=problem, blocks=blocks, sizes=(m, n, inner), images=images),
        *(operand.reshape(-1) for operand in (source, w, *rest)),
        grid=(ceiling(m, blocks.m) * ceiling(n, blocks.n), groups, down.phases * across.phases),
        out=[out] * (1 + problem.keeps),
        blocks=blocks,
        backend=problem.backend,
        algorithm="direct_chwn",
        flops=problem.flops(images, inner * groups, outer * groups),
    )
    return [output.reshape(shape) for output in outputs]


def _gather(source_ref, w_ref, *rest, problem: Problem, blocks: Blocks, sizes, images: int):
    m, n, inner = sizes
    down, across = problem.axes
    group, phase = pl.program_id(1), pl.program_id(2)
    phase_down, phase_across = divide(phase, across.phases)
    tile_row, tile_column = order(pl.program_id(0), m, n, blocks)
    channel = tile_row * blocks.m + lax.iota(jnp.int32, blocks.m)
    place = tile_column * blocks.n + lax.iota(jnp.int32, blocks.n)
    pixel, image = divide(place, images)
    row, column = divide(pixel, across.outputs)

    # Fewer channels than a tile is deep: taps of a kernel's row go into one tile with them.
    merged = problem.direction == "forward" and problem.groups == 1 and inner < blocks.k
    length = inner * problem.columns.taps if merged else inner
    walk = Walk(
        at(down.count, phase_down),
        1 if merged else at(across.count, phase_across),
        ceiling(length, blocks.k),
    )
    source_row = row * down.stride + at(down.offset, phase_down)
    source_column = column * across.stride + at(across.offset, phase_across)
    if n % blocks.n:
        source_row = jnp.where(place < n, source_row, -(2**30))
    plane = down.source * across.source * images
    base = (source_row * across.source + source_column) * images + image
    k = lax.iota(jnp.int32, blocks.k)
    always = n % blocks.n == 0
    seen = Seen.make(source_row, source_column, down, across, always=always, merged=merged)
    weights = Weights(problem, k, channel, group, sizes=(inner, m, inner))

    def step(_, carry):
        u, v, block, accumulator = carry
        depth = block * blocks.k
        inside = depth + k < length if length % blocks.k else None
        if merged:
            tap, c = divide(depth + k, inner)
            mask: Mask = None
            if down.leave or not always:
                mask = as_row(under(source_row + u * down.shift, down.source))
            if across.leave:
                seen_at = source_column[None, :] + (tap * across.shift)[:, None]
                mask = both(mask, under(seen_at, across.source))
            places = base[None, :] + (c * plane + tap * (across.shift * images))[:, None]
            shift = u * (down.shift * across.source * images)
        else:
            mask = as_row(seen.tap(u, v))
            places = base[None, :] + (k * plane)[:, None]
            shift = (u * (down.shift * across.source) + v * across.shift) * images
            shift = shift + (group * inner + depth) * plane
        pixels = launch.load(
            source_ref.at[places + shift], spread(both(mask, as_column(inside)), places.shape)
        )
        i = at(down.first, phase_down) + u * down.step
        j = at(across.first, phase_across) + v * across.step
        tile = weights.load(w_ref, i * problem.columns.taps + j, depth, inside).T
        return *walk.next(u, v, block), launch.dot(tile, pixels, accumulator, problem.product)

    zero, start = jnp.zeros((blocks.m, blocks.n), jnp.float32), jnp.int32(0)
    *_, accumulator = lax.fori_loop(0, walk.steps, step, (start, start, start, zero))

    out_row = row * down.phases + phase_down
    out_column = column * across.phases + phase_across
    there: Mask = as_row(place < n) if n % blocks.n else None
    for axis, position in ((down, out_row), (across, out_column)):
        if axis.ragged:
            there = both(there, as_row(position < axis.extent))
    there = both(there, as_column(channel < m) if m % blocks.m else None)
    out_channel = (group * m + channel)[:, None]
    out_place = (out_row * across.extent + out_column) * images + image
    places = out_channel * (down.extent * across.extent * images) + out_place[None, :]
    finish(rest, accumulator, problem, places=places, there=there, channel=out_channel)


def kernel_gradient(
    x: Float[Array, "c h w b"], dy: Float[Array, "o p q b"], *, problem: Problem
) -> Float[Array, "kh kw c_in_per_group o"]:
    """The launch of the kernel's gradient."""
    groups, images = problem.groups, x.shape[3]
    inner, n = x.shape[0] // groups, dy.shape[0] // groups
    m = problem.rows.taps * problem.columns.taps * inner
    pixels = problem.rows.count * problem.columns.count
    blocks = problem.blocks or default_blocks(
        (m, n, pixels * images), x.dtype, product=problem.product, batch=groups, sums=True
    )
    dtype = problem.out_dtype if blocks.splits == 1 else jnp.float32
    (parts,) = launch.call(
        partial(_sum_over_pixels, problem=problem, blocks=blocks, sizes=(m, n, inner, images)),
        x.reshape(-1),
        dy.reshape(-1),
        grid=(ceiling(m, blocks.m) * ceiling(n, blocks.n), blocks.splits, groups),
        out=[jax.ShapeDtypeStruct((blocks.splits * m * n * groups,), dtype)],
        blocks=blocks,
        backend=problem.backend,
        algorithm="direct_chwn",
        flops=problem.flops(images, inner * groups, n * groups),
    )
    if blocks.splits > 1:
        parts = parts.reshape(blocks.splits, -1).sum(0).astype(problem.out_dtype)
    return parts.reshape(problem.rows.taps, problem.columns.taps, inner, n * groups)


def _sum_over_pixels(x_ref, dy_ref, out_ref, *, problem: Problem, blocks: Blocks, sizes):
    m, n, inner, images = sizes
    groups, part, group = problem.groups, pl.program_id(1), pl.program_id(2)
    down, across = problem.axes
    tile_row, tile_column = order(pl.program_id(0), m, n, blocks)
    tap_channel = tile_row * blocks.m + lax.iota(jnp.int32, blocks.m)
    tap, c = divide(tap_channel, inner)
    i, j = divide(tap, problem.columns.taps)
    channel = tile_column * blocks.n + lax.iota(jnp.int32, blocks.n)
    row_there = tap_channel < m if m % blocks.m else None
    channel_there = channel < n if n % blocks.n else None
    first_row, first_column = i * down.shift + down.offset[0], j * across.shift + across.offset[0]

    k = lax.iota(jnp.int32, blocks.k)
    batches = ceiling(images, blocks.k)
    pixels = down.outputs * across.outputs
    steps = ceiling(pixels * batches, blocks.splits)
    plane = down.source * across.source * images
    x_base = (group * inner + c) * plane + (first_row * across.source + first_column) * images
    dy_base = (group * n + channel) * (pixels * images)

    def step(index, accumulator):
        pixel, batch = divide(part * steps + index, batches)
        row, column = divide(pixel, across.outputs)
        image = batch * blocks.k + k
        image_there = image < images if images % blocks.k else None
        if pixels * batches % blocks.splits:
            image_there = both(image_there, jnp.broadcast_to(pixel < pixels, image.shape))
        mask = row_there
        for axis, first, position in (
            (down, first_row, row),
            (across, first_column, column),
        ):
            if axis.leave:
                mask = both(mask, under(first + position * axis.stride, axis.source))
        shift = (row * down.stride * across.source + column * across.stride) * images
        seen = launch.load(
            x_ref.at[x_base[:, None] + (shift + image)[None, :]],
            spread(both(as_column(mask), as_row(image_there)), (blocks.m, blocks.k)),
        )
        gradient = launch.load(
            dy_ref.at[dy_base[:, None] + (pixel * images + image)[None, :]],
            spread(both(as_column(channel_there), as_row(image_there)), (blocks.n, blocks.k)),
        )
        return launch.dot(seen, gradient.T, accumulator, problem.product)

    zero = jnp.zeros((blocks.m, blocks.n), jnp.float32)
    accumulator = lax.fori_loop(0, steps, step, zero)
    rows = (part * m + tap_channel) * (n * groups)
    launch.store(
        out_ref.at[rows[:, None] + (group * n + channel)[None, :]],
        accumulator,
        spread(both(as_column(row_there), as_row(channel_there)), (blocks.m, blocks.n)),
    )
