"""Matrix product with a fused epilogue: y = activation(a b + bias + residual).

FLOPs: 2 m n k. Bytes at best: a, b, bias and residual read once and y written once; the epilogue
adds no pass over y. Low precision is accumulated in float32. Kept for the backward pass: a, b and
what `epilogue` keeps. The gradients are two products in the operands' own dtype,
da = dy bᵀ and db = aᵀ dy, so bfloat16 training stays on bfloat16 matrix units.

The kernel: a block of threads owns an m×n tile of y. It walks along k, a tile of a and a tile of b
at a time on their way through shared memory to the Tensor Cores, with the sum in registers; then it
applies the epilogue and writes. Where m n is too small to fill a GPU and k is long, `splits` blocks
share a tile and XLA adds their sums, always in the same order. Either operand may be stored
transposed, so the gradients are the same kernel.

What the compiler makes of a 4096³ bfloat16 product on sm_90 (Triton 3.9), in instructions issued
while the Tensor Cores work for a cycle. It counts 4,096 multiply-adds to such a cycle; the
datasheet's 989 TFLOP/s come to half of that, so that below 2 the Tensor Cores set the pace:

  m×n×k, warps, stages      registers   loop   issue slots
  128×256×64, 8, 3              163      100      0.39      the default
  256×128×64, 8, 3              164      113      0.44      where n is 128
  128×128×64, 4, 3              160      124      0.48      with a transposed it spills on sm_80
  128×128×128, 8, 2             126      139      0.54
  128×128×64, 8, 3               93       88      0.69      where 128×256 would not fill a GPU
  128×128×64, 8, 3              157      155      1.21      accumulator + dot, unfused: see `launch`
  128×256×64, 8, 3              255      262      1.02      the same; it spills
"""

from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import calls, epilogue, launch, selection, tiles
from pallas_kernels.blocks import Blocks, ceiling, side
from pallas_kernels.calls import Call, Pass
from pallas_kernels.epilogue import Activation
from pallas_kernels.launch import Backend, Product
from pallas_kernels.tiles import span
from pallas_kernels.transformations import (
    batched,
    one_after_another,
    partitioned,
    prepared,
    typed,
)

MULTIPROCESSORS = 132
"""Of an H100 or H200; an A100 has 108, a B200 148."""


def reference(
    a: Float[Array, "*batch m k"],
    b: Float[Array, "... k n"],
    *,
    bias: Float[Array, " n"] | None = None,
    residual: Float[Array, "*batch m n"] | None = None,
    activation: Activation | None = None,
) -> Float[Array, "*batch m n"]:
    """The equation in float32 at the highest precision: what every backend is measured against."""
    product = jnp.matmul(
        a.astype(jnp.float32), b.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return epilogue.apply(
        product, bias=bias, residual=residual, activation=activation, out_dtype=jnp.float32
    )


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _xla_product(
    a: Array, b: Array, precision: lax.PrecisionLike, call: Call | None = None
) -> Array:
    """a b, accumulated and returned in float32, or in float64 for float64."""
    accumulator = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a, b, precision=precision, preferred_element_type=accumulator)


@partial(_xla_product.defjvp, symbolic_zeros=True)
def _xla_product_jvp(precision, call, primals, tangents):
    # Without this rule the transposed products would mix float32 cotangents with bfloat16 operands.
    (a, b), (da, db) = primals, tangents
    y = _xla_product(a, b, precision, call)
    terms = []
    # The tuner hears which gradients there are; what it answers decides at the next trace.
    if not isinstance(da, SymbolicZero):
        terms.append(jnp.matmul(da, b, precision=precision))
        _hear(call, "input_gradient")
    if not isinstance(db, SymbolicZero):
        terms.append(jnp.matmul(a, db, precision=precision))
        _hear(call, "kernel_gradient")
    return y, reduce(add, terms).astype(y.dtype)


def _hear(call: Call | None, which: Pass) -> None:
    if call is not None:
        selection.choose(call, which)


