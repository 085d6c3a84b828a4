"""Layer normalisation over the last axis: y = (x - mean) / √(variance + ε) · scale + bias.

Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450. The variance is the mean square of
what differs from the mean, over all d elements of a row. Statistics are float32, in two steps: the
mean, then the centred row, whose own mean is what rounding took from the first and is taken off as
well. So rows far from zero lose nothing: those of 1e4 + noise come out as those of the noise do.

FLOPs: about 8 an element forward, 14 backward, which is nothing: bytes set the pace. At best x is
read and y written; backward x and dy are read and dx written. Kept for the backward pass: x, scale
and two or three float32 numbers a row.

The kernels hold whole rows in registers, so that a pass reads x once (`layer_norm_kernels`). Of
`Blocks` they read these fields:

  n            d, padded to a power of two, up to 4,096 (`WIDEST`)
  group        rows in a block's registers at one time
  m            rows of a block of threads forward, at most
  splits       blocks of threads backward, at most, each with as many rows; their sums are added
  k, stages    unused

What the compiler makes of bfloat16 rows on sm_90 (Triton 3.9). A multiprocessor issues four
instructions a cycle; "issue" is the share of the time for a row's bytes at 4.8 TB/s that it needs
to issue the loop's instructions, so that below 1 memory sets the pace. Rows are loaded 16 bytes a
thread at a time where d is a multiple of 16 bytes.

                 forward                     backward
     d    registers   loop   issue    registers   loop   issue
    192       64       270    0.88       128       339    0.74
    768       72       240    0.78       159       314    0.68
   1280       72       244    0.95       158       312    0.81      37 % of 2,048 is padding
   4096       80       229    0.56       159       332    0.54
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import calls, epilogue, launch, layer_norm_kernels, selection
from pallas_kernels.blocks import Blocks, side
from pallas_kernels.launch import Backend
from pallas_kernels.matmul import MULTIPROCESSORS
from pallas_kernels.transformations import batched, partitioned, prepared, typed

WIDEST = 4096
"""The longest row that a block of threads holds in registers."""


def reference(
    x: Float[Array, "*batch d"], scale: Float[Array, " d"], bias: Float[Array, " d"], epsilon: float
) -> Float[Array, "*batch d"]:
    """The equation in float32: what every backend is measured against."""
    return _standard(x, *_statistics(x, epsilon)) * _row(scale, x) + _row(bias, x)


def _statistics(x: Array, epsilon: float) -> tuple[Array, Array, Array]:
    """A row's mean, what rounding took from it, and 1/√(variance + ε); in float32, or wider."""
    x = _widened(x)
    # Neither the centred row nor its variance depends on what is called the mean here.
    mean = lax.stop_gradient(jnp.mean(x, -1, keepdims=True))
    centred = x - mean
    rest = jnp.mean(centred, -1, keepdims=True)
    variance = jnp.mean(centred * centred, -1, keepdims=True) - rest * rest
    return mean, rest, lax.rsqrt(variance + epsilon)


def _standard(x: Array, mean: Array, rest: Array, inverse: Array) -> Array:
    return (_widened(x) - mean - rest) * inverse


