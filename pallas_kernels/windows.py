"""Where windows fall on an image: padding, strides and dilation resolved to pixels, axis by axis.

Everything is a Python number, known before tracing. Convolution and pooling share this file, so
they agree on what "SAME" means: ceil(extent / stride) windows, and the odd pixel of padding goes
after. With a stride above 1 that is not symmetric padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Num

Pair = tuple[int, int]
"""(height, width)."""

Edges = tuple[tuple[int, int], tuple[int, int]]
"""((top, bottom), (left, right)), in pixels."""

Padding = Literal["SAME", "VALID"] | Edges


@dataclass(frozen=True)
class Windows:
    """Windows of `taps` pixels, `dilation` apart, that step by `stride` along an axis of `extent`
    pixels padded by `before` and `after`."""

    extent: int
    taps: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def span(self) -> int:
        """Pixels from a window's first tap to its last, both counted."""
        return (self.taps - 1) * self.dilation + 1

    @property
    def count(self) -> int:
        """The number of windows: the extent of the output."""
        return (self.extent + self.before + self.after - self.span) // self.stride + 1

    @property
    def reach(self) -> int:
        """Pixels from any tap of the first window to the same tap of the last, both counted."""
        return (self.count - 1) * self.stride + 1

    @property
    def padded(self) -> bool:
        return self.before + self.after > 0

    def pad(self, x: Num[Array, "..."], axis: int, fill: float | int) -> Num[Array, "..."]:
        """`x` with `fill` before and after it along `axis`."""
        edges = [(0, 0, 0)] * x.ndim
        edges[axis] = (self.before, self.after, 0)
        return lax.pad(x, jnp.asarray(fill, x.dtype), edges)

    def tap(self, padded: Num[Array, "..."], index: int, axis: int) -> Num[Array, "..."]:
        """What every window sees at its tap `index`: `padded` with `count` pixels along `axis`."""
        first = index * self.dilation
        return lax.slice_in_dim(padded, first, first + self.reach, self.stride, axis)


def pad(
    x: Num[Array, "b h w c"], rows: Windows, columns: Windows, fill: float | int = 0
) -> Num[Array, "b padded_h padded_w c"]:
    """x with `fill` all around it."""
    return columns.pad(rows.pad(x, 1, fill), 2, fill)


def shifts(
    x: Num[Array, "b h w c"], rows: Windows, columns: Windows, fill: float | int = 0
) -> Iterator[Num[Array, "b out_h out_w c"]]:
    """What the windows see at each tap, in reading order, with `fill` for padding."""
    padded = pad(x, rows, columns, fill)
    for i in range(rows.taps):
        across = rows.tap(padded, i, axis=1)
        for j in range(columns.taps):
            yield columns.tap(across, j, axis=2)


def resolve(
    image: Pair, size: Pair, *, strides: Pair, padding: Padding, dilation: Pair = (1, 1)
) -> tuple[Windows, Windows]:
    """Windows of `size` taps down and across an image of (height, width) pixels.

    Raises:
      ValueError: a size, stride or dilation is below 1, padding is negative or an unknown rule, or
        no window fits the padded image.
    """
    check(size, strides=strides, padding=padding, dilation=dilation)
    rows, columns = (
        _along(*axis, padding if isinstance(padding, str) else padding[index])
        for index, axis in enumerate(zip(image, size, strides, dilation, strict=True))
    )
    return rows, columns


def check(size: Any, *, strides: Any, padding: Any, dilation: Any = (1, 1)) -> None:
    """Refuses what is no size, stride, padding or dilation: see `resolve`."""
    for name, pair in (("window", size), ("strides", strides), ("dilation", dilation)):
        if not _is_pair(pair) or not all(map(_is_whole, pair)) or min(pair) < 1:
            raise ValueError(f"{name}={pair} must be (down, across), whole and each at least 1")
    if not isinstance(padding, str) and not (_is_pair(padding) and all(map(_is_pair, padding))):
        raise ValueError(f"padding={padding} must be a rule or ((top, bottom), (left, right))")


def smallest(counts: Pair, size: Pair, strides: Pair, padding: Padding, dilation: Pair) -> Pair:
    """(height, width) of the smallest image with `counts` windows; of "SAME", counts × strides."""
    if padding == "SAME":
        return counts[0] * strides[0], counts[1] * strides[1]
    edges = ((0, 0), (0, 0)) if isinstance(padding, str) else padding
    height, width = (
        (count - 1) * stride + (taps - 1) * gap + 1 - sum(sides)
        for count, taps, stride, gap, sides in zip(
            counts, size, strides, dilation, edges, strict=True
        )
    )
    if min(height, width) < 0:
        raise ValueError(
            f"padding={padding} leaves nothing of an image of {(height, width)} pixels for "
            f"{counts} windows of {size}"
        )
    return height, width


def check_pair(name: str, pair: object) -> None:
    """Refuses what is not (down, across) in whole numbers."""
    if not _is_pair(pair) or not all(map(_is_whole, pair)):  # pyright: ignore[reportArgumentType]
        raise ValueError(f"{name}={pair!r} must be (down, across), whole")


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _along(
    extent: int, taps: int, stride: int, dilation: int, padding: str | tuple[int, int]
) -> Windows:
    bare = Windows(*map(int, (extent, taps, stride, dilation)), before=0, after=0)
    match padding:
        case "VALID":
            before, after = 0, 0
        case "SAME":
            missing = max((-(-extent // stride) - 1) * stride + bare.span - extent, 0)
            before, after = missing // 2, missing - missing // 2
        case (before, after):
            if not (_is_whole(before) and _is_whole(after)):
                raise ValueError(f"padding={padding} must be whole pixels")
            if min(before, after) < 0:
                raise ValueError(f"padding={padding} must not be negative: slice the image instead")
        case rule:
            raise ValueError(f"padding={rule!r} must be 'SAME', 'VALID' or pixels")
    windows = replace(bare, before=int(before), after=int(after))
    if windows.count < 1:
        raise ValueError(
            f"a window that spans {windows.span} pixels does not fit {extent} pixels "
            f"padded by {(before, after)}"
        )
    return windows
