"""Attention in plain jnp: XLA's, differentiable in both modes, and what the kernels are held to.

XLA has the scores as an array, in float32. Where a head has more than `SCORES_AT_ONCE`, the queries
go a part at a time, and the scores are made again in the backward pass: memory grows with the
length, not with its square.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from pallas_kernels.matmul import matmul

SCORES_AT_ONCE = 2**22
"""Of a head, in memory."""


def attend(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h d"],
    lengths: Integer[Array, " b"] | None,
    **options: Any,
) -> Float[Array, "b t h d"]:
    """The equation; `options` are the scale, causal and the products' precision."""
    k, v = _within(lengths, k, v)
    (b, t, h, d), s = q.shape, k.shape[1]
    rows = jnp.arange(t)
    if t * s <= SCORES_AT_ONCE:
        return _attend(q, k, v, rows, lengths, **options)
    size = max(1, SCORES_AT_ONCE // s)
    count = -(-t // size)
    more = count * size - t
    q = jnp.pad(q, ((0, 0), (0, more), (0, 0), (0, 0))).reshape(b, count, size, h, d)

    @jax.checkpoint
    def chunk(queries):
        return _attend(queries[0], k, v, queries[1], lengths, **options)

    y = lax.map(chunk, (q.swapaxes(0, 1), jnp.arange(count * size).reshape(count, size)))
    return y.swapaxes(0, 1).reshape(b, count * size, h, d)[:, :t]


def _attend(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h d"],
    rows: Integer[Array, " t"],
    lengths: Integer[Array, " b"] | None,
    *,
    scale: float,
    causal: bool,
    precision: lax.PrecisionLike,
) -> Float[Array, "b t h d"]:
    """The equation for some of the queries, the rows `rows` of all, with their scores at once."""
    if k.shape[1] == 0:
        return jnp.zeros_like(q)
    product = partial(matmul, precision=precision, backend="xla")
    q_bhtd, k_bhds, v_bhsd = q.swapaxes(1, 2), k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = product(q_bhtd, k_bhds, out_dtype=wide) * scale
    keys = jnp.arange(k.shape[1])
    seen = None
    if causal:
        seen = (keys[None, :] <= rows[:, None])[None, None]
    if lengths is not None:
        counts = (keys[None, :] < lengths[:, None])[:, None, None]
        seen = counts if seen is None else seen & counts
    if seen is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        scores = jnp.where(seen, scores, jnp.finfo(wide).min)
        weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0)
    return product(weights.astype(v.dtype), v_bhsd).swapaxes(1, 2)


def _within(lengths: Array | None, *arrays: Array) -> list[Array]:
    """Keys and values, zero where they do not count: whatever else is there, weight 0 or not."""
    if lengths is None:
        return list(arrays)
    there = jnp.arange(arrays[0].shape[1])[None, :] < lengths[:, None]
    return [jnp.where(there[:, :, None, None], array, 0) for array in arrays]
