"""8-bit floats with one scale for a whole array: x ≈ scale · q, and how the scale is chosen.

Operands of a product are e4m3 (up to 448, three bits of mantissa: rounded by at most 1/16 of them),
gradients e5m2 (up to 57,344, two bits: at most 1/8), as Micikevicius et al., "FP8 Formats for Deep
Learning", arXiv:2209.05433, recommend. A scale spreads an array's numbers over what its type can
hold: scale = max |x| / 448. Between the largest number and the smallest normal one there is then
room for a factor of 28,672 (e4m3) or 939,524,096 (e5m2); smaller ones lose bits, then are zero.

Delayed scaling: an array is quantised by a scale that the largest numbers of the last steps gave,
so that nothing waits until all of it was looked at; its own largest number is for the next steps.
A number that is too large for its scale becomes the largest that the type has, with its sign: a
sudden growth saturates for one step. An infinity becomes NaN, as e4m3 has none, so that whoever
looks for overflow finds it; neither enters the history.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2


class Scale(NamedTuple):
    """An array's scale in this step, and what the next ones are chosen by."""

    scale: Float[Array, "*layers"]
    """x ≈ scale · q."""
    history: Float[Array, "*layers steps"]
    """The largest magnitudes of the last steps, the latest first; 0 for a step without one."""

    @classmethod
    def create(cls, history: int = 16) -> "Scale":
        """A scale of 1, and a history of so many steps without a number in it.

        Raises:
          ValueError: `history` is below 1.
        """
        if history < 1:
            raise ValueError(f"history={history} must be at least 1 step")
        return cls(jnp.ones((), jnp.float32), jnp.zeros(history, jnp.float32))


class ScaleState(NamedTuple):
    """The scales of a product a b in training: of both operands and of its result's gradient."""

    a: Scale
    b: Scale
    gradient: Scale

    @classmethod
    def create(cls, history: int = 16) -> "ScaleState":
        """The state before the first step, whose scales are 1.

        That suits numbers from 0.02 to 448 and gradients from 6e-5 to 57,344. Where those of the
        first step are larger they saturate; where smaller, they lose bits or are zero, once.

        Args:
          history: steps whose largest number chooses a scale.

        Raises:
          ValueError: `history` is below 1.
        """
        return cls(*(Scale.create(history) for _ in cls._fields))


def quantise(
    x: Float[Array, "..."], scale: Float[Array, ""], dtype: DTypeLike
) -> Float[Array, "..."]:
    """x / scale in an 8-bit type: rounded to the nearest, ties to even, and saturated if finite."""
    largest = float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    # 0 x is NaN where x is not finite; a choice between two numbers would be a pass of its own.
    return (jnp.clip(x / scale, -largest, largest) + 0 * x).astype(dtype)


def updated(state: Scale, magnitude: Float[Array, ""], dtype: DTypeLike) -> Scale:
    """The scale of the next step, by the largest numbers of this one and of those in the history.

    It stays as it was while none of them is known: none was finite, or all were zero.

    Args:
      state: of this step.
      magnitude: the largest |x| of this step's array.
      dtype: the 8-bit type that the array is quantised to.
    """
    known = jnp.where(jnp.isfinite(magnitude), magnitude, 0).astype(jnp.float32)
    history = jnp.concatenate([known[None], state.history[:-1]])
    largest = jnp.max(history)
    # 1 / scale must be finite too.
    scale = jnp.maximum(largest / float(jnp.finfo(dtype).max), jnp.finfo(jnp.float32).tiny)
    return Scale(jnp.where(largest > 0, scale, state.scale), history)


def magnitude(x: Float[Array, "..."], state: Scale) -> Float[Array, ""]:
    """The largest |x|: of all that `state` scales.

    Where a `vmap` has many x for one state, or a `shard_map` a part of x on each device, that is
    the largest of them all.
    """
    largest = _largest(x, state.history)
    shared = jax.typeof(largest).manual_axis_type.varying
    shared = tuple(shared - jax.typeof(state.history).manual_axis_type.varying)
    return jax.lax.pmax(largest, shared) if shared else largest


@jax.custom_batching.custom_vmap
def _largest(x: Array, history: Array) -> Array:
    """The largest |x| over all axes but as many in front as `history` has beside its steps."""
    axes = tuple(range(history.ndim - 1, x.ndim))
    return jnp.max(jnp.abs(x), axes, initial=0).astype(jnp.float32)


@_largest.def_vmap
def _(axis_size, in_batched, x, history):
    moves, own = in_batched
    if not own:
        return _largest(jnp.moveaxis(x, 0, -1), history), False
    x = x if moves else jnp.broadcast_to(x, (axis_size, *x.shape))
    return _largest(x, history), True
