"""Pooling of NHWC images, with every rule on which peers differ as a named argument.

An image of height h, padded by p on each side, under windows of height k and stride s gives
⌊(h + 2p - k) / s⌋ + 1 rows, or ⌈…⌉ with `ceil_mode`: then the last window may hang over the edge,
as in AlexNet's, GoogLeNet's and Caffe's networks (112 → 56 under 3/2). A window that would start
beyond the image and its left padding is dropped, as in Caffe and torch.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

import pallas_kernels
from convjax.layers.padding import Padding, explicit
from pallas_kernels import Backend, windows


def max_pool(
    x: Float[Array, "b h w c"],
    window: tuple[int, int],
    strides: tuple[int, int],
    *,
    padding: Padding = 0,
    ceil_mode: bool = False,
    backend: Backend = "auto",
) -> Float[Array, "b h_out w_out c"]:
    """The largest value of each window, [b, h, w, c] → [b, h_out, w_out, c].

    Raises:
      ValueError: a window larger than the padded image, or one that holds padding only.
    """
    sides = _window_padding(x.shape, window, strides, padding, ceil_mode)
    return pallas_kernels.max_pool(
        x, window=window, strides=strides, padding=sides, backend=backend
    )


def avg_pool(
    x: Float[Array, "b h w c"],
    window: tuple[int, int],
    strides: tuple[int, int],
    *,
    padding: Padding = 0,
    ceil_mode: bool = False,
    count_padding: bool = True,
) -> Float[Array, "b h_out w_out c"]:
    """The mean of each window, [b, h, w, c] → [b, h_out, w_out, c], summed in float32.

    `count_padding` says whether padded pixels count in the divisor: [1, 2] padded by one on the
    right gives [1.5, 1] if so, else [1.5, 2]. The overhang of `ceil_mode` never counts (torch).

    Raises:
      ValueError: as for `max_pool`.
    """
    sides = _window_padding(x.shape, window, strides, padding, ceil_mode)
    total = _window_sum(x.astype(jnp.float32), window, strides, sides)
    # The divisor is the same sum over ones. What is padded counts as one too, if it is to count;
    # the overhang of ceil_mode never is.
    ones = np.ones(x.shape[1:3], np.float32)
    if count_padding:
        asked = _window_padding(x.shape, window, strides, padding, ceil_mode=False)
        counted = [
            (low, min(high, asked_high))
            for (low, high), (_, asked_high) in zip(sides, asked, strict=True)
        ]
        ones = np.pad(ones, counted, constant_values=1)
        (_, bottom), (_, right) = (
            (0, high - counted_high)
            for (_, high), (_, counted_high) in zip(sides, counted, strict=True)
        )
        sides = ((0, bottom), (0, right))
    count = _window_sum(jnp.asarray(ones)[None, :, :, None], window, strides, sides)
    return (total / count).astype(x.dtype)


def global_avg_pool(x: Float[Array, "b h w c"]) -> Float[Array, "b c"]:
    """The mean over all pixels, [b, h, w, c] → [b, c], summed in float32."""
    return jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype)


def adaptive_avg_pool(
    x: Float[Array, "b h w c"], size: tuple[int, int]
) -> Float[Array, "b h_out w_out c"]:
    """Means over windows that spread over any image, [b, h, w, c] → [b, *size, c], in float32.

    Window i of n over h pixels goes from ⌊i h / n⌋ to ⌈(i + 1) h / n⌉, as in torch; they overlap
    where n does not divide h, and repeat pixels where n is larger.
    """
    if size == x.shape[1:3]:
        return x
    rows, columns = (
        jnp.asarray(_spread(extent, count))
        for extent, count in zip(x.shape[1:3], size, strict=True)
    )
    # Few windows over few pixels: two small products.
    means = jnp.einsum(
        "bhwc,ih,jw->bijc", x.astype(jnp.float32), rows, columns, precision="highest"
    )
    return means.astype(x.dtype)


def _spread(extent: int, count: int) -> np.ndarray:
    """Row i holds the weights of window i, [count, extent]."""
    pixels, window = np.arange(extent), np.arange(count)[:, None]
    inside = (pixels >= window * extent // count) & (pixels < -(-(window + 1) * extent // count))
    return (inside / inside.sum(axis=1, keepdims=True)).astype(np.float32)


def _window_sum(x: Array, window: tuple, strides: tuple, padding: tuple) -> Array:
    return lax.reduce_window(
        x, 0.0, lax.add, (1, *window, 1), (1, *strides, 1), ((0, 0), *padding, (0, 0))
    )


def _window_padding(
    shape: tuple[int, ...],
    window: tuple[int, int],
    strides: tuple[int, int],
    padding: Padding,
    ceil_mode: bool,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """((top, bottom), (left, right)) under which whole windows give the size that is asked for."""
    rows, columns = windows.resolve(
        (shape[1], shape[2]), window, strides=strides, padding=explicit(padding)
    )
    return _axis_padding(rows, ceil_mode), _axis_padding(columns, ceil_mode)


def _axis_padding(axis: windows.Windows, ceil_mode: bool) -> tuple[int, int]:
    before, after = axis.before, axis.after
    if max(before, after) >= axis.taps:
        raise ValueError(f"padding={(before, after)} must be smaller than the window's {axis.taps}")
    if not ceil_mode:
        return before, after
    padded = before + axis.extent + after
    count = -(-(padded - axis.taps) // axis.stride) + 1
    if (count - 1) * axis.stride >= before + axis.extent:
        count -= 1
    return before, max((count - 1) * axis.stride + axis.taps - before - axis.extent, 0)
