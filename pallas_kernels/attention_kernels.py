"""The three kernels of attention: the result, the gradient of q, and the gradients of k and v.

A block of threads owns a tile of m queries, or of n keys for dk and dv, of one head of one image.
It walks along the other axis, a tile at a time, and makes of each an m×n tile of the scores, which
never leaves its registers. Nothing is added by two blocks, so every sum has one order.

  forward   y, and the softmax's logarithm λ = log₂ Σ 2^z, z = scale · log₂e · q kᵀ. The softmax is
            Milakov and Gimelshein's: a tile may raise the largest score so far, and what there is
            is then scaled to it.
  dq        p = 2^(z - λ) again, from λ alone; with δ = Σ dy y, ds = p (dy vᵀ - δ), dq = scale ds k.
  dk, dv    the same scores transposed: dv = pᵀ dy, dk = scale dsᵀ q. So p and ds are always the
            left operand of a product, and go from registers to the Tensor Cores.

Where all keys fit in one tile, as those of a small image do, there is no loop and no rescaling. A
mask of scores costs two instructions an element, so the walk is in parts: tiles that all queries of
the block see in full, without one, and the rest. A tile that no query sees is skipped.

A head is read in pieces of at most `Blocks.k` channels, each a power of two: of 80, 64 and 16.

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
arXiv:2307.08691; Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Integer

from pallas_kernels import launch, tiles
from pallas_kernels.blocks import Blocks, ceiling, side
from pallas_kernels.launch import Backend, Product
from pallas_kernels.tiles import Span, span

LOG2_E = 1 / log(2)
LOWEST = float(jnp.finfo(jnp.float32).min)
"""What the largest score of no key is: finite, for infinity less infinity is no number."""


Part = tuple[Any, Any, bool]
"""Tiles along an axis: the first, the one after the last, and whether their scores are masked."""


@dataclass(frozen=True)
class Problem:
    """All there is to know about an attention but its arrays."""

    product: Product
    backend: Backend
    scale: float
    """Positive."""
    causal: bool
    limited: bool
    """Whether the images have their own numbers of keys."""
    blocks: Blocks | None = None
    """The forward kernel's, if not the default."""

    @property
    def exponent(self) -> float:
        """z = exponent · q k: the softmax is of powers of two."""
        return self.scale * LOG2_E

    def pairs(self, t: int, s: int) -> int:
        """How many of the t·s scores there are at most."""
        seen = min(t, s)
        return seen * (seen + 1) // 2 + (t - seen) * s if self.causal else t * s


def forward(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h d"],
    *lengths: Integer[Array, " b"],
    problem: Problem,
    blocks: Blocks,
) -> list[Array]:
    """(y [b, t, h, d], λ [b, h, t]) of at least one query and one key."""
    (b, t, h, d), s = q.shape, k.shape[1]
    return launch.call(
        partial(_forward, problem=problem, blocks=blocks),
        *(q, k, v, *lengths),
        grid=(ceiling(t, blocks.m) * h * b,),
        out=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((b, h, t), jnp.float32),
        ],
        blocks=blocks,
        backend=problem.backend,
        algorithm="attention",
        flops=4 * b * h * d * problem.pairs(t, s),
    )