@dataclass(frozen=True)
class _Problem:
    """All there is to know about a product but its arrays.

    A transposed operand is stored so: a as [k, m], b as [n, k].
    """

    product: Product
    out_dtype: Any
    backend: Backend
    blocks: Blocks | None = None
    activation: Activation | None = None
    a_transposed: bool = False
    b_transposed: bool = False
    biased: bool = False
    added: bool = False
    """Whether there is a residual."""
    keeps: bool = False
    """Whether the activation's argument is an output too."""
    call: Call | None = None
    """What the tuner is asked about, if it is asked at all: this product, or the convolution that
    it is."""

    def sizes(self, a: Array, b: Array) -> tuple[int, int, int]:
        """(m, n, k)."""
        m, k = reversed(a.shape[-2:]) if self.a_transposed else a.shape[-2:]
        return m, b.shape[-2 if self.b_transposed else -1], k

    def terms(self, rest: Any) -> tuple[Any, Any]:
        """(bias, residual) of the operands after a and b."""
        bias = rest[0] if self.biased else None
        return bias, rest[self.biased] if self.added else None


def _kernel(a_ref, b_ref, *rest, problem: _Problem, blocks: Blocks, sizes: tuple[int, int, int]):
    m, n, k = sizes
    part, image = pl.program_id(1), pl.program_id(2)
    row, column = tiles.order(pl.program_id(0), m, n, blocks)
    rows, columns = span(row, blocks.m, m), span(column, blocks.n, n)
    steps = ceiling(ceiling(k, blocks.k), blocks.splits)
    covered = steps * blocks.splits * blocks.k

    def step(index, accumulator):
        inner = span(part * steps + index, blocks.k, k, covered=covered)
        a = _operand(a_ref, image, rows, inner, transposed=problem.a_transposed)
        b = _operand(b_ref, image, inner, columns, transposed=problem.b_transposed)
        return launch.dot(a, b, accumulator, problem.product)

    zero = jnp.zeros((blocks.m, blocks.n), jnp.float32)
    accumulator = lax.fori_loop(0, steps, step, zero)
    bias_ref, residual_ref = problem.terms(rest)
    y, z = epilogue.apply_in_kernel(
        accumulator,
        bias=None if bias_ref is None else tiles.load(bias_ref, columns)[None, :],
        residual=None if residual_ref is None else tiles.load(residual_ref, image, rows, columns),
        activation=problem.activation,
    )
    image = part * pl.num_programs(2) + image
    for ref, value in zip(rest[problem.biased + problem.added :], (y, z), strict=False):
        tiles.store(ref, image, rows, columns, value=value)


def _operand(ref, image, rows, columns, *, transposed: bool) -> Array:
    image = image if ref.shape[0] > 1 else jnp.int32(0)
    if transposed:
        return tiles.load(ref, image, columns, rows).T
    return tiles.load(ref, image, rows, columns)


def _launch(a: Array, b: Array, *rest: Array, problem: _Problem) -> list[Array]:
    """One launch: a [m, k] or [images, m, k] and b [k, n] or [images, k, n], either transposed."""
    m, n, k = sizes = problem.sizes(a, b)
    shape = (*max(a.shape[:-2], b.shape[:-2], key=len), m, n)
    bias, residual = problem.terms(rest)
    finish = partial(epilogue.apply, bias=bias, residual=residual, out_dtype=problem.out_dtype)
    activations = (problem.activation, None)[: 1 + problem.keeps]
    if problem.backend == "xla" or 0 in (*shape, k):
        y = _by_xla(a, b, problem)
        return [finish(y, activation=activation) for activation in activations]
    a, b = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    images = max(a.shape[0], b.shape[0])
    blocks = problem.blocks or default_blocks(
        sizes,
        a.dtype,
        batch=images,
        product=problem.product,
        crowded=problem.a_transposed
        or epilogue.crowds(problem.activation, added=problem.added, keeps=problem.keeps),
    )
    run = partial(_run, a, b, blocks=blocks, sizes=sizes, images=images)
    if blocks.splits > 1:
        bare = replace(
            problem, activation=None, biased=False, added=False, keeps=False, out_dtype=jnp.float32
        )
        (parts,) = run(problem=bare)
        total = parts.reshape(blocks.splits, *shape).sum(0)
        return [finish(total, activation=activation) for activation in activations]
    if residual is not None:
        rest = (*rest[: problem.biased], residual.reshape(images, m, n))
    return [output.reshape(shape) for output in run(*rest, problem=problem)]


