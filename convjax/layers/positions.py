"""Positions of patches: fixed sines and cosines, and learned ones on another grid."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def sincos_positions(
    grid: tuple[int, int], width: int, *, class_token: bool = False, temperature: float = 10_000.0
) -> Float[np.ndarray, "1 t width"]:
    """Sines and cosines of the column, then of the row, at width / 4 wavelengths each.

    As in big_vision and MoCo v3 (Chen et al., 2021, arXiv:2104.02057). A class token gets zeros.

    Raises:
      ValueError: 4 does not divide the width, or it is less than 8.
    """
    if width % 4 or width < 8:
        raise ValueError(f"width={width} must be a multiple of 4, and at least 8, for sincos")
    rows, columns = np.mgrid[: grid[0], : grid[1]]
    frequencies = temperature ** -(np.arange(width // 4) / (width // 4 - 1))
    x, y = (place.reshape(-1, 1) * frequencies for place in (columns, rows))
    table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    table = np.concatenate([np.zeros((int(class_token), width)), table])
    return table[None].astype(np.float32)


def resize_positions(
    table: Float[Array, "1 t width"],
    grid: tuple[int, int],
    *,
    old_grid: tuple[int, int] | None = None,
    class_token: bool = True,
) -> Float[Array, "1 t_new width"]:
    """Learned positions for another grid of patches, (rows, columns), by bicubic interpolation.

    The paper's way to train on and evaluate larger images, section 3.2. Interpolation is
    antialiased, as in timm; the class token's position is kept.

    Args:
      table: [1, tokens, width].
      grid: the new one.
      old_grid: by default the square that fits.
      class_token: whether the first position is its.

    Raises:
      ValueError: the table does not fit `old_grid`, or is no square.
    """
    token, patches = table[:, : int(class_token)], table[:, int(class_token) :]
    count = patches.shape[1]
    rows, columns = (math.isqrt(count),) * 2 if old_grid is None else old_grid
    if rows * columns != count:
        asked = "a square" if old_grid is None else f"{rows}×{columns}"
        raise ValueError(
            f"{count} positions of patches are not those of {asked} grid: see old_grid"
        )
    square = patches.reshape(1, rows, columns, -1)
    resized = jax.image.resize(square, (1, *grid, square.shape[-1]), "bicubic")
    return jnp.concatenate([token, resized.reshape(1, grid[0] * grid[1], -1)], axis=1)
