"""The largest value in each window, where it was, and the way back.

    y[b, p, q, c] = max_{i, j} x[b, p·stride + i - top, q·stride + j - left, c]

Comparisons: kh·kw - 1 an output value. Bytes at best: x read once, y written once. Kept for the
backward pass: one byte a window, its switch i·kw + j, the tap of the largest value. Of equal values
that is the first in reading order, as in cuDNN; NaN is larger than any number; padding, which is
smaller than any, never has the switch. `max_unpool` sends a number for each window to the pixel at
its switch, and adds up where windows overlap: the gradient, and the unpooling of Zeiler and Fergus,
"Visualizing and Understanding Convolutional Networks", arXiv:1311.2901.

The XLA backend makes the same selections, a tap at a time for all windows at once. XLA's own
gradient of a windowed maximum is a select-and-scatter: on a CPU, forward and backward together then
take 5 to 15 times as long. The kernels are in `max_pool_kernels`.
"""

import math
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num, UInt8

from pallas_kernels import calls, epilogue, launch, selection, windows
from pallas_kernels.blocks import Blocks, ceiling
from pallas_kernels.conv2d_algorithms import Layout
from pallas_kernels.launch import Backend
from pallas_kernels.max_pool_kernels import (
    MOST_TAPS,
    Problem,
    default_blocks,
    pool,
    search_space,
    unpool,
)
from pallas_kernels.transformations import batched, partitioned, prepared, typed
from pallas_kernels.windows import Padding, Pair, Windows

__all__ = [
    "default_blocks",
    "max_pool",
    "max_pool_with_switches",
    "max_unpool",
    "reference",
    "search_space",
]


def reference(
    x: Num[Array, "b h w c"], *, window: Pair, strides: Pair, padding: Padding
) -> Num[Array, "b out_h out_w c"]:
    """The equation by XLA's windowed reduction: what every backend is measured against."""
    sides = padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0))
    return lax.reduce_window(
        x, x.dtype.type(_lowest(x)), lax.max, (1, *window, 1), (1, *strides, 1), sides
    )


def _lowest(x: Array) -> float | int:
    return -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else int(jnp.iinfo(x.dtype).min)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _largest(problem: Problem, x: Num[Array, "b h w c"]) -> Num[Array, "b p q c"]:
    """y by XLA."""
    first, *others = windows.shifts(x, problem.rows, problem.columns, fill=_lowest(x))

    def larger(largest, value):
        return jnp.where((value > largest) | jnp.isnan(value), value, largest)

    return reduce(larger, others, first)


@_largest.defjvp
def _largest_jvp(problem: Problem, primals, tangents):
    (x,), (dx,) = primals, tangents
    # The comparisons with each tap are made again in the backward pass: only the switches are kept.
    follow = jax.checkpoint(partial(_at_switches, problem))
    return _largest(problem, x), follow(dx, _switches(problem, x))


