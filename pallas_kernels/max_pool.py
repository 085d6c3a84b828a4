"""The largest value in each window.

y[b, p, q, c] = max_{i, j} x[b, p·stride + i - top, q·stride + j - left, c]

A running maximum over the pixels of all windows at once, kh·kw - 1 comparisons an output value.
Bytes at best: x read once, y written once. Kept for the backward pass: one byte a comparison. The
gradient goes to the first of equal values in reading order, as in torch and cuDNN, by selects:
XLA's own gradient of a windowed maximum, select-and-scatter, takes 3 to 20 times as long on a CPU.
"""

from functools import reduce

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num

from pallas_kernels import launch, windows
from pallas_kernels.launch import Backend
from pallas_kernels.windows import Padding, Pair


def reference(
    x: Num[Array, "b h w c"], *, window: Pair, strides: Pair, padding: Padding
) -> Num[Array, "b out_h out_w c"]:
    """The equation by XLA's windowed reduction: what every backend is measured against."""
    sides = padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0))
    return lax.reduce_window(
        x, x.dtype.type(_lowest(x)), lax.max, (1, *window, 1), (1, *strides, 1), sides
    )


def max_pool(
    x: Num[Array, "b h w c"],
    *,
    window: Pair,
    strides: Pair,
    padding: Padding,
    backend: Backend = "auto",
) -> Num[Array, "b out_h out_w c"]:
    """The largest value in each window; NaN where there is one.

    Args:
      x: images.
      window: (height, width), in pixels.
      strides: pixels, (down, across), from one window to the next.
      padding: ((top, bottom), (left, right)) pixels, "VALID" for none, or "SAME" for
        ceil(size / stride) windows. Padded pixels are never the largest. Rounding the output size
        up ("ceil mode") is a matter of padding more below and to the right.
      backend: "xla", or "auto".

    Raises:
      ValueError: the window does not fit, lies on padding alone somewhere, or `backend` is unknown.
      NotImplementedError: the backend is not there yet.
    """
    launch.resolve("max_pool", backend, available=("xla",))
    if x.ndim != 4:
        raise ValueError(f"x of shape {x.shape} must have four axes")
    image = (x.shape[1], x.shape[2])
    rows, columns = windows.resolve(image, window, strides=strides, padding=padding)
    for name, axis in (("height", rows), ("width", columns)):
        last = (axis.count - 1) * axis.stride - axis.before
        if axis.before >= axis.taps or last >= axis.extent:
            raise ValueError(
                f"padding={(axis.before, axis.after)} leaves a window of {name} {axis.taps} with "
                f"no pixel of the image's {axis.extent}"
            )
    first, *others = windows.shifts(x, rows, columns, fill=_lowest(x))
    return reduce(_larger, others, first)


def _lowest(x: Array) -> float | int:
    return -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else int(jnp.iinfo(x.dtype).min)


def _larger(largest: Array, value: Array) -> Array:
    # Strictly greater: the first of equal values stays, and gets the gradient.
    return jnp.where((value > largest) | jnp.isnan(value), value, largest)
