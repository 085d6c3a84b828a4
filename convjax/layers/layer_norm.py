"""Layer normalisation as a module (Ba et al., 2016, arXiv:1607.06450)."""

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers.initialisers import ones, zeros
from pallas_kernels import Backend, layer_norm


class LayerNorm(nn.Module):
    """`pallas_kernels.layer_norm` over the last axis, with parameters `scale` and `bias`, float32.

    Flax, big_vision and timm's ViTs add 1e-6 to the variance, torch's own default is 1e-5.
    """

    epsilon: float = 1e-6
    dtype: Dtype = jnp.float32
    backend: Backend = "auto"

    @nn.compact
    def __call__(self, x: Float[Array, "*b c"]) -> Float[Array, "*b c"]:
        """[..., c] → [..., c] in `dtype`."""
        scale = self.param("scale", ones, x.shape[-1:], jnp.float32)
        bias = self.param("bias", zeros, x.shape[-1:], jnp.float32)
        x = x.astype(self.dtype)
        if self.is_initializing():
            return x
        return layer_norm(x, scale, bias, epsilon=self.epsilon, backend=self.backend)