def _by_xla(a: Array, b: Array, problem: _Problem) -> Array:
    """The product in float32, which the tuner may have found to be faster, or of no elements."""
    a = a.swapaxes(-1, -2) if problem.a_transposed else a
    b = b.swapaxes(-1, -2) if problem.b_transposed else b
    return _xla_product(a, b, launch.precision(problem.product))


def _run(
    *operands: Array, problem: _Problem, blocks: Blocks, sizes: tuple[int, int, int], images: int
) -> list[Array]:
    m, n, k = sizes
    out = jax.ShapeDtypeStruct((blocks.splits * images, m, n), problem.out_dtype)
    return launch.call(
        partial(_kernel, problem=problem, blocks=blocks, sizes=sizes),
        *operands,
        grid=(ceiling(m, blocks.m) * ceiling(n, blocks.n), blocks.splits, images),
        out=[out] * (1 + problem.keeps),
        blocks=blocks,
        backend=problem.backend,
        algorithm="matmul",
        flops=2 * images * m * n * k,
    )


def _on_any_mesh(a: Array, b: Array, *rest: Array, problem: _Problem) -> list[Array]:
    """`_launch` under vmap and on a mesh, which XLA does by itself for what is its own."""
    if problem.backend == "xla":
        return _launch(a, b, *rest, problem=problem)
    axes = [
        "z " * (a.ndim - 2) + ("k m" if problem.a_transposed else "m k"),
        "z " * (b.ndim - 2) + ("n k" if problem.b_transposed else "k n"),
    ]
    out = "z " * max(a.ndim - 2, b.ndim - 2) + "m n"
    linear = problem.activation is None  # but for what is added, which one device adds
    split = partitioned(
        partial(_launch, problem=problem),
        operands=[*axes, *["n"] * problem.biased, *[out] * problem.added],
        outputs=[out] * (1 + problem.keeps),
        sums_over=["k"] * linear,
        added_once=range(2, 2 + len(rest)),
        gathers=["k"] * (not linear),
    )

    def rule(size, has_axis, operands):
        bias_moves = problem.biased and has_axis[2]
        product_moves = has_axis[0] or has_axis[1]
        if (
            bias_moves
            or not product_moves
            or any(x.ndim > 2 + has for x, has in zip(operands, has_axis, strict=True))
        ):
            return one_after_another(call, size, has_axis, operands)
        a, b, *rest = operands
        if problem.added and not has_axis[-1]:
            rest[-1] = jnp.broadcast_to(rest[-1], (size, *rest[-1].shape))
        return _on_any_mesh(a, b, *rest, problem=problem)

    call = batched(split, rule)
    return call(a, b, *rest)


def _compute(problem: _Problem, a: Array, b: Array, rest: tuple[Array, ...]) -> list[Array]:
    """The product, and the activation's argument if the problem keeps it."""
    return _on_any_mesh(a, b, *rest, problem=problem)


_product = jax.custom_vjp(_compute, nondiff_argnums=(0,))


def _forward(problem: _Problem, a: Array, b: Array, rest: tuple[Array, ...]):
    keeps = problem.keeps or epilogue.keeps_argument(problem.activation)
    # Not the launch but the product, so that a gradient has a gradient.
    outputs = _product(replace(problem, keeps=keeps), a, b, rest)
    kept = outputs[-1] if epilogue.keeps_argument(problem.activation) else outputs[0]
    saved = a, b, kept if problem.activation else None, [jnp.zeros(0, x.dtype) for x in rest]
    return outputs[: 1 + problem.keeps], saved