def _forward(q_ref, k_ref, v_ref, *rest, problem: Problem, blocks: Blocks):
    *lengths, y_ref, logarithm_ref = rest
    (_, t, heads, d), s = q_ref.shape, k_ref.shape[1]
    # What sees the most keys comes first, so that no long tile is left over at the end.
    tile, head, image = _place(ceiling(t, blocks.m), heads, backwards=problem.causal)
    rows, channels = span(tile, blocks.m, t), _pieces(d, blocks)
    limit = _limit(lengths, image, s)
    q = _load(q_ref, image, rows, head, channels)

    def step(index, state, *, masked: bool):
        keys = _keys(index, blocks.n, limit, masked=masked)
        k, v = (_load(ref, image, keys, head, channels) for ref in (k_ref, v_ref))
        scores = _inner(q, k, problem)
        if masked:
            scores = _visible(scores, rows, keys, problem)
        top = jnp.max(scores, axis=1) * problem.exponent
        if state is None:
            top = jnp.maximum(top, LOWEST)
            total, y = 0, [jnp.zeros((blocks.m, piece.size), jnp.float32) for piece in channels]
        else:
            top = jnp.maximum(top, state[0])
            kept = jnp.exp2(state[0] - top)
            total, y = state[1] * kept, [piece * kept[:, None] for piece in state[2]]
        weights = jnp.exp2(scores * problem.exponent - top[:, None])
        return top, total + jnp.sum(weights, axis=1), _add_products(y, weights, v, problem)

    nothing = (
        jnp.full(blocks.m, LOWEST, jnp.float32),
        jnp.zeros(blocks.m, jnp.float32),
        [jnp.zeros((blocks.m, piece.size), jnp.float32) for piece in channels],
    )
    parts = _parts_of_keys(rows, s, limit, problem, blocks)
    top, total, y = _walk(step, None if s <= blocks.n else nothing, parts)
    logarithm = top + jnp.log(total) * LOG2_E
    if problem.limited:  # a query without a key
        logarithm = jnp.where(total == 0, 0, logarithm)
        total = jnp.where(total == 0, 1, total)
    _store(y_ref, image, rows, head, channels, y, 1 / total[:, None])
    tiles.store(logarithm_ref, image, head, rows, value=logarithm)


def query_gradient(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h d"],
    dy: Float[Array, "b t h d"],
    logarithm: Float[Array, "b h t"],
    delta: Float[Array, "b h t"],
    *lengths: Integer[Array, " b"],
    problem: Problem,
    blocks: Blocks,
) -> list[Array]:
    """(dq,) of at least one query and one key."""
    (b, t, h, d), s = q.shape, k.shape[1]
    return launch.call(
        partial(_query_gradient, problem=problem, blocks=blocks),
        *(q, k, v, dy, logarithm, delta, *lengths),
        grid=(ceiling(t, blocks.m) * h * b,),
        out=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        blocks=blocks,
        backend=problem.backend,
        algorithm="attention_dq",
        flops=6 * b * h * d * problem.pairs(t, s),
    )


def _query_gradient(
    q_ref, k_ref, v_ref, dy_ref, logarithm_ref, delta_ref, *rest, problem: Problem, blocks: Blocks
):
    *lengths, dq_ref = rest
    (_, t, heads, d), s = q_ref.shape, k_ref.shape[1]
    tile, head, image = _place(ceiling(t, blocks.m), heads, backwards=problem.causal)
    rows, channels = span(tile, blocks.m, t), _pieces(d, blocks)
    limit = _limit(lengths, image, s)
    q, dy = (_load(ref, image, rows, head, channels) for ref in (q_ref, dy_ref))
    logarithm, delta = (tiles.load(ref, image, head, rows) for ref in (logarithm_ref, delta_ref))

    def step(index, dq, *, masked: bool):
        keys = _keys(index, blocks.n, limit, masked=masked)
        k, v = (_load(ref, image, keys, head, channels) for ref in (k_ref, v_ref))
        scores = _inner(q, k, problem)
        if masked:
            scores = _visible(scores, rows, keys, problem)
        weights = jnp.exp2(scores * problem.exponent - logarithm[:, None])
        slopes = weights * (_inner(dy, v, problem) - delta[:, None])
        return _add_products(dq, slopes, k, problem)

    nothing = [jnp.zeros((blocks.m, piece.size), jnp.float32) for piece in channels]
    dq = _walk(step, nothing, _parts_of_keys(rows, s, limit, problem, blocks))
    _store(dq_ref, image, rows, head, channels, dq, problem.scale)


