"""Which tile a block of threads makes, and what it reads and writes, with masks at the edges.

A mask costs instructions, so there is one only where it can be false: where the size of the array,
known before tracing, is no multiple of the tile's. None stands for a mask that is true everywhere.

Divisions are `jax.lax`'s: those of the operators mix booleans with integers, which Triton cannot
lower.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool

from pallas_kernels import launch
from pallas_kernels.blocks import Blocks, ceiling

Mask = Bool[Array, "..."] | None


def order(program: Any, m: int, n: int, blocks: Blocks) -> tuple[Any, Any]:
    """(row, column) of the tile that a program makes: `group` rows of tiles, column by column.

    Blocks of threads that run at one time then share rows of one operand and columns of the other
    in the L2 cache (Triton's tutorial 3).
    """
    rows, columns = ceiling(m, blocks.m), ceiling(n, blocks.n)
    group = lax.div(program, blocks.group * columns)
    inside = lax.rem(program, blocks.group * columns)
    height = jnp.minimum(rows - group * blocks.group, blocks.group)
    return group * blocks.group + lax.rem(inside, height), lax.div(inside, height)


def both(a: Mask, b: Mask) -> Mask:
    """a and b, of shapes that broadcast."""
    if a is None or b is None:
        return b if a is None else a
    shape = jnp.broadcast_shapes(a.shape, b.shape)
    return jnp.broadcast_to(a, shape) & jnp.broadcast_to(b, shape)


def spread(mask: Mask, shape: tuple[int, ...]) -> Mask:
    """`mask` in the shape of a tile."""
    return None if mask is None else jnp.broadcast_to(mask, shape)


def as_row(mask: Mask) -> Mask:
    return None if mask is None else mask[None, :]


def as_column(mask: Mask) -> Mask:
    return None if mask is None else mask[:, None]


def under(position: Array, limit: int) -> Bool[Array, "..."]:
    """0 <= position < limit, in one comparison: negative numbers are large unsigned ones."""
    return position.astype(jnp.uint32) < jnp.uint32(limit)


@dataclass(frozen=True)
class Span:
    """`size` indices along an axis, from `start` on."""

    start: Any
    size: int
    inside: Bool[Array, " size"] | None
    """Which of them the axis has; None where all."""


def span(index: Any, size: int, limit: int, *, covered: int | None = None) -> Span:
    """The `index`-th tile along an axis of `limit` indices.

    All tiles together cover `covered` indices, by default the next multiple of `size`.
    """
    start = index * size
    whole = limit % size == 0 if covered is None else covered == limit
    inside = None if whole else lax.iota(jnp.int32, size) < limit - start
    return Span(start, size, inside)


def load(ref: Any, *index: Any) -> Array:
    """The tile of `ref` at spans and scalar indices, zero outside the array."""
    view, mask = _view(ref, index)
    return launch.load(view, mask)


def store(ref: Any, *index: Any, value: Array) -> None:
    """Writes the part of a tile that `ref` has."""
    view, mask = _view(ref, index)
    launch.store(view, value, mask)


def _view(ref: Any, index: tuple[Any, ...]) -> tuple[Any, Mask]:
    view = ref.at[tuple(pl.ds(i.start, i.size) if isinstance(i, Span) else i for i in index)]
    spans = [i for i in index if isinstance(i, Span)]
    shape = tuple(s.size for s in spans)
    mask: Mask = None
    for axis, s in enumerate(spans):
        if s.inside is not None:
            others = [other for other in range(len(spans)) if other != axis]
            mask = both(mask, jnp.expand_dims(s.inside, others))
    return view, spread(mask, shape)
