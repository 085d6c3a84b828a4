"""Noise while training: dropout of single values, and of whole branches."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float


class Dropout(nn.Module):
    """Each value becomes 0 with probability `rate`, else x / (1 - rate), while training.

    Hinton et al., 2012, arXiv:1207.0580. It is scaled while training, so that evaluation does
    nothing; the paper halved the outputs of trained networks instead.

    Attributes:
      rate: the share of values that become 0.
      axis: inside a `jax.shard_map`, the mesh's axis over which the last dimension of x is split.
        Rows are split over all other axes over which x varies. Devices then drop what one device
        would drop of the whole.
    """

    rate: float
    axis: str | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "b *rest"], train: bool) -> Float[Array, "b *rest"]:
        """[b, ...] → the same shape; training draws from the key "dropout".

        Raises:
          ValueError: a rate outside [0, 1), or training without the key.
        """
        if not 0 <= self.rate < 1:
            raise ValueError(f"dropout={self.rate} must lie in [0, 1)")
        if not train or self.rate == 0 or self.is_initializing():
            return x
        key = noise_key(self, f"dropout={self.rate}")
        keep = _kept if self.axis is None else partial(_kept_here, x, self.axis)
        return _drop(x, self.rate, keep(key, self.rate, x.shape))


def drop_branch(
    x: Float[Array, "b *rest"], rate: float | Float[Array, ""], key: Array
) -> Float[Array, "b *rest"]:
    """Stochastic depth: x / (1 - rate), or with probability `rate` zeros for all of an example.

    For the branch of a residual block, which is then left out (Huang et al., arXiv:1603.09382).
    """
    return _drop(x, rate, _kept(key, rate, (x.shape[0],) + (1,) * (x.ndim - 1)))


def noise_key(module: nn.Module, asked_by: str) -> Array:
    """The next "dropout" key.

    Raises:
      ValueError: the caller gave none.
    """
    if not module.has_rng("dropout"):
        raise ValueError(
            f"{asked_by} needs a key while training: "
            "model.apply(variables, images, train=True, rngs={'dropout': key})"
        )
    return module.make_rng("dropout")


def _kept(key: Array, rate: float | Float[Array, ""], shape: tuple[int, ...]) -> Array:
    return jax.random.bernoulli(key, 1.0 - rate, shape)


def _kept_here(x: Array, axis: str, key: Array, rate: float, shape: tuple[int, ...]) -> Array:
    """This device's part of what is kept of the whole array, of which x is a part."""
    varying = jax.typeof(x).manual_axis_type.varying - {axis}
    rows = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in varying)
    whole = (shape[0] * jax.lax.axis_size(rows), *shape[1:-1], shape[-1] * jax.lax.axis_size(axis))
    # XLA draws only the numbers of the slice: each is a function of the key and of its place.
    kept = _kept(key, rate, whole)
    start = jax.lax.axis_index(rows) * shape[0] if rows else 0
    kept = jax.lax.dynamic_slice_in_dim(kept, start, shape[0], 0)
    return jax.lax.dynamic_slice_in_dim(kept, jax.lax.axis_index(axis) * shape[-1], shape[-1], -1)


def _drop(x: Array, rate: float | Float[Array, ""], keep: Array) -> Array:
    scaled = x / jnp.asarray(1.0 - rate, x.dtype).reshape((1,) * x.ndim)
    return jnp.where(keep, scaled, jnp.zeros_like(x))
