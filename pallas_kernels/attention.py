"""Scaled dot-product attention: y = softmax(scale · q kᵀ) v for every image and head.

Vaswani et al., "Attention Is All You Need", arXiv:1706.03762. Arrays are [b, t, h, d] as a
projection leaves them, and no kernel transposes one: it reads a head with the strides it has.

FLOPs: 4 b h t s d forward, 10 b h t s d backward, and 4 more because the two gradient kernels make
the scores and dy vᵀ each for itself; with `causal` about half of all that. Bytes at best: q, k and
v read once and y written once. The t×s scores are never an array: they come and go in registers
(`attention_kernels`). Softmax and sums are float32, and the weights are rounded to the operands'
dtype before they meet v, as in every such kernel. Kept for the backward pass: q, k, v, y and the
softmax's logarithm, one float32 a query and head.

What the compiler makes of bfloat16 on sm_90 (Triton 3.9), in issue slots as `matmul` counts them:

             channels   queries×keys, warps   registers   loop   issue slots
  forward        64         128×64, 4            194       509      1.99
                128         128×128, 8           203       538      1.05
  dq             64         128×64, 8            123       268      1.40
                128         128×64, 8            154       322      0.84
  dk, dv         64         64×64, 4             180       315      1.23
                128         64×64, 4             252       379      0.74

Of the forward loop at 64 channels, four fifths are the softmax: of each score one maximum, one
multiply-add, one power of two, one sum and half a conversion.
"""

from functools import partial
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from pallas_kernels import attention_kernels, attention_xla, calls, epilogue, launch, selection
from pallas_kernels.attention_kernels import Problem
from pallas_kernels.blocks import Blocks, side
from pallas_kernels.launch import Backend, Product
from pallas_kernels.transformations import (
    batched,
    one_after_another,
    partitioned,
    prepared,
    typed,
)

Kernel = Literal["forward", "query_gradient", "key_gradients"]

WIDEST = 256
"""Channels of a head that the kernels have registers for."""


def reference(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h d"],
    *,
    scale: float | None = None,
    causal: bool = False,
    key_lengths: Integer[Array, " b"] | None = None,
) -> Float[Array, "b t h d"]:
    """The equation in float32 at the highest precision: what every backend is measured against."""
    return attention_xla.attend(
        q.astype(jnp.float32),
        k.astype(jnp.float32),
        v.astype(jnp.float32),
        key_lengths,
        scale=_scale(scale, q.shape[-1]),
        causal=causal,
        precision=lax.Precision.HIGHEST,
    )


def _scale(scale: float | None, channels: int) -> float:
    return max(channels, 1) ** -0.5 if scale is None else float(scale)


_AXES: dict[Kernel, tuple[list[str], list[str]]] = {
    "forward": (["t h d", "s h d", "s h d"], ["t h d", "h t"]),
    "query_gradient": (["t h d", "s h d", "s h d", "t h d", "h t", "h t"], ["t h d"]),
    "key_gradients": (["t h d", "s h d", "s h d", "t h d", "h t", "h t"], ["s h d", "s h d"]),
}
"""Of the operands and the outputs of each launch, after those of the batch."""


