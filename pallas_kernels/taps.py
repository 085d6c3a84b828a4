"""Which source pixels a convolution's output pixels see, in either direction.

Forward, output pixel p sees x at p·stride + i·dilation - before under tap i. Transposed (the data
gradient), pixel h of x sees y at (h + before - i·dilation) / stride, under the taps that make this
whole. Pixels with the same remainder of h by the stride, a phase, see the same taps, so nothing is
multiplied by the zeros that a strided convolution's gradient is often written with.
"""

from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.blocks import ceiling
from pallas_kernels.tiles import Mask, both, under
from pallas_kernels.windows import Windows

Direction = Literal["forward", "transposed"]


@dataclass(frozen=True)
class Taps:
    """Output pixel number `i` of `phase`, at i·phases + phase, under its u-th tap, which is the
    kernel's tap first + u·step, sees source pixel i·stride + offset + u·shift."""

    phases: int
    outputs: int
    """Output pixels of a phase; the last may lie beyond the image."""
    extent: int
    """Pixels of the output image."""
    source: int
    """Pixels of the source image."""
    stride: int
    step: int
    shift: int
    first: tuple[int, ...]
    count: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def leave(self) -> bool:
        """Whether any tap of any output pixel falls outside the source."""
        far = (self.outputs - 1) * self.stride
        for count, offset in zip(self.count, self.offset, strict=True):
            ends = (offset, offset + (count - 1) * self.shift)
            if count and (min(ends) < 0 or max(ends) + far >= self.source):
                return True
        return False

    @property
    def ragged(self) -> bool:
        """Whether a phase has output pixels beyond the image."""
        return self.phases * self.outputs != self.extent


def taps(windows: Windows, direction: Direction) -> Taps:
    """The taps along one axis."""
    stride, dilation, before = windows.stride, windows.dilation, windows.before
    if direction == "forward":
        return Taps(
            phases=1,
            outputs=windows.count,
            extent=windows.count,
            source=windows.extent,
            stride=stride,
            step=1,
            shift=dilation,
            first=(0,),
            count=(windows.taps,),
            offset=(-before,),
        )
    common = gcd(stride, dilation)
    step = stride // common
    first, count, offset = [], [], []
    for phase in range(stride):
        # Tap i lands on a pixel of y if phase + before - i·dilation is a multiple of the stride;
        # if any of the first `step` does, so does every `step`-th from there on.
        hits = [i for i in range(step) if (phase + before - i * dilation) % stride == 0]
        start = hits[0] if hits else 0
        first.append(start)
        count.append(max(0, ceiling(windows.taps - start, step)) if hits else 0)
        offset.append((phase + before - start * dilation) // stride)
    return Taps(
        phases=stride,
        outputs=ceiling(windows.extent, stride),
        extent=windows.extent,
        source=windows.count,
        stride=1,
        step=step,
        shift=-(dilation // common),
        first=tuple(first),
        count=tuple(count),
        offset=tuple(offset),
    )


def at(values: tuple[int, ...], index: Any) -> Any:
    """values[index] for an index known in the kernel only."""
    if len(set(values)) == 1:
        return values[0]
    return reduce(
        lambda found, i: jnp.where(index == i, jnp.int32(values[i]), found),
        range(1, len(values)),
        jnp.int32(values[0]),
    )


def divide(value: Any, divisor: int) -> tuple[Any, Any]:
    """(quotient, remainder) of numbers that are not negative."""
    return lax.div(value, jnp.int32(divisor)), lax.rem(value, jnp.int32(divisor))


def pixel_of(index: Int[Array, " n"], height: int, width: int) -> tuple[Any, Any, Any]:
    """(image, row, column) of a pixel numbered through all images."""
    line, column = divide(index, width)
    return *divide(line, height), column


@dataclass(frozen=True)
class Walk:
    """A kernel's way through its sum: down the taps, across them, along blocks of channels.

    It counts as it goes, for a division in every step would cost as much as the addresses.
    """

    down: Any
    across: Any
    blocks: int

    @property
    def steps(self) -> Any:
        return self.down * self.across * self.blocks

    def next(self, u: Any, v: Any, block: Any) -> tuple[Any, Any, Any]:
        if self.blocks > 1:
            block = block + 1
            wraps = block == self.blocks
            block = jnp.where(wraps, 0, block)
        else:
            wraps = None
        if isinstance(self.across, int) and self.across == 1:
            return _count(u, wraps), v, block
        v = _count(v, wraps)
        wraps = v == self.across
        return _count(u, wraps), jnp.where(wraps, 0, v), block


def _count(value: Any, carry: Any) -> Any:
    return value + (1 if carry is None else carry.astype(jnp.int32))


@dataclass(frozen=True)
class Seen:
    """Which source pixels are there, for n output pixels whose first tap sees (row, column)."""

    row: Int[Array, " n"]
    column: Int[Array, " n"]
    down: Taps
    across: Taps
    always: bool
    """Whether every output pixel is."""
    bits: Int[Array, " n"] | None
    """One a tap, the first the lowest."""

    @classmethod
    def make(cls, row, column, down: Taps, across: Taps, *, always: bool, merged: bool) -> "Seen":
        """Makes the bits where there are at most 32: before the loop, for testing one takes half
        the instructions of comparing row and column."""
        widest, tallest = max(across.count), max(down.count)
        leave = down.leave or across.leave or not always
        bits = None
        if leave and not merged and widest * tallest <= 32:
            line = bits = jnp.zeros_like(row)
            for v in range(widest):
                there = under(column + v * across.shift, across.source)
                line = line | (there.astype(jnp.int32) << v)
            for u in range(tallest):
                there = under(row + u * down.shift, down.source)
                bits = bits | jnp.where(there, line << (u * widest), 0)
        return cls(row, column, down, across, always, bits)

    def tap(self, u: Any, v: Any) -> Mask:
        """Whether the source pixel under tap (u, v) is there."""
        if self.bits is not None:
            tap = jnp.int32(1) << (u * max(self.across.count) + v)
            return (self.bits & tap) != 0
        if self.always and not self.down.leave and not self.across.leave:
            return None
        mask = under(self.row + u * self.down.shift, self.down.source)
        return mask & under(self.column + v * self.across.shift, self.across.source)

    def run(self, u: Any, channels: int, depth: Int[Array, " k"]) -> Mask:
        """The numbers `depth` of a run of taps and channels of row u, for [m, k] elements."""
        mask: Mask = None
        if self.down.leave or not self.always:
            mask = under(self.row + u * self.down.shift, self.down.source)[:, None]
        if self.across.leave:
            place = (self.column * channels)[:, None] + depth[None, :]
            mask = both(mask, under(place, self.across.source * channels))
        return mask