def key_gradients(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h d"],
    dy: Float[Array, "b t h d"],
    logarithm: Float[Array, "b h t"],
    delta: Float[Array, "b h t"],
    *lengths: Integer[Array, " b"],
    problem: Problem,
    blocks: Blocks,
) -> list[Array]:
    """(dk, dv) of at least one query and one key."""
    (b, t, h, d), s = q.shape, k.shape[1]
    out = jax.ShapeDtypeStruct(k.shape, k.dtype)
    return launch.call(
        partial(_key_gradients, problem=problem, blocks=blocks),
        *(q, k, v, dy, logarithm, delta, *lengths),
        grid=(ceiling(s, blocks.n) * h * b,),
        out=[out, out],
        blocks=blocks,
        backend=problem.backend,
        algorithm="attention_dkv",
        flops=8 * b * h * d * problem.pairs(t, s),
    )


def _key_gradients(
    q_ref, k_ref, v_ref, dy_ref, logarithm_ref, delta_ref, *rest, problem: Problem, blocks: Blocks
):
    *lengths, dk_ref, dv_ref = rest
    (_, t, heads, d), s = q_ref.shape, k_ref.shape[1]
    tile, head, image = _place(ceiling(s, blocks.n), heads)
    keys, channels = span(tile, blocks.n, s), _pieces(d, blocks)
    limit = _limit(lengths, image, s)
    k, v = (_load(ref, image, keys, head, channels) for ref in (k_ref, v_ref))

    def step(index, state, *, masked: bool):
        # Queries past the last are zeros, dy, λ and δ too, and add nothing: they need no mask.
        rows = span(index, blocks.m, t)
        q, dy = (_load(ref, image, rows, head, channels) for ref in (q_ref, dy_ref))
        logarithm = tiles.load(logarithm_ref, image, head, rows)
        delta = tiles.load(delta_ref, image, head, rows)
        scores = _inner(k, q, problem)
        if masked:
            earlier = _indices(keys)[:, None] <= _indices(rows)[None, :]
            scores = jnp.where(earlier, scores, -jnp.inf)
        weights = jnp.exp2(scores * problem.exponent - logarithm[None, :])
        slopes = weights * (_inner(v, dy, problem) - delta[None, :])
        dk, dv = state
        return _add_products(dk, slopes, q, problem), _add_products(dv, weights, dy, problem)

    nothing = [jnp.zeros((blocks.n, piece.size), jnp.float32) for piece in channels]
    parts = _parts_of_queries(keys, t, limit, problem, blocks)
    dk, dv = _walk(step, (nothing, nothing), parts)
    if problem.limited:
        counts = (_indices(keys) < limit)[:, None]
        dk, dv = ([jnp.where(counts, piece, 0) for piece in gradient] for gradient in (dk, dv))
    _store(dk_ref, image, keys, head, channels, dk, problem.scale)
    _store(dv_ref, image, keys, head, channels, dv, 1)


def _place(count: int, heads: int, *, backwards: bool = False) -> tuple[Any, Any, Any]:
    """(tile, head, image) of a program: tiles of one head run side by side, and share its keys."""
    program = pl.program_id(0)
    tile, rest = lax.rem(program, count), lax.div(program, count)
    return count - 1 - tile if backwards else tile, lax.rem(rest, heads), lax.div(rest, heads)


def widths(channels: int, largest: int) -> list[int]:
    """Powers of two up to `largest` that cover a head's channels."""
    found: list[int] = []
    while sum(found) < channels:
        found.append(side(channels - sum(found), largest))
    return found


def _pieces(channels: int, blocks: Blocks) -> list[Span]:
    """A head's channels in spans."""
    spans, start = [], 0
    for width in widths(channels, blocks.k):
        whole = start + width <= channels
        inside = None if whole else lax.iota(jnp.int32, width) < channels - start
        # Not an int, of which Pallas would say that the span leaves the array.
        spans.append(Span(jnp.int32(start), width, inside))
        start += width
    return spans


def _load(ref, image, rows: Span, head, channels: Sequence[Span]) -> list[Array]:
    return [tiles.load(ref, image, rows, head, piece) for piece in channels]


def _store(ref, image, rows: Span, head, channels: Sequence[Span], values, factor) -> None:
    for piece, value in zip(channels, values, strict=True):
        tiles.store(ref, image, rows, head, piece, value=value * factor)


