"""Everything that a training step reads and writes, as one pytree."""

import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Key, PyTree


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
    model: nn.Module,
    optimiser: optax.GradientTransformation,
    key: Key[Array, ""],
    image_shape: tuple[int, int, int],
) -> TrainState:
    """Initialise a network and its optimiser.

    Args:
      model: called on images [b, h, w, c] with `train=False`.
      optimiser: made by `make_optimiser`.
      key: of the initial parameters.
      image_shape: (h, w, c).
    """
    images = jnp.zeros((1, *image_shape), jnp.float32)
    variables = model.init(key, images, train=False)  # outside of jit, where nothing is compiled
    return jax.jit(functools.partial(_state, optimiser))(variables)


def abstract_state(
    model: nn.Module,
    optimiser: optax.GradientTransformation,
    image_shape: tuple[int, int, int],
) -> TrainState:
    """Return the shapes and dtypes of `create_state`'s leaves; nothing is computed."""
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)

    def init(key: Key[Array, ""], images: Float32[Array, "1 h w c"]) -> TrainState:
        return _state(optimiser, model.init(key, images, train=False))

    return jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)), images)


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
