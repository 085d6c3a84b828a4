"""The kernels of `cross_entropy`: each reads the logits once, in their own dtype.

Forward, a block of threads has `group` rows and walks over their classes, `n` at a time with the
next ones on their way. It keeps the largest logit so far and the sum of exp(logit - largest), which
shrinks when a larger one is found (Milakov and Gimelshein, "Online normalizer calculation for
softmax", arXiv:1805.02867). Backward, a block has `group` rows of `n` classes and no loop.

Labels are [0, n), or below 0 for none: the loss is NaN then, and the gradient 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import launch, tiles
from pallas_kernels.blocks import Blocks, ceiling
from pallas_kernels.launch import Backend
from pallas_kernels.tiles import Span, span


def forward(
    logits: Float[Array, "rows n"],
    labels: Int32[Array, " rows"],
    *,
    smoothing: float,
    blocks: Blocks,
    backend: Backend,
) -> list[Array]:
    """The loss, the largest logit and log Σ exp(logits - largest) of each row."""
    rows, classes = logits.shape
    flat = _reads_flat(classes, logits.dtype, blocks)
    return launch.call(
        partial(_forward, flat=flat, classes=classes, smoothing=smoothing, blocks=blocks),
        logits.reshape(1, -1) if flat else logits,
        labels,
        grid=(ceiling(rows, blocks.group),),
        out=[jax.ShapeDtypeStruct((rows,), jnp.float32)] * 3,
        blocks=blocks,
        backend=backend,
        algorithm="cross_entropy",
        flops=5 * logits.size,
    )


def _forward(
    logits_ref,
    labels_ref,
    loss_ref,
    top_ref,
    log_sum_ref,
    *,
    flat: bool,
    classes: int,
    smoothing: float,
    blocks: Blocks,
):
    (count,) = labels_ref.shape
    rows = span(pl.program_id(0), blocks.group, count)
    label = tiles.load(labels_ref, rows)
    row = jnp.minimum(rows.start + lax.iota(jnp.int32, blocks.group), count - 1)
    category = jnp.maximum(label, 0)
    if flat:
        sums = _sums_of_a_row(logits_ref, rows.start * classes, classes, blocks)
        at_label = launch.load(logits_ref.at[jnp.int32(0), row * classes + category])
    else:
        sums = _sums_of_rows(logits_ref, rows, classes, blocks)
        at_label = launch.load(logits_ref.at[row, category])
    top, log_sum = _finite(sums.top)[:, 0], jnp.log(jnp.sum(sums.total, 1))
    loss = log_sum + (1 - smoothing) * (top - at_label.astype(jnp.float32))
    if smoothing:
        below = jnp.sum(sums.below, 1) + sums.moved[:, 0]
        loss = loss - smoothing / classes * below
    tiles.store(loss_ref, rows, value=jnp.where(label >= 0, loss, jnp.nan))
    tiles.store(top_ref, rows, value=top)
    tiles.store(log_sum_ref, rows, value=log_sum)


def _sums_of_rows(ref: Any, rows: Span, classes: int, blocks: Blocks) -> "_Sums":
    def load(index):
        return tiles.load(ref, rows, span(index, blocks.n, classes))

    def step(index, state):
        logits, sums = state
        return load(index + 1), sums.add(logits, index * blocks.n)

    # Only the last tile can have less than all of its classes.
    last = ceiling(classes, blocks.n) - 1
    start = load(jnp.int32(0)), _Sums.of_none(blocks)
    logits, sums = lax.fori_loop(0, last, step, start)
    return sums.add(logits, last * blocks.n, span(jnp.int32(last), blocks.n, classes).inside)


def _sums_of_a_row(ref: Any, start: Any, classes: int, blocks: Blocks) -> "_Sums":
    """The sums of `classes` logits from `start` on, which may lie anywhere.

    Loads are wide from where 16 bytes begin; what is before that and what is left are one tile.
    """
    wide = _elements_of_a_wide_load(ref.dtype)
    first = lax.div(start + (wide - 1), wide) * wide
    steps = (classes - 1) // blocks.n
    left = classes - steps * blocks.n
    lane = lax.iota(jnp.int32, blocks.n)

    def load(index):
        there = jnp.broadcast_to(index < steps, (1, blocks.n))
        return launch.load(ref.at[pl.ds(0, 1), pl.ds(first + index * blocks.n, blocks.n)], there)

    def step(index, state):
        logits, sums = state
        return load(index + 1), sums.add(logits, left + index * blocks.n)

    position = start + lane + jnp.where(lane < first - start, 0, steps * blocks.n)
    position = jnp.minimum(position, ref.shape[1] - 1)[None, :]
    rest = launch.load(ref.at[jnp.zeros_like(position), position], (lane < left)[None, :])
    sums = _Sums.of_none(blocks).add(rest, 0, lane < left)
    return lax.fori_loop(0, steps, step, (load(jnp.int32(0)), sums))[1]


def _elements_of_a_wide_load(dtype: Any) -> int:
    return 16 // jnp.dtype(dtype).itemsize


def _reads_flat(classes: int, dtype: Any, blocks: Blocks) -> bool:
    """Whether rows begin anywhere, so that a tile of them could not be loaded 16 bytes at a time.

    What is left of a row after its tiles has to be as long as what is before the first of them.
    """
    wide = _elements_of_a_wide_load(dtype)
    left = (classes - 1) % blocks.n + 1
    return blocks.group == 1 and classes > blocks.n and classes % wide != 0 and left >= wide - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Sums:
    """What is known of the classes so far, of which each column has every n-th."""

    top: Float[Array, "m 1"]
    """The largest logit."""
    total: Float[Array, "m n"]
    """Of exp(logit - top)."""
    below: Float[Array, "m n"]
    """Of logit - top, with the top as it was then; what it has moved since is in `moved`."""
    moved: Float[Array, "m 1"]

    @classmethod
    def of_none(cls, blocks: Blocks) -> "_Sums":
        one, all_of_it = (
            jnp.zeros((blocks.group, columns), jnp.float32) for columns in (1, blocks.n)
        )
        return cls(one - jnp.inf, all_of_it, all_of_it, one)

    def add(
        self, logits: Float[Array, "m n"], before: Any, inside: Bool[Array, " n"] | None = None
    ) -> "_Sums":
        """The sums with the logits of n more classes, or those `inside`; `before` were there."""
        logits = logits.astype(jnp.float32)
        there = tiles.spread(tiles.as_row(inside), logits.shape)
        if there is not None:
            logits = jnp.where(there, logits, -jnp.inf)
        top = jnp.maximum(self.top, jnp.max(logits, 1, keepdims=True))
        rise = _finite(top) - _finite(self.top)
        below = logits - _finite(top)
        total = self.total * _exp(-rise) + _exp(below)
        if there is not None:
            below = jnp.where(there, below, 0)
        before = jnp.asarray(before, jnp.float32)
        return _Sums(top, total, self.below + below, self.moved - before * rise)


def _finite(top: Array) -> Array:
    """Infinite logits are compared with 0, from which they differ as they should."""
    return jnp.where(jnp.abs(top) < jnp.inf, top, 0)


def _exp(x: Array) -> Array:
    """exp, as the one instruction that a GPU has for it: of a power of two."""
    return jnp.exp2(x * math.log2(math.e))


def backward(
    logits: Float[Array, "rows n"],
    labels: Int32[Array, " rows"],
    top: Float[Array, " rows"],
    log_sum: Float[Array, " rows"],
    d_loss: Float[Array, " rows"],
    *,
    smoothing: float,
    blocks: Blocks,
    backend: Backend,
) -> Array:
    """The gradient of the logits; 0 in rows whose loss has none, whatever their logits are."""
    rows, classes = shape = logits.shape
    size = blocks.group * blocks.n
    wide = _elements_of_a_wide_load(logits.dtype)
    # As `_reads_flat`, but that a tile goes on into the next row, and into no third.
    flat = classes % wide != 0 and logits.size % wide == 0 and size <= classes
    if flat:
        kernel, logits, grid = _backward_flat, logits.reshape(-1), (ceiling(logits.size, size),)
    else:
        kernel, grid = _backward, (ceiling(rows, blocks.group), ceiling(classes, blocks.n))
    (gradient,) = launch.call(
        partial(kernel, classes=classes, smoothing=smoothing, blocks=blocks),
        logits,
        labels,
        top,
        log_sum,
        d_loss,
        grid=grid,
        out=[jax.ShapeDtypeStruct(logits.shape, logits.dtype)],
        blocks=blocks,
        backend=backend,
        algorithm="cross_entropy_gradient",
        flops=5 * logits.size,
    )
    return gradient.reshape(shape)


def _backward(logits_ref, *refs, classes: int, smoothing: float, blocks: Blocks):
    *refs, gradient_ref = refs
    rows = span(pl.program_id(0), blocks.group, logits_ref.shape[0])
    columns = span(pl.program_id(1), blocks.n, classes)
    logits = tiles.load(logits_ref, rows, columns)
    shape = logits.shape
    label, *of_rows = (tiles.load(ref, rows)[:, None] for ref in refs)
    column = (columns.start + lax.iota(jnp.int32, blocks.n))[None, :]
    of_label = jnp.broadcast_to(column, shape) == jnp.broadcast_to(label, shape)
    gradient = _gradient(logits, of_label, of_rows, smoothing, classes)
    tiles.store(gradient_ref, rows, columns, value=gradient)


def _backward_flat(logits_ref, *refs, classes: int, smoothing: float, blocks: Blocks):
    """Of a tile that begins where 16 bytes do, in one row, and may end in the next."""
    *refs, gradient_ref = refs
    tile = span(pl.program_id(0), blocks.group * blocks.n, logits_ref.shape[0])
    row = lax.div(tile.start, classes)
    both = row, jnp.minimum(row + 1, refs[0].shape[0] - 1)
    end = classes - (tile.start - row * classes)
    lane = lax.iota(jnp.int32, tile.size)
    (label, next_label), *of_rows = ([launch.load(ref.at[i]) for i in both] for ref in refs)
    logits = tiles.load(logits_ref, tile)
    # A label below 0 is none, and could be that of the row before.
    label = jnp.where(label >= 0, label - classes + end, -1)
    next_label = jnp.where(next_label >= 0, next_label + end, -1)

    def in_one_row(logits):
        here = [each for each, _ in of_rows]
        return _gradient(logits, lane == label, here, smoothing, classes)

    def in_two_rows(logits):
        of_label = (lane == label) | (lane == next_label)
        of_lanes = [jnp.where(lane < end, here, below) for here, below in of_rows]
        return _gradient(logits, of_label, of_lanes, smoothing, classes)

    gradient = lax.cond(end >= tile.size, in_one_row, in_two_rows, logits)
    tiles.store(gradient_ref, tile, value=gradient)


def _gradient(
    logits: Array,
    of_label: Array,
    of_rows: Sequence[Array],
    smoothing: float,
    classes: int,
) -> Array:
    """(softmax - target) · d_loss, element by element; `of_rows` are top, log_sum and d_loss."""
    top, log_sum, d_loss = of_rows
    even = smoothing / classes
    share = _exp(logits.astype(jnp.float32) - top - log_sum)
    target = jnp.where(of_label, 1 - smoothing + even, even)
    lossless = jnp.broadcast_to(d_loss == 0, logits.shape)
    return jnp.where(lossless, 0, d_loss * (share - target)).astype(logits.dtype)
