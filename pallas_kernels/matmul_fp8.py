"""Matrix product of 8-bit floats, for training: y = activation(a b + bias), by Tensor Cores of fp8.

a and b are quantised to e4m3 and the gradient of the result to e5m2, each by a scale of its own
(see `float8`); the three products are of 8-bit numbers, added in float32 and multiplied by both
scales before anything else is done to them. 8-bit Tensor Cores do twice the FLOPs of 16-bit ones,
and read half the bytes. Parameters, biases, results and gradients stay what they are.

Hopper's fp8 instructions want the summed axis last in both operands, and so does a thread that
loads 16 bytes at a time. Each product sums over another axis, so each array is written twice: a as
[m, k] for a b and as [k, m] for aᵀ dy; b as [n, k] and as [k, n] for dy bᵀ; dy as [m, n] and as
[n, m]. XLA transposes while it quantises: either both are written in one reading of the array, or
the second is made of the first, of a byte a number; the largest number costs another reading. (In
front of dy, an activation's gradient is first written as float32.) Kept for the backward pass: a
byte for each number of a and b, and what `epilogue` keeps.

Gradients do not go through the rounding: to a and b they are those of a b where a and b are what
they were rounded to, and a number that saturated has a gradient as if it had not.

What the compiler makes of 4096³ and 8192³ (Triton 3.9), in the measure of `matmul`, whose cycle has
8,192 multiply-adds of fp8: here too the Tensor Cores set the pace below 2 issue slots.

          m×n×k, warps, stages   registers  loop  issue slots  matrix instructions
  sm_90   256×128×128, 8, 3         255      251     0.98      8 QGMMA      the default
          128×128×128, 8, 3         170      149     1.16      4 QGMMA      with masks, or smaller
          128×128×128, 4, 3         253      259     1.01      8 QGMMA
          128×128×256, 8, 2         241      269     1.05      8 QGMMA
          128×256×128, 8, 3         255      276     1.08      4 QGMMA      it spills
          128×256×128, 8, 3         170       98     0.38      4 QGMMA      sums in 14 bits
          128×128×128, 8, 3         173      258     2.02      4 QGMMA      b stored as [k, n]
          128×128×128, 8, 3         150      396     1.55    128 HMMA       no limit in the dot
  sm_100  256×128×128, 8, 3         146      125     0.98      8 UTCQMMA    the default

Half of the default's loop adds partial sums on the CUDA cores: `launch.PARTIAL_SUM` says why. That
would overlap better in a kernel on Mosaic GPU, whose wgmma takes fp8 of one type on jax 0.12.

sm_80 has no fp8: there the kernel does not compile, and XLA multiplies in 16 bits. What a GPU can
do is not known when a call is traced, and the kernel was not timed beside cuBLASLt; so "auto" is
XLA, which calls that (`__cublas$lt$matmul$f8`) for all three products.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import epilogue, float8, launch, tiles
from pallas_kernels.blocks import Blocks, ceiling, side
from pallas_kernels.epilogue import Activation
from pallas_kernels.float8 import E4M3, E5M2, ScaleState
from pallas_kernels.launch import Backend
from pallas_kernels.matmul import MULTIPROCESSORS
from pallas_kernels.tiles import span
from pallas_kernels.transformations import (
    batched,
    one_after_another,
    partitioned,
    prepared,
    typed,
)


def reference(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    state: ScaleState,
    *,
    bias: Float[Array, " n"] | None = None,
    activation: Activation | None = None,
) -> Float[Array, "m n"]:
    """The equation in float32, of what a and b are rounded to: every backend's measure."""
    a, b = (
        float8.quantise(each, scale.scale, E4M3).astype(jnp.float32) * scale.scale
        for each, scale in ((a, state.a), (b, state.b))
    )
    product = jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    return epilogue.apply(
        product, bias=bias, residual=None, activation=activation, out_dtype=jnp.float32
    )


@dataclass(frozen=True)
class _Problem:
    """All there is to know about a product but its arrays."""

    out_dtype: Any
    backend: Backend
    blocks: Blocks | None = None
    activation: Activation | None = None
    keeps: bool = False
    """Whether the activation's argument is an output too."""