def _widened(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _row(parameter: Array, x: Array) -> Array:
    """scale or bias, [d], as a row of x."""
    return jnp.expand_dims(_widened(parameter), range(x.ndim - 1))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _xla(epsilon: float, x: Array, scale: Array, bias: Array) -> Array:
    return reference(x, scale, bias, epsilon).astype(x.dtype)


@_xla.defjvp
def _xla_jvp(epsilon: float, primals, tangents):
    # Without this rule up to three float32 arrays of x's size would wait for the backward pass.
    x, scale, bias = primals
    statistics = _statistics(x, epsilon)
    y = _standard(x, *statistics) * _row(scale, x) + _row(bias, x)
    return y.astype(x.dtype), _push(x, scale, statistics, *tangents)


@partial(jax.checkpoint, prevent_cse=False)
def _push(x: Array, scale: Array, statistics: Any, dx: Array, d_scale: Array, d_bias: Array):
    """dy, from what the backward pass is to keep."""
    standard, dx = _standard(x, *statistics), _widened(dx)
    along = jnp.mean(dx, -1, keepdims=True)
    across = jnp.mean(dx * standard, -1, keepdims=True)
    d_standard = (dx - along - standard * across) * statistics[-1]
    dy = d_standard * _row(scale, x) + standard * _row(d_scale, x) + _row(d_bias, x)
    return dy.astype(x.dtype)


@dataclass(frozen=True)
class _Problem:
    """All there is to know about a normalisation but its arrays."""

    epsilon: float
    backend: Backend
    blocks: Blocks | None

    def prepare(self, x: Array) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """x [images, *batch, d] as (images, rows, d), and how its kernels are launched."""
        images, *batch, d = x.shape
        rows = prod(batch)
        blocks = self.blocks or default_blocks((images * rows, d), x.dtype)
        return (images, rows, d), {"blocks": blocks, "backend": self.backend}


def _launch(x: Array, scale: Array, bias: Array, *, problem: _Problem) -> list[Array]:
    """y, and the means and inverses [images, *batch], of x [images, *batch, d] and scale [_, d]."""
    if x.size == 0:
        return [x, *[jnp.zeros(x.shape[:-1], jnp.float32)] * 2]
    rows, options = problem.prepare(x)
    y, *statistics = layer_norm_kernels.forward(
        x.reshape(rows), scale, bias, epsilon=problem.epsilon, **options
    )
    return [y.reshape(x.shape), *(each.reshape(x.shape[:-1]) for each in statistics)]


def _launch_gradients(
    x: Array, scale: Array, mean: Array, inverse: Array, dy: Array, *, problem: _Problem
) -> list[Array]:
    """dx, and float32 d_scale and d_bias [images, d]."""
    images, *_, d = x.shape
    if x.size == 0:
        return [x, *[jnp.zeros((images, d), jnp.float32)] * 2]
    rows, options = problem.prepare(x)
    dx, sums = layer_norm_kernels.backward(
        x.reshape(rows),
        scale,
        mean.reshape(rows[:2]),
        inverse.reshape(rows[:2]),
        dy.reshape(rows),
        **options,
    )
    d_scale, d_bias = jnp.moveaxis(sums.sum(1), 1, 0)
    return [dx.reshape(x.shape), d_scale, d_bias]


def _normalised(x: Array, scale: Array, bias: Array, *, problem: _Problem) -> list[Array]:
    """`_launch` under vmap and on a mesh, where rows may be split and no row is."""
    rows, params = _axes(x, scale)
    split = partitioned(
        partial(_launch, problem=problem),
        operands=[f"z {rows} d", params, params],
        outputs=[f"z {rows} d", f"z {rows}", f"z {rows}"],
        gathers=["d"],
    )

    def rule(size, has_axis, operands):
        x, scale, bias = operands
        if scale.ndim == bias.ndim == 2 and len(scale) == len(bias) == 1:
            # What is batched are rows like any others.
            outputs = _normalised(jnp.moveaxis(x, 0, 1), scale, bias, problem=problem)
            return [jnp.moveaxis(output, 1, 0) for output in outputs]
        return _as_images(partial(_normalised, problem=problem), size, has_axis, operands)

    return batched(split, rule)(x, scale, bias)


def _gradients_of(
    x: Array, scale: Array, mean: Array, inverse: Array, dy: Array, *, problem: _Problem
) -> list[Array]:
    """`_launch_gradients` under vmap and on a mesh, where its sums are over devices too."""
    rows, params = _axes(x, scale)
    split = partitioned(
        partial(_launch_gradients, problem=problem),
        operands=[f"z {rows} d", params, f"z {rows}", f"z {rows}", f"z {rows} d"],
        outputs=[f"z {rows} d", "z d", "z d"],
        sums_over=rows.split(" "),
        gathers=["d"],
    )
    rule = partial(_as_images, partial(_gradients_of, problem=problem))
    return batched(split, rule)(x, scale, mean, inverse, dy)


def _axes(x: Array, scale: Array) -> tuple[str, str]:
    """The names of the axes of x between the images and d, and of those of scale."""
    rows = " ".join(f"r{axis}" for axis in range(x.ndim - 2))
    return rows, "z d" if len(scale) == len(x) else "one d"


def _as_images(function: Any, size: int, has_axis: Any, operands: Any) -> list[Array]:
    """The vmap of a function of images: more images. Those that share a scale go on to."""
    images = operands[0].shape[1 if has_axis[0] else 0]

    def merged(operand, has):
        if not has:
            if operand.ndim == 2 and len(operand) == 1:
                return operand
            operand = jnp.broadcast_to(operand, (size, *operand.shape))
        operand = jnp.broadcast_to(operand, (size, images, *operand.shape[2:]))
        return operand.reshape(size * images, *operand.shape[2:])

    outputs = function(*map(merged, operands, has_axis))
    return [each.reshape(size, images, *each.shape[1:]) for each in outputs]


def _as_image(*arrays: Array) -> list[Array]:
    return [array[None] for array in arrays]


def _compute(problem: _Problem, x: Array, scale: Array, bias: Array) -> list[Array]:
    """y, and the mean and inverse of each row, which are for the backward pass alone."""
    outputs = _normalised(*_as_image(x, scale, bias), problem=problem)
    return [output[0] for output in outputs]


_layer_norm = jax.custom_vjp(_compute, nondiff_argnums=(0,))


def _forward(problem: _Problem, x: Array, scale: Array, bias: Array):
    # Not the launch but the function, so that a gradient has a gradient.
    outputs = _layer_norm(problem, x, scale, bias)
    return outputs, (x, scale, *outputs[1:], jnp.zeros(0, bias.dtype))


def _backward(problem: _Problem, saved, cotangents: list[Array]):
    *saved, like_bias = saved
    dx, d_scale, d_bias = _gradients(problem, *saved, cotangents[0])
    return dx, d_scale.astype(saved[1].dtype), d_bias.astype(like_bias.dtype)


def _compute_gradients(
    problem: _Problem, x: Array, scale: Array, mean: Array, inverse: Array, dy: Array
) -> tuple[Array, ...]:
    outputs = _gradients_of(*_as_image(x, scale, mean, inverse, dy), problem=problem)
    return tuple(output[0] for output in outputs)


_gradients = jax.custom_vjp(_compute_gradients, nondiff_argnums=(0,))


def _gradients_forward(problem: _Problem, x: Array, scale: Array, mean: Array, inverse: Array, dy):
    return _gradients(problem, x, scale, mean, inverse, dy), (x, scale, mean, dy)


def _gradients_backward(problem: _Problem, saved, cotangents):
    """Gradients of gradients are XLA's, of x itself: mean and inverse are functions of it."""
    x, scale, mean, dy = saved

    def gradients(x, scale, dy):
        wide = (each.astype(jnp.float32) for each in (x, scale, jnp.zeros_like(scale)))
        _, pull = jax.vjp(partial(reference, epsilon=problem.epsilon), *wide)
        dx, d_scale, d_bias = pull(dy.astype(jnp.float32))
        return dx.astype(x.dtype), d_scale, d_bias

    _, pull = jax.vjp(gradients, x, scale, dy)
    dx, d_scale, ddy = pull(cotangents)
    return dx, d_scale, jnp.zeros_like(mean), jnp.zeros_like(mean), ddy


_layer_norm.defvjp(_forward, _backward)
_gradients.defvjp(_gradients_forward, _gradients_backward)


def layer_norm(
    x: Float[Array, "*batch d"],
    scale: Float[Array, " d"],
    bias: Float[Array, " d"],
    *,
    epsilon: float = 1e-6,
    backend: Backend = "auto",
    blocks: Blocks | None = None,
) -> Float[Array, "*batch d"]:
    """(x - mean) / √(variance + ε) · scale + bias over the last axis, in x's dtype.

    Args:
      x: rows of d numbers.
      scale: one number for each column, of any floating dtype.
      bias: one number for each column, of any floating dtype.
      epsilon: ε, added to the variance.
      backend: "xla", differentiable in both modes; "triton", the kernels, on a GPU, in reverse mode
        only (the gradients of their gradients are XLA's); "interpret", the kernels' arithmetic on
        any hardware; or "auto", as tuned, else on a GPU the kernels for up to 4,096 columns, and
        XLA.
      blocks: both kernels'; by default `default_blocks`.

    Raises:
      TypeError: an array is not floating.
      ValueError: the shapes do not fit, `epsilon` is negative, or a name or `blocks` is refused.
      NotImplementedError: the kernels were asked for by name and do not have this dtype or d, or
        their forward-mode derivative was asked for.
    """
    epilogue.check_floating(x=x, scale=scale, bias=bias)
    _check_shapes(x, scale, bias)
    if not epsilon >= 0:
        raise ValueError(f"epsilon={epsilon} must not be negative")
    x, scale, bias = map(jnp.asarray, (x, scale, bias))
    lacking = _lacking(x, scale, bias)
    backend, blocks = selection.resolve(
        calls.LayerNorm(x.shape, dtype=x.dtype.name),
        backend,
        possible=not lacking,
        guess=launch.is_countable(x),
        blocks=blocks,
    )
    if backend == "xla":
        return _xla(epsilon, x, scale, bias)
    if lacking:
        raise NotImplementedError(f"{lacking}; backend='xla' takes any")
    if blocks is not None:
        _check_blocks(blocks, x.shape[-1])
    problem = _Problem(epsilon, backend, blocks)

    def run(x, scale, bias):
        rows = x if x.ndim > 1 else x[None]
        return _layer_norm(problem, *prepared(rows, scale, bias))[0].reshape(x.shape)

    rows = " ".join((*(f"r{axis}" for axis in range(x.ndim - 1)), "d"))
    return typed(run, [x, scale, bias], [rows, "d", "d"], rows)


def _check_shapes(x: Array, scale: Array, bias: Array) -> None:
    if x.ndim < 1:
        raise ValueError(f"x of shape {x.shape} must have an axis to normalise over")
    for name, each in (("scale", scale), ("bias", bias)):
        if each.shape != x.shape[-1:]:
            raise ValueError(f"{name} of shape {each.shape} must be {x.shape[-1:]}, x's last axis")


def _lacking(*arrays: Array) -> str:
    """What the kernels lack for these arrays, or nothing."""
    for array in arrays:
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"rows of {array.dtype} have no kernel: bfloat16, float16 and float32 have"
    d = arrays[0].shape[-1]
    return f"rows of d={d} have no kernel: those up to d={WIDEST} have" if d > WIDEST else ""


def _check_blocks(blocks: Blocks, d: int) -> None:
    if blocks.n < d:
        raise ValueError(f"blocks of n={blocks.n} must hold a row, of d={d}")
    if blocks.group & (blocks.group - 1):
        raise ValueError(f"blocks of group={blocks.group} must be a power of two")


def default_blocks(shape: tuple[int, int], dtype: DTypeLike) -> Blocks:
    """Blocks for (rows, d), with no spills on sm_80, sm_90 and sm_100.

    A thread has 16 elements of a row: with fewer, the sums over a row take too many instructions;
    with more, their registers leave room for too few warps.
    """
    rows, d = shape
    n = side(d, WIDEST)
    warps = min(max(2, n // 512), 8)
    group = min(max(1, 512 * warps // n), 1 << (max(rows, 1) - 1).bit_length())
    return Blocks(16, n, 16, warps, stages=1, splits=_together(warps), group=group)


def search_space(shape: tuple[int, int], dtype: DTypeLike) -> list[Blocks]:
    """What a tuner tries for (rows, d), the default first."""
    found = [default_blocks(shape, dtype)]
    n = found[0].n
    for warps in (1, 2, 4, 8, 16):
        for elements in (8, 16, 32):
            group = elements * 32 * warps // n
            for m in (16, 32, 64):
                if not 1 <= group <= m or m * n > 256 * 32 * warps:
                    continue
                for splits in {_together(warps), _together(2 * warps)}:
                    blocks = Blocks(m, n, 16, warps, 1, splits, group)
                    if blocks not in found:
                        found.append(blocks)
    return found


def _together(warps: int) -> int:
    """Blocks of threads that a GPU has room for at one time: 12 warps of 168 registers."""
    return MULTIPROCESSORS * max(1, 12 // warps)