def _backward(problem: _Problem, saved, gradients: list[Array]):
    a, b, kept, terms = saved
    dy, *dz_itself = gradients
    dz = sum(dz_itself, epilogue.transpose(dy, kept, problem.activation))
    da, db = _gradients(problem, a, b, dz.astype(a.dtype))
    bias, residual = problem.terms(terms)
    d_rest = []
    if bias is not None:
        d_rest.append(dz.sum(range(dz.ndim - 1)).astype(bias.dtype))
    if residual is not None:
        d_rest.append(dz.astype(residual.dtype))
    return da, db, tuple(d_rest)


def _gradients(problem: _Problem, a: Array, b: Array, dy: Array) -> tuple[Array, Array]:
    """dy bᵀ and aᵀ dy, as a and b are stored."""
    a_stored_as_it_is, b_stored_as_it_is = not problem.a_transposed, not problem.b_transposed
    of_a, of_b = (_gradient_problem(problem, a.dtype, which) for which in _GRADIENTS)
    if a_stored_as_it_is:
        (da,) = _product(replace(of_a, b_transposed=b_stored_as_it_is), dy, b, ())
    else:
        transposed = replace(of_a, a_transposed=problem.b_transposed, b_transposed=True)
        (da,) = _product(transposed, b, dy, ())
    if b_stored_as_it_is:
        (db,) = _product(replace(of_b, a_transposed=a_stored_as_it_is), a, dy, ())
    else:
        transposed = replace(of_b, a_transposed=True, b_transposed=problem.a_transposed)
        (db,) = _product(transposed, dy, a, ())
    return da, db


_GRADIENTS: tuple[Pass, Pass] = ("input_gradient", "kernel_gradient")


def _gradient_problem(problem: _Problem, dtype: Any, which: Pass) -> _Problem:
    """A gradient's product, in the way that was measured to be the fastest if one was."""
    choice = None if problem.call is None else selection.choose(problem.call, which)
    products = (None, "pointwise", "patches")  # of a convolution: those that are one
    if choice is None or (choice.backend == "triton" and choice.algorithm not in products):
        return _Problem(problem.product, dtype, problem.backend)
    return _Problem(problem.product, dtype, choice.backend, choice.blocks)


_product.defvjp(_forward, _backward)


def matmul(
    a: Float[Array, "*batch m k"],
    b: Float[Array, "... k n"],
    *,
    bias: Float[Array, " n"] | None = None,
    residual: Float[Array, "*batch m n"] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    backend: Backend = "auto",
    blocks: Blocks | None = None,
) -> Float[Array, "*batch m n"]:
    """activation(a b + bias + residual).

    Args:
      a: the left matrix, or a batch of them.
      b: the right matrix [k, n], shared by the batch, or one for each of it [*batch, k, n].
      bias: one number for each column.
      residual: added to the product before the activation.
      activation: applied in float32.
      out_dtype: the result's; by default the common dtype of a and b.
      precision: of the products, as in `jax.lax.dot_general`. The kernels multiply float32 in tf32
        unless it is "high" (three tf32 products) or "highest" (float32, without Tensor Cores).
      backend: "xla", differentiable in both modes; "triton", the kernel, on a GPU, in reverse mode
        only; "interpret", the kernel's arithmetic on any hardware; or "auto", what the tuner
        measured to be the fastest for each pass (`tune`), else on a GPU the kernel for 16-bit
        operands, and XLA. Where "auto" is a kernel, it has a kernel's derivatives.
      blocks: the forward kernel's; by default `default_blocks`.

    Raises:
      TypeError: a or b is not floating.
      ValueError: the shapes do not fit, or a name or `blocks` is refused.
      NotImplementedError: the kernel was asked for by name and cannot do this dtype or precision,
        or its forward-mode derivative was asked for.
    """
    epilogue.check_floating(a=a, b=b)
    _check_operands(a, b)
    a, b = jnp.asarray(a), jnp.asarray(b)
    dtype = jnp.promote_types(a.dtype, b.dtype)
    terms: dict[str, Any] = {"bias": bias, "residual": residual, "activation": activation}
    epilogue.check((*a.shape[:-1], b.shape[-1]), **terms)
    out_dtype = jax.dtypes.canonicalize_dtype(out_dtype or dtype)
    call = choice = None
    if backend == "auto" and blocks is None and launch.is_default(precision):
        call = calls.Matmul(
            a.shape,
            b.shape,
            bias=bias is not None,
            residual=residual is not None,
            activation=activation,
            out_dtype=out_dtype.name,
            dtype=dtype.name,
        )
        choice = selection.choose(call, "forward")
    kernel_first = launch.platform() == "gpu" and _prefers_kernel(a, b, dtype, call)
    backend = launch.resolve(
        "matmul", backend, available=launch.ranked(kernel_first), blocks=blocks
    )
    a, b = a.astype(dtype), b.astype(dtype)
    if backend == "xla":
        return epilogue.apply(_xla_product(a, b, precision, call), **terms, out_dtype=out_dtype)
    if choice is not None:
        backend, blocks = choice.backend, choice.blocks
    product = launch.product(dtype, precision)
    return kernel_product(
        a, b, **terms, out_dtype=out_dtype, product=product, backend=backend, blocks=blocks,
        call=call,
    )  # fmt: skip