def _kernel(a_ref, b_ref, scale_ref, *rest, problem: _Problem, blocks: Blocks, biased: bool):
    (_, m, k), n = a_ref.shape, b_ref.shape[-2]
    part, image = pl.program_id(1), pl.program_id(2)
    row, column = tiles.order(pl.program_id(0), m, n, blocks)
    rows, columns = span(row, blocks.m, m), span(column, blocks.n, n)
    steps = ceiling(ceiling(k, blocks.k), blocks.splits)
    covered = steps * blocks.splits * blocks.k

    def of(ref):
        return image if ref.shape[0] > 1 else jnp.int32(0)

    def step(index, accumulator):
        inner = span(part * steps + index, blocks.k, k, covered=covered)
        a = tiles.load(a_ref, of(a_ref), rows, inner)
        b = tiles.load(b_ref, of(b_ref), columns, inner)
        return launch.dot(a, b.T, accumulator, "operands")

    zero = jnp.zeros((blocks.m, blocks.n), jnp.float32)
    accumulator = lax.fori_loop(0, steps, step, zero)
    outputs = epilogue.apply_in_kernel(
        accumulator * tiles.load(scale_ref, of(scale_ref)),
        bias=tiles.load(rest[0], of(rest[0]), columns)[None, :] if biased else None,
        residual=None,
        activation=problem.activation,
    )
    image = part * pl.num_programs(2) + image
    for ref, value in zip(rest[biased:], outputs, strict=False):
        tiles.store(ref, image, rows, columns, value=value)


def _launch(a: Array, b: Array, scale: Array, *bias: Array, problem: _Problem) -> list[Array]:
    """One launch: a [m, k], b [n, k], scale [1] and bias [n], each of them alone or a stack."""
    (m, k), n = a.shape[-2:], b.shape[-2]
    stack = max(
        a.shape[:-2], b.shape[:-2], scale.shape[:-1], *(x.shape[:-1] for x in bias), key=len
    )
    shape = (*stack, m, n)
    activations = (problem.activation, None)[: 1 + problem.keeps]

    def finish(sums: Array) -> list[Array]:
        z = sums + bias[0].reshape(*[-1] * len(stack), 1, n).astype(sums.dtype) if bias else sums
        apply = partial(epilogue.apply, z, bias=None, residual=None, out_dtype=problem.out_dtype)
        return [apply(activation=activation) for activation in activations]

    if 0 in (*shape, k):
        return finish(jnp.zeros(shape, jnp.float32))
    images = stack[0] if stack else 1
    a, b = (_in_sixteens(x.reshape(-1, *x.shape[-2:])) for x in (a, b))
    rows = [scale.reshape(-1), *(x.reshape(-1, n) for x in bias)]
    blocks = problem.blocks or default_blocks(
        (m, n, a.shape[-1]), batch=images, smooth=epilogue.keeps_argument(problem.activation)
    )
    if blocks.splits > 1:
        bare = _Problem(jnp.float32, problem.backend)
        (parts,) = _run(a, b, rows[0], problem=bare, blocks=blocks, images=images)
        return finish(parts.reshape(blocks.splits, *shape).sum(0))
    outputs = _run(a, b, *rows, problem=problem, blocks=blocks, images=images)
    return [output.reshape(shape) for output in outputs]


def _in_sixteens(x: Float[Array, "z rows k"]) -> Float[Array, "z rows padded"]:
    """`x` with zeros up to a multiple of 16 along k: a thread loads 16 bytes at a time, or one."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % 16)))


def _run(*operands: Array, problem: _Problem, blocks: Blocks, images: int) -> list[Array]:
    (_, m, k), n = operands[0].shape, operands[1].shape[-2]
    out = jax.ShapeDtypeStruct((blocks.splits * images, m, n), problem.out_dtype)
    return launch.call(
        partial(_kernel, problem=problem, blocks=blocks, biased=len(operands) > 3),
        *operands,
        grid=(ceiling(m, blocks.m) * ceiling(n, blocks.n), blocks.splits, images),
        out=[out] * (1 + problem.keeps),
        blocks=blocks,
        backend=problem.backend,
        algorithm="matmul_fp8",
        flops=2 * images * m * n * k,
    )


def _on_any_mesh(a: Array, b: Array, scale: Array, *bias: Array, problem: _Problem) -> list[Array]:
    """`_launch` under vmap and on a mesh."""
    operands = [a, b, scale, *bias]
    axes = ["m k", "n k", "one", "n"][: len(operands)]
    stacked = [x.ndim > len(own.split(" ")) for x, own in zip(operands, axes, strict=True)]
    linear = problem.activation is None and not bias
    split = partitioned(
        partial(_launch, problem=problem),
        operands=["z " * has + own for has, own in zip(stacked, axes, strict=True)],
        outputs=["z " * any(stacked) + "m n"] * (1 + problem.keeps),
        sums_over=["k"] * linear,
        gathers=["k"] * (not linear) + ["one"],
    )

    def rule(size, has_axis, operands):
        if any(stacked):
            return one_after_another(call, size, has_axis, operands)
        return _on_any_mesh(*operands, problem=problem)

    call = batched(split, rule)
    return call(*operands)


def scaled_product(
    a: Float[Array, "m k"],
    b: Float[Array, "n k"],
    scale: Float[Array, ""],
    bias: Float[Array, " n"] | None,
    problem: _Problem,
) -> list[Float[Array, "m n"]]:
    """[activation(scale · a bᵀ + bias)] of 8-bit floats, and the activation's argument if kept."""
    if problem.backend != "xla":
        terms = [jnp.reshape(scale, 1), *([] if bias is None else [bias])]
        return _on_any_mesh(*prepared(a, b, *terms), problem=problem)
    # cuBLASLt adds as the kernel does only at the highest precision.
    sums = lax.dot_general(
        a,
        b,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    finish = partial(epilogue.apply, bias=bias, residual=None, out_dtype=problem.out_dtype)
    activations = (problem.activation, None)[: 1 + problem.keeps]
    return [finish(sums * scale, activation=activation) for activation in activations]


def _compute(problem: _Problem, a: Array, b: Array, bias: Array | None, state: ScaleState) -> Array:
    a = float8.quantise(a, state.a.scale, E4M3)
    b = float8.quantise(b, state.b.scale, E4M3)
    return scaled_product(a, b.T, state.a.scale * state.b.scale, bias, problem)[0]


_product = jax.custom_vjp(_compute, nondiff_argnums=(0,))


@jax.custom_jvp
def _differentiated_once(arrays: Any) -> Any:
    return arrays


@_differentiated_once.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        "matmul_fp8 has first derivatives only: pallas_kernels.matmul has them to any order"
    )