def _inner(
    a: Sequence[Float[Array, "m _"]], b: Sequence[Float[Array, "n _"]], problem: Problem
) -> Float[Array, "m n"]:
    """a bᵀ of a head in pieces."""
    total = jnp.zeros((a[0].shape[0], b[0].shape[0]), jnp.float32)
    for left, right in zip(a, b, strict=True):
        total = launch.dot(left, right.T, total, problem.product)
    return total


def _add_products(
    sums: Sequence[Float[Array, "m _"]],
    left: Float[Array, "m n"],
    right: Sequence[Float[Array, "n _"]],
    problem: Problem,
) -> list[Array]:
    """sums + left · right of a head in pieces."""
    left = left.astype(right[0].dtype)
    return [
        launch.dot(left, piece, total, problem.product)
        for total, piece in zip(sums, right, strict=True)
    ]


def _limit(lengths: Sequence[Any], image, s: int) -> Any:
    """How many keys the image has."""
    return jnp.minimum(launch.load(lengths[0].at[image]), s) if lengths else s


def _keys(index, n: int, limit, *, masked: bool) -> Span:
    """A tile of keys, zero from `limit` on if `masked`; else all of them are there."""
    start = index * n
    if not masked or (isinstance(limit, int) and limit % n == 0):
        return Span(start, n, None)
    return Span(start, n, lax.iota(jnp.int32, n) < limit - start)


def _visible(
    scores: Float[Array, "m n"], rows: Span, keys: Span, problem: Problem
) -> Float[Array, "m n"]:
    """The scores, minus infinity where a query does not see a key."""
    there = tiles.as_row(keys.inside)
    earlier = _indices(keys)[None, :] <= _indices(rows)[:, None] if problem.causal else None
    mask = tiles.spread(tiles.both(there, earlier), scores.shape)
    return scores if mask is None else jnp.where(mask, scores, -jnp.inf)


def _indices(along: Span) -> Integer[Array, " size"]:
    return along.start + lax.iota(jnp.int32, along.size)


def _parts_of_keys(rows: Span, s: int, limit, problem: Problem, blocks: Blocks) -> list[Part]:
    """The tiles of keys that some query sees: first those that all see in full."""
    n = blocks.n
    if s <= n:
        return [(0, 1, problem.causal or problem.limited or s < n)]
    by_all = by_some = limit
    if problem.causal:
        by_all = jnp.minimum(limit, rows.start + 1)
        by_some = jnp.minimum(limit, rows.start + rows.size)
    full = _quotient(by_all, n)
    return [(0, full, False), (full, _quotient(by_some + n - 1, n), True)]


def _parts_of_queries(keys: Span, t: int, limit, problem: Problem, blocks: Blocks) -> list[Part]:
    """The tiles of queries that see some of the keys: first those that do not see all."""
    m = blocks.m
    if t <= m:
        return [(0, 1, problem.causal)]
    end = ceiling(t, m)
    if problem.limited:
        # Typed: of two literals Pallas would make one bit.
        end = lax.select(keys.start < limit, jnp.int32(end), jnp.int32(0))
    if not problem.causal:
        return [(0, end, False)]
    first = jnp.minimum(_quotient(keys.start, m), end)
    full = jnp.minimum(_quotient(keys.start + keys.size - 1 + m - 1, m), end)
    return [(first, full, True), (full, end, False)]


def _walk(step: Callable[..., Any], state: Any, parts: Sequence[Part]) -> Any:
    """The state after `step(index, state, masked=…)` of all tiles of all parts."""
    for first, end, masked in parts:
        run = partial(step, masked=masked)
        if isinstance(first, int) and isinstance(end, int) and end - first <= 1:
            for index in range(first, end):
                state = run(jnp.int32(index), state)
        else:
            state = lax.fori_loop(first, end, run, state)
    return state


def _quotient(value, divisor: int) -> Any:
    return value // divisor if isinstance(value, int) else lax.div(value, divisor)