def _launch(kernel: Kernel, *operands: Array, problem: Problem) -> list[Array]:
    """One launch for a batch of any axes."""
    q, k, *_ = operands
    batch, (t, h, d), s = q.shape[:-3], q.shape[-3:], k.shape[-3]
    sizes = {"t": t, "s": s, "h": h, "d": d}
    shapes = [(*batch, *(sizes[axis] for axis in axes.split())) for axes in _AXES[kernel][1]]
    if 0 in (*batch, *sizes.values()):
        dtypes = [q.dtype, jnp.float32] if kernel == "forward" else [q.dtype] * len(shapes)
        return [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    blocks = problem.blocks if kernel == "forward" else None
    causal = problem.causal or problem.limited
    blocks = blocks or default_blocks(
        (t, s, d), q.dtype, kernel=kernel, product=problem.product, causal=causal
    )
    flat = [x.reshape(prod(batch), *x.shape[len(batch) :]) for x in operands]
    outputs = getattr(attention_kernels, kernel)(*flat, problem=problem, blocks=blocks)
    return [output.reshape(shape) for output, shape in zip(outputs, shapes, strict=True)]


def _on_any_mesh(kernel: Kernel, *operands: Array, problem: Problem) -> list[Array]:
    """`_launch` under vmap and on a mesh."""
    batch = [f"z{axis}" for axis in range(operands[0].ndim - 4)] + ["b"]
    operand_axes, output_axes = (
        [" ".join([*batch, axes]) for axes in each] for each in _AXES[kernel]
    )
    split = partitioned(
        partial(_launch, kernel, problem=problem),
        operands=[*operand_axes, *[" ".join(batch)] * problem.limited],
        outputs=output_axes,
        gathers=("t", "s", "d"),
    )

    def rule(size, has_axis, operands):
        if not all(has_axis[:3]):
            return one_after_another(call, size, has_axis, operands)
        operands = [
            x if has else jnp.broadcast_to(x, (size, *x.shape))
            for x, has in zip(operands, has_axis, strict=True)
        ]
        return _on_any_mesh(kernel, *operands, problem=problem)

    call = batched(split, rule)
    return call(*operands)


def _run(kernel: Kernel, problem: Problem, *operands: Array) -> list[Array]:
    return _on_any_mesh(kernel, *operands, problem=problem)


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "attention's kernels have no second derivative: use backend='xla', which has all"
    )


_once = jax.custom_vjp(_run, nondiff_argnums=(0, 1))
"""A launch in a derivative, that has none itself."""

_once.defvjp(lambda *operands: (_run(*operands), None), _refuse)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(problem: Problem, q: Array, k: Array, v: Array, lengths: tuple[Array, ...]) -> Array:
    return _run("forward", problem, q, k, v, *lengths)[0]


def _forward(problem: Problem, q: Array, k: Array, v: Array, lengths: tuple[Array, ...]):
    y, logarithm = _once("forward", problem, q, k, v, *lengths)
    return y, (q, k, v, lengths, y, logarithm)


def _backward(problem: Problem, saved, dy: Array):
    q, k, v, lengths, y, logarithm = saved
    delta = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1).swapaxes(-1, -2)
    operands = (q, k, v, dy, logarithm, delta, *lengths)
    (dq,) = _once("query_gradient", problem, *operands)
    dk, dv = _once("key_gradients", problem, *operands)
    return dq, dk, dv, (None,) * len(lengths)


_attention.defvjp(_forward, _backward)


def attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h d"],
    *,
    scale: float | None = None,
    causal: bool = False,
    key_lengths: Integer[Array, " b"] | None = None,
    precision: lax.PrecisionLike = None,
    backend: Backend = "auto",
    blocks: Blocks | None = None,
) -> Float[Array, "b t h d"]:
    """softmax(scale · q kᵀ) v, over the keys of each image and head.

    A query that sees no key, where there is none or `key_lengths` is 0, gets zeros, and gives none
    a gradient.

    Args:
      q: t queries of h heads with d channels each.
      k: s keys.
      v: s values.
      scale: of the scores, before the softmax; by default 1 / √d.
      causal: whether query i sees the keys 0 … i only: both counted from the first, also where
        t ≠ s.
      key_lengths: how many keys of each image count, the first of them, from 0 to s; what k and v
        have after those is not read. By default all.
      precision: of the products, as in `jax.lax.dot_general`. The kernels multiply float32 in tf32
        unless it is "high" (three tf32 products) or "highest" (float32, without Tensor Cores).
      backend: "xla", differentiable in both modes; "triton", the kernels, on a GPU, in reverse mode
        and once; "interpret", the kernels' arithmetic on any hardware; "auto", as tuned,
        else on a GPU the kernels for 16-bit operands and heads of up to 256 channels, and XLA.
      blocks: the forward kernel's, m queries by n keys, and k channels at most in a piece of a
        head; by default `default_blocks`.

    Raises:
      TypeError: q, k or v is not floating, or `key_lengths` not whole numbers.
      ValueError: the shapes do not fit, or a name or `blocks` is refused.
      NotImplementedError: the kernels were asked for by name and cannot do this dtype, precision or
        number of channels; or their forward-mode or second derivative was asked for.
    """
    epilogue.check_floating(q=q, k=k, v=v)
    _check_operands(q, k, v, key_lengths)
    dtype = jnp.promote_types(jnp.promote_types(q.dtype, k.dtype), v.dtype)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    backend, blocks = selection.resolve(
        calls.Attention(
            q.shape, k.shape[1] if k.shape[1] != q.shape[1] else None, causal, dtype=dtype.name
        ),
        backend,
        possible=q.shape[-1] <= WIDEST,
        guess=dtype in (jnp.bfloat16, jnp.float16) and launch.is_countable(q, k),
        blocks=blocks,
        asks=key_lengths is None and launch.is_default(precision),
    )
    scale = _scale(scale, q.shape[-1])
    if backend == "xla":
        options: dict[str, Any] = {"scale": scale, "causal": causal, "precision": precision}
        return attention_xla.attend(q, k, v, key_lengths, **options)
    if q.shape[-1] > WIDEST:
        raise NotImplementedError(
            f"heads of d={q.shape[-1]} channels have no kernel, but those of {WIDEST} do: "
            "use backend='xla'"
        )
    if scale <= 0:  # the kernels find the largest score before they scale it
        q, scale = (0 * q, 1.0) if scale == 0 else (-q, -scale)
    limited = key_lengths is not None
    problem = Problem(launch.product(dtype, precision), backend, scale, causal, limited, blocks)
    # Whatever integers they are, 0 to s fit in 32 bits.
    lengths = [jnp.clip(key_lengths, 0, k.shape[1]).astype(jnp.int32)] if limited else []

    def run(*arrays: Array) -> Any:
        q, k, v, *lengths = prepared(*arrays)
        return _attention(problem, q, k, v, tuple(lengths))

    axes = ["b t h d", "b s h d", "b s h d", *["b"] * limited]
    return typed(run, [q, k, v, *lengths], axes, "b t h d")