def _forward(problem: _Problem, a: Array, b: Array, bias: Array | None, state: ScaleState):
    a, b, bias, state = _differentiated_once((a, b, bias, state))
    q_a = float8.quantise(a, state.a.scale, E4M3)
    q_b = float8.quantise(b, state.b.scale, E4M3)
    keeps = epilogue.keeps_argument(problem.activation)
    scale = state.a.scale * state.b.scale
    outputs = scaled_product(q_a, q_b.T, scale, bias, replace(problem, keeps=keeps))
    following = ScaleState(
        float8.updated(state.a, float8.magnitude(a, state.a), E4M3),
        float8.updated(state.b, float8.magnitude(b, state.b), E4M3),
        state.gradient,
    )
    like = [None if x is None else jnp.zeros(0, x.dtype) for x in (a, b, bias)]
    kept = outputs[-1] if problem.activation else None
    return outputs[0], (q_a.T, q_b, kept, state.a.scale, state.b.scale, following, like)


def _backward(problem: _Problem, saved, dy: Array):
    q_a_transposed, q_b, kept, scale_a, scale_b, following, (a, b, bias) = saved
    dz = dy if kept is None else epilogue.transpose(dy, kept, problem.activation)
    scale = following.gradient.scale
    q_dz = float8.quantise(dz, scale, E5M2)
    of_a, of_b = (_Problem(x.dtype, problem.backend) for x in (a, b))
    (da,) = scaled_product(q_dz, q_b, scale * scale_b, None, of_a)
    (db,) = scaled_product(q_a_transposed, q_dz.T, scale_a * scale, None, of_b)
    d_bias = None if bias is None else dz.sum(0, dtype=jnp.float32).astype(bias.dtype)
    largest = float8.magnitude(dz, following.gradient)
    gradient = float8.updated(following.gradient, largest, E5M2)
    return da, db, d_bias, following._replace(gradient=gradient)


_product.defvjp(_forward, _backward)