def _prefers_kernel(a: Array, b: Array, dtype: Any, call: Call | None) -> bool:
    """Whether the kernel is the better choice on a GPU for one of the passes: where they were
    measured by that, else for 16-bit operands."""
    measured = None if call is None else selection.kernel_measured(call)
    if measured is not None:
        return measured
    largest = max(a.size, b.size, prod(a.shape[:-1]) * b.shape[-1])
    return dtype in (jnp.bfloat16, jnp.float16) and largest < launch.COUNTABLE


def kernel_product(
    a: Float[Array, "*batch m k"], b: Float[Array, "... k n"], *,
    bias: Float[Array, " n"] | None, residual: Float[Array, "*batch m n"] | None,
    activation: Activation | None, out_dtype: DTypeLike, product: Product, backend: Backend,
    blocks: Blocks | None, call: Call | None,
) -> Float[Array, "*batch m n"]:  # fmt: skip
    """`matmul` of operands of one dtype, with the kernel's derivatives.

    `product` says how they are multiplied. The backend is that of the forward pass, and of the
    gradients unless the tuner knows better: `call`, the product or the convolution that is one, is
    what it is asked about. The rest is as in `matmul`.
    """
    problem = _Problem(
        product,
        out_dtype,
        backend,
        blocks,
        activation,
        biased=bias is not None,
        added=residual is not None,
        call=call,
    )
    terms = [term for term in (bias, residual) if term is not None]
    images = " ".join(f"z{axis}" for axis in range(a.ndim - 2))
    axes_of_b = "k n" if b.ndim == 2 else f"{images} k n"
    return typed(
        partial(_batched_product, problem),
        [a, b, *terms],
        [
            f"{images} m k".strip(),
            axes_of_b,
            *["n"] * problem.biased,
            *[f"{images} m n".strip()] * problem.added,
        ],
        f"{images} m n".strip(),
    )


def _batched_product(problem: _Problem, a: Array, b: Array, *terms: Array) -> Array:
    """The product of any batch; one that shares b is one tall matrix."""
    *batch, m, k = a.shape
    n = b.shape[-1]
    rows = (prod((*batch, m)),) if b.ndim == 2 else (prod(batch), m)
    if problem.added:
        terms = (*terms[: problem.biased], terms[-1].reshape(*rows, n))
    a, b, *rest = prepared(a.reshape(*rows, k), b.reshape(*rows[:-1], k, n), *terms)
    (y,) = _product(problem, a, b, tuple(rest))
    return y.reshape(*batch, m, n)