def _switches(problem: Problem, x: Num[Array, "b h w c"]) -> Array:
    """The switches by XLA, of any number of taps."""
    rows, columns = problem.rows, problem.columns
    x = lax.stop_gradient(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # XLA:CPU compares bfloat16 slowly
    dtype = jnp.uint8 if problem.taps <= MOST_TAPS else jnp.int32
    shape = (x.shape[0], *problem.counts, x.shape[3])
    largest, switch = jnp.full(shape, _lowest(x), x.dtype), jnp.zeros(shape, dtype)
    seen = windows.shifts(x, rows, columns, fill=_lowest(x))
    inside = windows.shifts(jnp.ones((1, *problem.image, 1), jnp.uint8), rows, columns)
    # From the last to the first, so that the first of equal values has the last word.
    for tap, (value, there) in reversed(list(enumerate(zip(seen, inside, strict=True)))):
        take = (value >= largest) | jnp.isnan(value)
        if rows.padded or columns.padded:
            take = take & (there > 0)
        largest = jnp.where(take, value, largest)
        switch = jnp.where(take, jnp.asarray(tap, dtype), switch)
    # XLA:CPU would find the switches again for every tap that they are compared with, dozens of
    # times, and has no barrier against it. It fuses no windowed maximum; this is one of 0, switch.
    window, edges = (2, 1, 1, 1, 1), ((1, 0), *[(0, 0)] * 4)
    zero = jnp.zeros((), dtype)
    return lax.reduce_window(switch[None], zero, lax.max, window, (1,) * 5, edges)[0]


def _at_switches(problem: Problem, x: Float[Array, "b h w c"], switches: Array) -> Array:
    """What the windows see at their switches: linear in x, and its transpose is `max_unpool`.

    Pixels with the same remainders by the strides are an image each, where windows are neighbours.
    So the transpose has no pixels with zeros between them.
    """
    (rows, columns), wide = (problem.rows, problem.columns), jnp.promote_types(x.dtype, jnp.float32)
    padded = windows.pad(x, rows, columns)
    for axis, along in ((1, rows), (2, columns)):
        length = (along.count + ceiling(along.taps, along.stride) - 1) * along.stride
        edges = [(0, 0, 0)] * 4
        edges[axis] = (0, length - padded.shape[axis], 0)
        padded = lax.pad(padded, jnp.zeros((), x.dtype), edges)
    b, h, w, c = padded.shape
    h, w = h // rows.stride, w // columns.stride
    split = padded.reshape(b, h, rows.stride, w, columns.stride, c)
    total = jnp.zeros(switches.shape, wide)
    lines = lax.split(split, (1,) * rows.stride, axis=2)
    for i, line in enumerate(lines[: rows.taps]):
        images = lax.split(line, (1,) * columns.stride, axis=4)
        for j, image in enumerate(images[: columns.taps]):
            image = image.reshape(b, h, w, c).astype(wide)
            for u in range(i, rows.taps, rows.stride):
                for v in range(j, columns.taps, columns.stride):
                    down, across = u // rows.stride, v // columns.stride
                    seen = image[:, down : down + rows.count, across : across + columns.count]
                    total = total + jnp.where(switches == u * columns.taps + v, seen, 0)
    return total.astype(x.dtype)


def _to_switches(problem: Problem, y: Float[Array, "b p q c"], switches: Array) -> Array:
    """The transpose of `_at_switches`."""
    x = jax.ShapeDtypeStruct((y.shape[0], *problem.image, y.shape[3]), y.dtype)
    transpose = jax.linear_transpose(lambda x: _at_switches(problem, x, switches), x)
    return transpose(y)[0]


def _on_any_mesh(
    run: Any, arrays: tuple[Array, ...], outputs: int, *, forward: bool
) -> list[Array]:
    """A launch under vmap and on a mesh."""
    lead = " ".join(f"a{axis}" for axis in range(arrays[0].ndim - 3))
    names = [f"{lead} h w c", f"{lead} p q c"]
    source, target = names if forward else reversed(names)
    split = partitioned(
        run,
        operands=[source] * len(arrays),
        outputs=[target] * outputs,
        gathers=["h", "w", "p", "q"],
    )

    def rule(size, has_axis, operands):
        together = (
            operand if has else jnp.broadcast_to(operand, (size, *operand.shape))
            for operand, has in zip(operands, has_axis, strict=True)
        )
        return _on_any_mesh(run, tuple(together), outputs, forward=forward)

    return batched(split, rule)(*arrays)


def _compute(problem: Problem, switches: bool, x: Array) -> list[Array]:
    run = partial(pool, problem=problem, switches=switches)
    return _on_any_mesh(run, (x,), 1 + switches, forward=True)


_pooled = jax.custom_vjp(_compute, nondiff_argnums=(0, 1))


def _forward(problem: Problem, switches: bool, x: Array):
    outputs = _pooled(problem, True, x)
    return outputs[: 1 + switches], outputs[1]


def _backward(problem: Problem, switches: bool, kept: Array, gradients: list[Any]):
    return (_unpooled(problem, gradients[0], kept),)


_pooled.defvjp(_forward, _backward)


def _compute_unpool(problem: Problem, y: Array, switches: Array) -> Array:
    run = partial(unpool, problem=problem)
    return _on_any_mesh(run, (y, switches), 1, forward=False)[0]


_unpooled = jax.custom_vjp(_compute_unpool, nondiff_argnums=(0,))


def _unpool_backward(problem: Problem, switches: Array, dx: Array):
    # Seldom asked for: a gradient of the gradient, or of an unpooling.
    return _over_batches(_at_switches, problem, dx, switches), None


_unpooled.defvjp(lambda problem, y, s: (_unpooled(problem, y, s), s), _unpool_backward)


def _over_batches(function: Any, problem: Problem, *arrays: Array) -> Any:
    """XLA's `function`, which takes one axis of images, of arrays with any number of them."""
    run = partial(function, problem)
    for _ in range(arrays[0].ndim - 4):
        run = jax.vmap(run)
    return run(*arrays)


def max_pool(
    x: Num[Array, "_ _ _ _"],
    *,
    window: Pair,
    strides: Pair,
    padding: Padding,
    layout: Layout = "NHWC",
    backend: Backend = "auto",
    blocks: Blocks | None = None,
) -> Num[Array, "_ _ _ _"]:
    """The largest value in each window; NaN where there is one.

    Args:
      x: images in `layout`.
      window: (height, width), in pixels.
      strides: pixels, (down, across), from one window to the next.
      padding: ((top, bottom), (left, right)) pixels, "VALID" for none, or "SAME" for
        ceil(size / stride) windows. Padded pixels are never the largest. Rounding the output size
        up ("ceil mode") is a matter of padding more below and to the right.
      layout: the order of the axes of x and of the result.
      backend: "xla", differentiable in both modes; "triton", the kernels, on a GPU, in reverse mode
        only; "interpret", their arithmetic on any hardware; or "auto", on a GPU the kernels where
        a thread's 16 bytes are of one pixel, else XLA.
      blocks: the forward kernel's; by default `default_blocks`.

    Raises:
      ValueError: the window does not fit, lies on padding alone somewhere, or a name or `blocks` is
        refused.
      NotImplementedError: the kernels were asked for by name and have no such dtype or window, or
        their forward-mode derivative was asked for.
    """
    problem = _resolve("max_pool", x, window, strides, padding, layout, backend, blocks)

    def run(x: Array) -> Array:
        if problem.backend == "xla":
            return _over_batches(_largest, problem, x)
        return _pooled(problem, False, *prepared(x))[0]

    return _in_layout(run, [x], layout)


def max_pool_with_switches(
    x: Num[Array, "_ _ _ _"],
    *,
    window: Pair,
    strides: Pair,
    padding: Padding,
    layout: Layout = "NHWC",
    backend: Backend = "auto",
    blocks: Blocks | None = None,
) -> tuple[Num[Array, "_ _ _ _"], UInt8[Array, "_ _ _ _"]]:
    """`max_pool` and, for each window, the tap i·width + j of its first largest value.

    Raises:
      ValueError: as in `max_pool`, or a window has more than 255 taps.
      NotImplementedError: as in `max_pool`.
    """
    problem = _resolve(
        "max_pool_with_switches", x, window, strides, padding, layout, backend, blocks
    )

    def run(x: Array) -> list[Array]:
        if problem.backend == "xla":
            return [_over_batches(each, problem, x) for each in (_largest, _switches)]
        return _pooled(problem, True, *prepared(x))

    y, switches = _in_layout(run, [x], layout, outputs=2)
    return y, switches


def max_unpool(
    y: Float[Array, "_ _ _ _"],
    switches: UInt8[Array, "_ _ _ _"],
    *,
    window: Pair,
    strides: Pair,
    padding: Padding,
    size: Pair,
    layout: Layout = "NHWC",
    backend: Backend = "auto",
) -> Float[Array, "_ _ _ _"]:
    """The adjoint of `max_pool` for fixed switches: each number goes where its window's switch is.

    Numbers that go to one pixel are added, in float32.

    Args:
      y: a number for each window, in `layout`.
      switches: of `max_pool_with_switches`, in the shape of y.
      window: as in `max_pool`.
      strides: as in `max_pool`.
      padding: as in `max_pool`.
      size: (height, width) of the result.
      layout: as in `max_pool`.
      backend: as in `max_pool`.

    Raises:
      TypeError: y is not floating, or the switches are not uint8.
      ValueError: images of `size` have not such windows, or as in `max_pool_with_switches`.
      NotImplementedError: as in `max_pool`.
    """
    epilogue.check_floating(y=y)
    if switches.dtype != jnp.uint8:
        raise TypeError(f"switches of dtype {switches.dtype} must be uint8")
    if switches.shape != y.shape:
        raise ValueError(f"switches of shape {switches.shape} must have y's shape {y.shape}")
    windows.check_pair("size", size)
    problem = _resolve(
        "max_unpool", y, window, strides, padding, layout, backend, None, image=tuple(size)
    )
    counts = tuple(y.shape[layout.index(axis)] for axis in "HW")
    if counts != problem.counts:
        raise ValueError(f"images of size={size} have {problem.counts} windows, but y has {counts}")

    def run(y: Array, switches: Array) -> Array:
        if problem.backend == "xla":
            return _over_batches(_to_switches, problem, y, switches)
        (y,) = prepared(y)
        return _unpooled(problem, y, switches)

    return _in_layout(run, [y, switches], layout)


def _resolve(
    operation: str, x: Array, window: Any, strides: Any, padding: Any, layout: Layout,
    backend: str, blocks: Any, *, image: Any = None,
) -> Problem:  # fmt: skip
    """The pooling of x, or to x from images of size `image`, on the backend that does it."""
    if layout not in ("NHWC", "CHWN", "NCHW"):
        raise ValueError(f"layout={layout!r} must be NHWC, CHWN or NCHW")
    if x.ndim != 4:
        raise ValueError(f"an array of shape {x.shape} must have four axes")
    if image is None:
        image = x.shape[layout.index("H")], x.shape[layout.index("W")]
    rows, columns = windows.resolve(image, window, strides=strides, padding=padding)
    for name, axis in (("height", rows), ("width", columns)):
        last = (axis.count - 1) * axis.stride - axis.before
        if axis.before >= axis.taps or last >= axis.extent:
            raise ValueError(
                f"padding={(axis.before, axis.after)} leaves a window of {name} {axis.taps} with "
                f"no pixel of the image's {axis.extent}"
            )
    problem = Problem(rows, columns, "xla", blocks)
    if problem.taps > MOST_TAPS and operation != "max_pool":
        raise ValueError(f"{window=} must have at most {MOST_TAPS} taps: a switch is a byte")
    refusal = None
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        refusal = f"an array of {x.dtype} has no kernel: bfloat16, float16 and float32 have"
    elif problem.taps > MOST_TAPS:
        refusal = f"window={window} has no kernel: those of at most {MOST_TAPS} taps have"
    inner = 1 if layout == "NCHW" else x.shape[3]
    pixels = max(math.prod(image), math.prod(problem.counts))
    size = x.size // max(x.shape[layout.index("H")] * x.shape[layout.index("W")], 1) * pixels
    countable = launch.is_countable(x) and size < launch.COUNTABLE
    covered = countable and inner * x.dtype.itemsize % 16 == 0
    if operation == "max_pool":
        call = _call(x, rows, columns, layout)
        chosen, blocks = selection.resolve(
            call, backend, possible=refusal is None, guess=covered, blocks=blocks
        )
    else:
        available = launch.ranked(launch.platform() == "gpu" and refusal is None and covered)
        chosen = launch.resolve(operation, backend, available=available, blocks=blocks)
    if chosen != "xla" and refusal is not None:
        raise NotImplementedError(f"{refusal}; backend='xla' takes any")
    return replace(problem, backend=chosen, blocks=blocks)


def _call(x: Array, rows: Windows, columns: Windows, layout: Layout) -> calls.MaxPool:
    """The call of `max_pool` that the tuner is asked about."""
    return calls.MaxPool(
        x.shape,
        (rows.taps, columns.taps),
        (rows.stride, columns.stride),
        ((rows.before, rows.after), (columns.before, columns.after)),
        layout,
        dtype=x.dtype.name,
    )


def _in_layout(run: Any, arrays: list[Array], layout: str, outputs: int = 1) -> Any:
    """`run` of arrays of images whose height and width are the third and second axis from the end.

    So they are in "NHWC" and "CHWN"; "NCHW" gets an axis of one.
    """
    last = layout == "NCHW"

    def inside(*arrays: Array) -> Any:
        outputs = run(*(array[..., None] for array in arrays) if last else arrays)
        return jax.tree.map(lambda output: output[..., 0] if last else output, outputs)

    if outputs > 1 and not jax.typeof(arrays[0]).sharding.mesh.explicit_axes:
        return inside(*arrays)
    axes = " ".join("_" if axis in "HW" else axis.lower() for axis in layout)
    split = partial(typed, arrays=arrays, operands=[axes] * len(arrays), output=axes)
    if outputs == 1:
        return split(inside)
    return [split(lambda *arrays, i=i: inside(*arrays)[i]) for i in range(outputs)]