def matmul_fp8(
    a: Float[Array, "*batch m k"],
    b: Float[Array, "k n"],
    state: ScaleState,
    *,
    bias: Float[Array, " n"] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
    backend: Backend = "auto",
    blocks: Blocks | None = None,
) -> Float[Array, "*batch m n"]:
    """activation(a b + bias), multiplied in 8-bit floats; forward and backward.

    The largest number of a gradient is known in the backward pass only, so the state of the next
    step comes out there: what `jax.grad` returns for `state` is no gradient, but the next state.

        (grads, state) = jax.grad(loss, (0, 1))(parameters, state)

    So each product has a state of its own, that is used once in a step: jax adds the gradients of
    what is used twice. One state for all elements of a `vmap` is right, and so is one for all
    devices of a mesh: their largest number decides. (In a `shard_map` only if it checks: jax then
    knows which arrays differ between devices.) Layers under a `scan` have their states stacked.

    Args:
      a: the left matrix, or a batch of them that shares b and a scale.
      b: the right matrix.
      state: the scales, at first `ScaleState.create()`.
      bias: one number for each column.
      activation: applied in float32.
      out_dtype: the result's; by default the common dtype of a and b.
      backend: "xla", which calls cuBLASLt where there is fp8; "triton", the kernel, on GPUs from
        sm_89 on; "interpret", the kernel's arithmetic on any hardware; or "auto", which is XLA.
      blocks: the forward kernel's; by default `default_blocks`.

    Raises:
      TypeError: a or b is not floating, or `state` is no `ScaleState`; or the derivative is asked
        for in forward mode.
      ValueError: the shapes do not fit, or a name or `blocks` is refused.
      NotImplementedError: a second derivative was asked for, or an array is too large for the
        kernel.
    """
    epilogue.check_floating(a=a, b=b)
    if not isinstance(state, ScaleState):
        raise TypeError(f"state of type {type(state).__name__} must be a ScaleState")
    if a.ndim < 2 or b.ndim != 2 or a.shape[-1] != b.shape[0]:
        raise ValueError(f"a of shape {a.shape} and b of {b.shape} must be [..., m, k] and [k, n]")
    backend = launch.resolve(
        "matmul_fp8", backend, available=launch.ranked(kernel_first=False), blocks=blocks
    )
    a, b = jnp.asarray(a), jnp.asarray(b)
    epilogue.check((*a.shape[:-1], b.shape[1]), bias=bias, residual=None, activation=activation)
    out_dtype = jax.dtypes.canonicalize_dtype(out_dtype or jnp.promote_types(a.dtype, b.dtype))
    problem = _Problem(out_dtype, backend, blocks, activation)
    rows = " ".join(f"m{axis}" for axis in range(a.ndim - 1))
    leaves, structure = jax.tree.flatten(state)
    terms = [] if bias is None else [bias]

    def product(a, b, *rest):
        state = jax.tree.unflatten(structure, rest[len(terms) :])
        rows, k = a.shape[:-1], a.shape[-1]
        a, b, *bias = _varying_together(a.reshape(prod(rows), k), b, *rest[: len(terms)])
        y = _product(problem, a, b, bias[0] if bias else None, state)
        return y.reshape(*rows, y.shape[-1])

    return typed(
        product,
        [a, b, *terms, *leaves],
        [f"{rows} k", "k n", *["n"] * len(terms), *["_"] * len(leaves)],
        f"{rows} n",
    )


def _varying_together(*arrays: Array) -> list[Array]:
    """`arrays`, inside a `shard_map` varying over the same axes of the mesh."""
    own = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    every = frozenset().union(*own)
    return [
        lax.pcast(array, tuple(every - axes), to="varying")
        for array, axes in zip(arrays, own, strict=True)
    ]


def default_blocks(shape: tuple[int, int, int], *, batch: int = 1, smooth: bool = False) -> Blocks:
    """Blocks for a product, with no spills on sm_90 and sm_100.

    The largest tile, or a smaller one where that would leave idle some of the 132 multiprocessors
    of an H200; then the sum over k is split.

    Args:
      shape: (m, n, k).
      batch: products of this shape in one launch.
      smooth: that an activation leaves too few registers for the largest tile.
    """
    m, n, k = shape
    # Hopper's fp8 instruction has 64 rows, or it is one of 16 bits; each adds 32 products.
    tile_m, tile_n, tile_k = max(64, side(m, 128)), side(n, 128), max(32, side(k, 128))

    def launched(tile_m: int, tile_n: int) -> int:
        return batch * ceiling(m, tile_m) * ceiling(n, tile_n)

    # Beside its partial sums it has no registers left for masks.
    whole = m % 256 == 0 and n % 128 == 0
    if whole and not smooth and launched(256, 128) >= MULTIPROCESSORS:
        return Blocks(256, 128, tile_k, warps=8)
    while launched(tile_m, tile_n) < MULTIPROCESSORS and max(tile_m, tile_n) > 64:
        tile_m, tile_n = (tile_m // 2, tile_n) if tile_m >= tile_n else (tile_m, tile_n // 2)
    splits, steps = 1, ceiling(k, tile_k)
    while launched(tile_m, tile_n) * splits < MULTIPROCESSORS and steps >= 8 * splits:
        splits *= 2
    warps = 8 if tile_m * tile_n == 128 * 128 else 4
    return Blocks(tile_m, tile_n, tile_k, warps, stages=3 if warps == 8 else 4, splits=splits)


def search_space(shape: tuple[int, int, int]) -> list[Blocks]:
    """What a tuner tries for a product of (m, n, k), the default first."""
    m, n, k = shape
    found = [default_blocks(shape)]
    for tile_m, tile_n, warps in (
        (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 64, 4),
        (256, 128, 8),
    ):  # fmt: skip
        for tile_k in (64, 128, 256):
            for stages in (2, 3, 4):
                for splits in sorted({1, found[0].splits, 2 * found[0].splits}):
                    blocks = Blocks(
                        max(64, side(m, tile_m)),
                        side(n, tile_n),
                        max(32, side(k, tile_k)),
                        warps,
                        stages,
                        splits,
                    )
                    # sm_90 has 227 KiB of shared memory to a block.
                    fits = stages * (blocks.m + blocks.n) * blocks.k <= 227 * 1024
                    if fits and blocks not in found:
                        found.append(blocks)
    return found
