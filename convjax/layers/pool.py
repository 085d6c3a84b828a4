"""Pooling of NHWC images, with every rule on which peers differ as a named argument.

An image of height h, padded by p on each side, under windows of height k and stride s gives
⌊(h + 2p − k) / s⌋ + 1 rows, or ⌈…⌉ with `ceil_mode`: then the last window may hang over the edge,
as in AlexNet's, GoogLeNet's and Caffe's networks (112 → 56 under 3/2). A window that would start
beyond the image and its left padding is dropped, as in Caffe and torch.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

import pallas_kernels
from pallas_kernels import Backend

Padding = int | tuple[tuple[int, int], tuple[int, int]]


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

    Args:
        count_padding: whether padded pixels count in the divisor: [1, 2] padded by one on the right
            gives [1.5, 1] if so, else [1.5, 2]. The overhang of `ceil_mode` never counts (torch).

    Raises:
        ValueError: a window larger than the padded image.
    """
    asked = _sides(padding)
    sides = _window_padding(x.shape, window, strides, padding, ceil_mode)
    total = _window_sum(x.astype(jnp.float32), window, strides, sides)
    # The divisor is the same sum over an image of ones, padded by ones where padding counts.
    ones = np.ones(x.shape[1:3], np.float32)
    if count_padding:
        ones = np.pad(ones, asked, constant_values=1)
        sides = tuple(
            (low - asked_low, high - asked_high)
            for (low, high), (asked_low, asked_high) in zip(sides, asked, strict=True)
        )
    count = _window_sum(jnp.asarray(ones)[None, :, :, None], window, strides, sides)
    return (total / count).astype(x.dtype)


def global_avg_pool(x: Float[Array, "b h w c"]) -> Float[Array, "b c"]:
    """The mean over all pixels, [b, h, w, c] → [b, c], summed in float32."""
    return jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype)


def _window_sum(x: Array, window: tuple, strides: tuple, padding: tuple) -> Array:
    return lax.reduce_window(
        x, 0.0, lax.add, (1, *window, 1), (1, *strides, 1), ((0, 0), *padding, (0, 0))
    )


def _sides(padding: Padding) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((padding, padding), (padding, padding)) if isinstance(padding, int) else padding


def _window_padding(
    shape: tuple[int, ...],
    window: tuple[int, int],
    strides: tuple[int, int],
    padding: Padding,
    ceil_mode: bool,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The padding under which whole windows cover what the rounding rule asks for."""
    (top, left) = (
        _axis_padding(size, k, s, sides, ceil_mode)
        for size, k, s, sides in zip(shape[1:3], window, strides, _sides(padding), strict=True)
    )
    return top, left


def _axis_padding(
    size: int, k: int, s: int, sides: tuple[int, int], ceil_mode: bool
) -> tuple[int, int]:
    low, high = sides
    span = size + low + high - k
    if span < 0:
        raise ValueError(f"window={k} must not exceed the padded image's {size + low + high}")
    if not ceil_mode:
        return low, high
    windows = -(-span // s) + 1
    if (windows - 1) * s >= size + low:
        windows -= 1
    return low, max(high, (windows - 1) * s + k - size - low)