def _check_operands(a: Array, b: Array) -> None:
    if a.ndim < 2 or b.ndim not in (2, a.ndim) or (b.ndim > 2 and b.shape[:-2] != a.shape[:-2]):
        raise ValueError(
            f"b of shape {b.shape} must be one matrix, or one for each of a's, of shape {a.shape}"
        )
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a has k={a.shape[-1]} columns but b has k={b.shape[-2]} rows")


def default_blocks(
    shape: tuple[int, int, int],
    dtype: DTypeLike,
    *,
    batch: int = 1,
    product: Product | None = None,
    crowded: bool = False,
    splits: bool = True,
) -> Blocks:
    """Blocks for a product, with no spills on sm_80, sm_90 and sm_100.

    The largest tile, and a smaller one where that would leave idle some of the 132 multiprocessors
    of an H200; then, where `splits` allows, the sum over k is split.

    Args:
      shape: (m, n, k).
      dtype: of a and b.
      batch: products of this shape in one launch.
      product: how float32 is multiplied.
      crowded: that an epilogue, or a transposed a, leaves too few registers for the largest tiles.
      splits: whether the sum may be split.
    """
    m, n, k = shape
    wide = jnp.dtype(dtype).itemsize > 2
    largest = 64 if product in ("ieee", "tf32x3") else 128
    tile_m, tile_n, tile_k = side(m, largest), side(n, largest), side(k, 32 if wide else 64)
    parts, steps = 1, ceiling(k, tile_k)

    def launched(tile_m: int, tile_n: int) -> int:
        return batch * ceiling(m, tile_m) * ceiling(n, tile_n) * parts

    if not (wide or crowded):
        for large_m, large_n in ((128, 256), (256, 128)):
            fits = m >= large_m and n % large_n == 0
            if fits and launched(large_m, large_n) >= 2 * MULTIPROCESSORS:
                return Blocks(large_m, large_n, tile_k, warps=8)
    long = splits and k >= 8 * max(m, n)
    while long and launched(tile_m, tile_n) < MULTIPROCESSORS and steps >= 16 * parts:
        parts *= 2
    while launched(tile_m, tile_n) < MULTIPROCESSORS and max(tile_m, tile_n) > 64:
        tile_m, tile_n = (tile_m // 2, tile_n) if tile_m >= tile_n else (tile_m, tile_n // 2)
    while splits and launched(tile_m, tile_n) < MULTIPROCESSORS and steps >= 16 * parts:
        parts *= 2
    # Warps and stages that spill nowhere; the same tile with others does, on one or the other.
    area = tile_m * tile_n
    largest_area = area == 128 * 128
    # On sm_100 4 warps of tf32 have 96 or 128 registers a thread: too few for half of that area.
    warps = 8 if largest_area or (wide and area in (128 * 64, 128 * 32)) else 4
    deep = area == 64 * 64 or (crowded and tile_n == 16 and not wide)
    stages = 2 if largest_area and wide else 4 if deep else 3
    return Blocks(tile_m, tile_n, tile_k, warps=warps, stages=stages, splits=parts)


def search_space(shape: tuple[int, int, int], dtype: DTypeLike) -> list[Blocks]:
    """What a tuner tries for a product of (m, n, k), the default first."""
    m, n, k = shape
    wide = jnp.dtype(dtype).itemsize > 2
    first = default_blocks(shape, dtype)
    found = [first]
    for tile_m, tile_n, warps in (
        (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (64, 256, 4),
        (256, 64, 4), (128, 256, 8), (256, 128, 8),
    ):  # fmt: skip
        for tile_k in (32, 64) if wide else (32, 64, 128):
            for stages in (2, 3, 4):
                for splits in sorted({1, first.splits, 2 * first.splits}):
                    blocks = Blocks(
                        side(m, tile_m), side(n, tile_n), side(k, tile_k), warps, stages, splits
                    )
                    shared = stages * (blocks.m + blocks.n) * blocks.k * (4 if wide else 2)
                    # sm_80 has 163 KiB of shared memory to a block.
                    if shared <= 163 * 1024 and blocks not in found:
                        found.append(blocks)
    return found
