"""Noise while training: dropout of single values, and of whole branches."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float


class Dropout(nn.Module):
    """Each value becomes 0 with probability `rate`, else x / (1 - rate), while training.

    Hinton et al., 2012, arXiv:1207.0580. It is scaled while training, so that evaluation does
    nothing; the paper halved the outputs of trained networks instead.
    """

    rate: float

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
        return _drop(x, self.rate, noise_key(self, f"dropout={self.rate}"), x.shape)


def drop_branch(
    x: Float[Array, "b *rest"], rate: float | Float[Array, ""], key: Array
) -> Float[Array, "b *rest"]:
    """Stochastic depth: x / (1 - rate), or with probability `rate` zeros for all of an example.

    For the branch of a residual block, which is then left out (Huang et al., arXiv:1603.09382).
    """
    return _drop(x, rate, key, (x.shape[0],) + (1,) * (x.ndim - 1))


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


def _drop(x: Array, rate: float | Float[Array, ""], key: Array, shape: tuple[int, ...]) -> Array:
    keep = jax.random.bernoulli(key, 1.0 - rate, shape)
    scaled = x / jnp.asarray(1.0 - rate, x.dtype).reshape((1,) * x.ndim)
    return jnp.where(keep, scaled, jnp.zeros_like(x))