def _check_operands(q: Array, k: Array, v: Array, key_lengths: Array | None) -> None:
    if q.ndim != 4:
        raise ValueError(f"q of shape {q.shape} must have four axes: [b, t, h, d]")
    if k.ndim != 4 or (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        raise ValueError(f"k of shape {k.shape} must be {q.shape}, but for its second axis")
    if v.shape != k.shape:
        raise ValueError(f"v of shape {v.shape} must be of k's shape, {k.shape}")
    if key_lengths is None:
        return
    if not jnp.issubdtype(key_lengths.dtype, jnp.integer):
        raise TypeError(f"key_lengths of dtype {key_lengths.dtype} must be whole numbers")
    if key_lengths.shape != q.shape[:1]:
        raise ValueError(
            f"key_lengths of shape {key_lengths.shape} must be {q.shape[:1]}, one for each image"
        )


Tile = tuple[int, int, int]
"""Queries, keys and warps."""

# For each kernel: the tile, and a smaller one where masks need registers; for heads of up to 64
# channels, up to 128 in two pieces, 128, and up to 256. All in two stages: a third spills, or keeps
# a second block off the multiprocessor, whose products would fill the time of this one's softmax.
_16_BITS: dict[Kernel, list[tuple[Tile, Tile]]] = {
    "forward": [
        ((128, 64, 4), (64, 128, 4)),
        ((64, 128, 4), (64, 128, 4)),
        ((128, 128, 8), (128, 64, 8)),
        ((64, 64, 8), (64, 64, 8)),
    ],
    "query_gradient": [
        ((128, 64, 8), (128, 64, 8)),
        ((128, 64, 8), (128, 64, 8)),
        ((128, 64, 8), (128, 32, 8)),
        ((64, 32, 8), (64, 32, 8)),
    ],
    "key_gradients": [
        ((64, 64, 4), (64, 64, 4)),
        ((64, 64, 4), (32, 64, 4)),
        ((64, 64, 4), (32, 64, 4)),
        ((32, 64, 8), (32, 64, 8)),
    ],
}
_TF32: dict[Kernel, list[Tile]] = {
    "forward": [(128, 64, 8), (64, 32, 4), (64, 32, 4), (32, 16, 4)],
    "query_gradient": [(64, 32, 4), (64, 32, 4), (64, 32, 4), (32, 16, 4)],
    "key_gradients": [(32, 64, 4), (16, 64, 4), (32, 32, 4), (16, 32, 4)],
}
_FLOAT32: dict[Kernel, list[Tile]] = {
    "forward": [(32, 32, 4), (32, 16, 4), (32, 16, 4), (16, 16, 4)],
    "query_gradient": [(32, 32, 4), (32, 16, 4), (32, 16, 4), (16, 16, 4)],
    "key_gradients": [(32, 32, 4), (16, 32, 4), (16, 32, 4), (16, 16, 4)],
}
"""In three tf32 products, or on the CUDA cores."""


def default_blocks(
    shape: tuple[int, int, int],
    dtype: DTypeLike,
    *,
    kernel: Kernel = "forward",
    product: Product | None = None,
    causal: bool = False,
) -> Blocks:
    """Blocks for a kernel, with no spills on sm_80, sm_90 and sm_100.

    Args:
      shape: (t, s, d).
      dtype: of q, k and v.
      kernel: which.
      product: how float32 is multiplied.
      causal: whether not all keys are seen, be it for `key_lengths`.
    """
    t, s, d = shape
    piece, padded = _pieces(d)
    heads = 0 if padded <= 64 else 3 if padded > 128 else 1 if piece == 64 else 2
    if product in ("ieee", "tf32x3"):
        m, n, warps = _FLOAT32[kernel][heads]
    elif jnp.dtype(dtype).itemsize > 2:
        m, n, warps = _TF32[kernel][heads]
    else:
        ragged = heads > 0 and (t % 128 > 0 or s % 128 > 0)
        m, n, warps = _16_BITS[kernel][heads][causal or ragged]
        if kernel == "forward" and heads == 0 and 64 < s <= 128:
            m, n = 64, 128  # all keys in one tile
    # Warps lie along the rows of the scores: half of them have no half a tile.
    rows, most = (s, n) if kernel == "key_gradients" else (t, m)
    few = side(rows, most) < most
    return Blocks(side(t, m), side(s, n), piece, warps=4 if few else warps, stages=2)


def _pieces(channels: int) -> tuple[int, int]:
    """(the largest piece of a head, the channels of all pieces): one power of two, or where that
    is less, the largest in it and then the rest."""
    whole = side(channels, 128)
    largest = [whole] if whole == 16 else [whole, whole // 2]
    padded = [sum(attention_kernels.widths(channels, width)) for width in largest]
    least = min(padded)
    return largest[padded.index(least)], least


def search_space(
    shape: tuple[int, int, int],
    dtype: DTypeLike,
    *,
    kernel: Kernel = "forward",
    product: Product | None = None,
    causal: bool = False,
) -> list[Blocks]:
    """What a tuner tries for a kernel, the default first; arguments as in `default_blocks`."""
    t, s, d = shape
    first = default_blocks(shape, dtype, kernel=kernel, product=product, causal=causal)
    found = [first]
    for m, n, warps in (
        (32, 64, 4), (64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8),
        (64, 128, 8), (128, 128, 8), (64, 256, 4), (128, 256, 8),
    ):  # fmt: skip
        for piece in sorted({first.k, side(d, 128)}):
            for stages in (2, 3, 4):
                blocks = Blocks(side(t, m), side(s, n), piece, warps, stages)
                if blocks not in found:
                    found.append(blocks)
    return found
