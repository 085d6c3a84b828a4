"""Batch normalisation (Ioffe & Szegedy, 2015, arXiv:1502.03167).

    y = scale · (x - mean) / √(var + ε) + bias      mean, var over every axis but the last

While training, mean and (biased) variance are those of the batch. The running averages that
evaluation uses differ between peers, in two ways that are easy to mistake for each other:

| convention | running ← | variance kept |
|---|---|---|
| `"flax"` | momentum · running + (1 - momentum) · batch | biased, Σ(x - mean)² / n |
| `"torch"` | (1 - momentum) · running + momentum · batch | unbiased, Σ(x - mean)² / (n - 1) |

On a batch [0, 2] from a running variance of 1, an old weight of 0.9 gives 1.0 and 1.1.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers.initialisers import Initialiser, ones, zeros

BatchNormConvention = Literal["flax", "torch"]

_DEFAULT_MOMENTUM: dict[BatchNormConvention, float] = {"flax": 0.9, "torch": 0.1}


class BatchNorm(nn.Module):
    """Batch normalisation over the last axis; parameters `scale`, `bias`, statistics `mean`, `var`.

    Statistics are float32 whatever `dtype` is. Under a plain `jit` over sharded arrays they are
    those of the whole batch, for the mean of a sharded array is global. Under `shard_map` or
    `pmap`, name the mesh axes that split the batch in `axis_name`.

    Attributes:
      convention: what `momentum` weighs and which variance is kept; see the module's table.
      momentum: None means an old weight of 0.9 in either convention.
      axis_name: mesh axis or axes to average statistics over; None where there are none.
    """

    convention: BatchNormConvention = "flax"
    momentum: float | None = None
    epsilon: float = 1e-5
    dtype: Dtype = jnp.float32
    scale_init: Initialiser = ones
    bias_init: Initialiser = zeros
    axis_name: str | tuple[str, ...] | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*b c"], train: bool) -> Float[Array, "*b c"]:
        """[..., c] → [..., c]; with `train`, the collection "batch_stats" must be mutable.

        Raises:
          ValueError: an unknown convention, a momentum outside [0, 1], or one value a channel to
            train on where the convention keeps the unbiased variance.
        """
        self._check()
        features = (x.shape[-1],)
        scale = self.param("scale", self.scale_init, features, jnp.float32)
        bias = self.param("bias", self.bias_init, features, jnp.float32)
        running_mean = self.variable("batch_stats", "mean", zeros, None, features)
        running_var = self.variable("batch_stats", "var", ones, None, features)
        if self.is_initializing():
            return x.astype(self.dtype)
        if train:
            mean, var, count = self._batch_statistics(x)
            running_mean.value = self._update(running_mean.value, mean)
            running_var.value = self._update(running_var.value, self._kept(var, count))
        else:
            mean, var = running_mean.value, running_var.value
        # One multiply-add a value: x · gain + offset.
        gain = scale * jax.lax.rsqrt(var + self.epsilon)
        offset = bias - mean * gain
        channels = (1,) * (x.ndim - 1) + features
        y = x.astype(jnp.float32) * gain.reshape(channels) + offset.reshape(channels)
        return y.astype(self.dtype)

    def _check(self) -> None:
        if self.convention not in _DEFAULT_MOMENTUM:
            raise ValueError(f"convention={self.convention!r} must be 'flax' or 'torch'")
        if self.momentum is not None and not 0 <= self.momentum <= 1:
            raise ValueError(f"momentum={self.momentum} must lie in [0, 1]")

    def _batch_statistics(self, x: Array) -> tuple[Array, Array, int]:
        """Mean, biased variance and the number of values per channel, over all replicas."""
        axes = tuple(range(x.ndim - 1))
        values = x.astype(jnp.float32)
        mean, mean_of_squares = jnp.mean(values, axes), jnp.mean(jnp.square(values), axes)
        count = values.size // values.shape[-1]
        if self.axis_name is not None:
            mean, mean_of_squares = jax.lax.pmean((mean, mean_of_squares), self.axis_name)
            count *= jax.lax.axis_size(self.axis_name)
        # One read of x for both moments; rounding may leave a constant channel below zero.
        return mean, jnp.maximum(mean_of_squares - jnp.square(mean), 0.0), count

    def _kept(self, var: Array, count: int) -> Array:
        if self.convention == "flax":
            return var
        if count < 2:
            raise ValueError(f"the unbiased variance needs 2 values a channel, got {count}")
        return var * (count / (count - 1))

    def _update(self, running: Array, batch: Array) -> Array:
        momentum = _DEFAULT_MOMENTUM[self.convention] if self.momentum is None else self.momentum
        old_weight = momentum if self.convention == "flax" else 1 - momentum
        return old_weight * running + (1 - old_weight) * batch
