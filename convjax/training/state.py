"""Everything that a training step reads and writes, as one pytree."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Key, PyTree


@runtime_checkable
class Trainable(Protocol):
    """What training needs of a network: a `flax.linen.Module`, or `convjax.sharding.Towers`."""

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any: ...

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any: ...


@flax.struct.dataclass
class TrainState:
    """A run between two steps.

    Randomness is no part of it: step `n` draws from the run's key folded with `n`.

    Attributes:
      step: updates made so far, an int32 scalar.
      params: float32 parameters.
      batch_stats: running statistics of batch norms; empty where the network has none.
      opt_state: what the optimiser remembers.
    """

    # PyTree too, and no array: states of shapes, of host arrays and of shardings are states.
    step: PyTree
    params: PyTree
    batch_stats: PyTree
    opt_state: PyTree


def create_state(
    model: Trainable,
    optimiser: optax.GradientTransformation,
    key: Key[Array, ""],
    image_shape: tuple[int, int, int],
    layout: Callable[[TrainState], PyTree] | None = None,
) -> TrainState:
    """Initialise a network and its optimiser.

    Args:
      model: called on images [b, h, w, c] with `train=False`.
      optimiser: made by `make_optimiser`.
      key: of the initial parameters.
      image_shape: (h, w, c).
      layout: gives the shardings of a state; None leaves it on the default device.
    """
    images = jnp.zeros((1, *image_shape), jnp.float32)
    variables = model.init(key, images, train=False)  # outside of jit, where nothing is compiled
    make = functools.partial(_state, optimiser)
    shardings = layout(jax.eval_shape(make, variables)) if layout else None
    return jax.jit(make, out_shardings=shardings)(variables)


def abstract_state(
    model: Trainable,
    optimiser: optax.GradientTransformation,
    image_shape: tuple[int, int, int],
    layout: Callable[[TrainState], PyTree] | None = None,
) -> TrainState:
    """Return shapes, dtypes and shardings of `create_state`'s leaves; nothing is computed."""
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)

    def init(key: Key[Array, ""], images: Float32[Array, "1 h w c"]) -> TrainState:
        return _state(optimiser, model.init(key, images, train=False))

    state = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)), images)
    if layout is None:
        return state
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        layout(state),
    )


def count_parameters(state: TrainState) -> int:
    """Return the number of trainable numbers."""
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


def _state(optimiser: optax.GradientTransformation, variables: PyTree) -> TrainState:
    params = variables["params"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        batch_stats=variables.get("batch_stats", {}),
        opt_state=optimiser.init(params),
    )
