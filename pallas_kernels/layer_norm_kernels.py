"""The kernels of `layer_norm`: they read a row once, into registers, and write one.

A block of threads holds `group` whole rows, padded to `n`, the next power of two. It walks over
rows with the next ones on their way, and reads scale and bias once. Backward, each block adds up
the gradients of scale and bias of its own rows, and XLA adds these sums, always in the same order.

A row is read as what differs from its first element, for then the float32 mean loses nothing of
rows far from zero: no element is further than √d standard deviations from the mean, nor is this
one. Kept are the mean of these differences and 1/√(variance + ε).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import launch, tiles
from pallas_kernels.blocks import Blocks, ceiling
from pallas_kernels.launch import Backend
from pallas_kernels.tiles import Span, span


@dataclass(frozen=True)
class _Walk:
    """How blocks of threads share the rows of images: each has `steps` times `group` of one."""

    rows: int
    d: int
    steps: int
    blocks: Blocks

    @property
    def parts(self) -> int:
        """Blocks of threads to an image."""
        return ceiling(self.rows, self.steps * self.blocks.group)

    def place(self) -> tuple[Any, Any]:
        """(image, part of it) of this block of threads."""
        program = pl.program_id(0)
        return lax.div(program, self.parts), lax.rem(program, self.parts)

    def columns(self) -> Span:
        return span(jnp.int32(0), self.blocks.n, self.d)

    def run(self, part: Any, load: Any, work: Any, carry: Any) -> Any:
        """`carry`, after `work(rows, load(rows), carry)` for all rows of a part."""
        group, share = self.blocks.group, self.steps * self.blocks.group
        end = jnp.minimum((part + 1) * share, self.rows)

        def rows(step):
            start = part * share + step * group
            return Span(start, group, lax.iota(jnp.int32, group) < end - start)

        def step(index, state):
            loaded, carry = state
            # There are no rows after the last, so that nothing is read then.
            following = load(rows(index + 1)) if self.steps > 1 else loaded
            return following, work(rows(index), loaded, carry)

        return lax.fori_loop(0, self.steps, step, (load(rows(0)), carry))[1]


def _load_shared(ref: Any, image: Any, columns: Span) -> Array:
    """The image's scale or bias, or that of all images."""
    image = image if ref.shape[0] > 1 else jnp.int32(0)
    return tiles.load(ref, image, columns).astype(jnp.float32)[None, :]


def forward(
    x: Float[Array, "images rows d"],
    scale: Float[Array, "_ d"],
    bias: Float[Array, "_ d"],
    *,
    epsilon: float,
    blocks: Blocks,
    backend: Backend,
) -> list[Array]:
    """y, and the mean and 1/√(variance + ε) of each row, [images, rows]."""
    images, rows, d = x.shape
    # Few rows are for as many blocks of threads as run at one time.
    share = ceiling(images * rows, blocks.group * blocks.splits)
    walk = _Walk(rows, d, max(1, min(blocks.m // blocks.group, share)), blocks)
    of_rows = jax.ShapeDtypeStruct((images, rows), jnp.float32)
    return launch.call(
        partial(_forward, epsilon=epsilon, walk=walk),
        x,
        scale,
        bias,
        grid=(walk.parts * images,),
        out=[jax.ShapeDtypeStruct(x.shape, x.dtype), of_rows, of_rows],
        blocks=blocks,
        backend=backend,
        algorithm="layer_norm",
        flops=8 * x.size,
    )


def _forward(
    x_ref, scale_ref, bias_ref, y_ref, mean_ref, inverse_ref, *, epsilon: float, walk: _Walk
):
    (image, part), columns = walk.place(), walk.columns()
    scale, bias = (_load_shared(ref, image, columns) for ref in (scale_ref, bias_ref))

    def load(rows):
        return tiles.load(x_ref, image, rows, columns), tiles.load(x_ref, image, rows, jnp.int32(0))

    def inside(x):
        mask = tiles.spread(tiles.as_row(columns.inside), x.shape)
        return x if mask is None else jnp.where(mask, x, 0)

    def work(rows, loaded, carry):
        x, first = (each.astype(jnp.float32) for each in loaded)
        x = inside(x - first[:, None])
        mean = jnp.sum(x, 1, keepdims=True) * (1 / walk.d)
        centred = inside(x - mean)
        variance = jnp.sum(centred * centred, 1, keepdims=True) * (1 / walk.d)
        inverse = lax.rsqrt(variance + epsilon)
        tiles.store(y_ref, image, rows, columns, value=centred * inverse * scale + bias)
        tiles.store(mean_ref, image, rows, value=mean[:, 0])
        tiles.store(inverse_ref, image, rows, value=inverse[:, 0])
        return carry

    walk.run(part, load, work, ())


def backward(
    x: Float[Array, "images rows d"],
    scale: Float[Array, "_ d"],
    mean: Float[Array, "images rows"],
    inverse: Float[Array, "images rows"],
    dy: Float[Array, "images rows d"],
    *,
    blocks: Blocks,
    backend: Backend,
) -> list[Array]:
    """dx, and the sums of d_scale and d_bias [images, parts, 2, d] that the blocks made."""
    images, rows, d = x.shape
    walk = _Walk(rows, d, ceiling(images * rows, blocks.group * blocks.splits), blocks)
    return launch.call(
        partial(_backward, walk=walk),
        x,
        scale,
        mean,
        inverse,
        dy,
        grid=(walk.parts * images,),
        out=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((images, walk.parts, 2, d), jnp.float32),
        ],
        blocks=blocks,
        backend=backend,
        algorithm="layer_norm_gradients",
        flops=14 * x.size,
    )


def _backward(x_ref, scale_ref, mean_ref, inverse_ref, dy_ref, dx_ref, sums_ref, *, walk: _Walk):
    (image, part), columns = walk.place(), walk.columns()
    scale = _load_shared(scale_ref, image, columns)

    def load(rows):
        wide = (tiles.load(ref, image, rows, columns) for ref in (x_ref, dy_ref))
        first = tiles.load(x_ref, image, rows, jnp.int32(0))
        return *wide, first, *(tiles.load(ref, image, rows) for ref in (mean_ref, inverse_ref))

    def work(rows, loaded, sums):
        x, dy, *of_rows = (each.astype(jnp.float32) for each in loaded)
        first, mean, inverse = (each[:, None] for each in of_rows)
        standard = (x - first) * inverse - mean * inverse
        scaled = dy * scale
        # Outside the row dy and scale are zero, so that these are means of its d elements.
        along = jnp.sum(scaled, 1, keepdims=True) * (1 / walk.d)
        across = jnp.sum(scaled * standard, 1, keepdims=True) * (1 / walk.d)
        dx = scaled * inverse - along * inverse - standard * (across * inverse)
        tiles.store(dx_ref, image, rows, columns, value=dx)
        d_scale, d_bias = sums
        return d_scale + dy * standard, d_bias + dy

    zero = jnp.zeros((walk.blocks.group, walk.blocks.n), jnp.float32)
    for index, total in enumerate(walk.run(part, load, work, (zero, zero))):
        tiles.store(sums_ref, image, part, jnp.int32(index), columns, value=jnp.sum(total, 0))
