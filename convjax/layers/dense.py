"""A fully connected layer: a kernel, a bias, and one call of `pallas_kernels.matmul`."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers.initialisers import Initialiser, variance_scaling, zeros
from convjax.layers.placeholder import placeholder
from convjax.layers.product import product
from pallas_kernels import Activation, Backend, matmul

CLASSIFIER = variance_scaling(1 / 3, "fan_in", "uniform")


class Dense(nn.Module):
    """`activation(x @ kernel + bias)` over the last axis; `kernel` is [c, features], float32.

    The default initialiser is U(±1/√c), that of the classifiers in torchvision's networks.
    """

    features: int
    use_bias: bool = True
    activation: Activation | None = None
    dtype: Dtype = jnp.float32
    precision: jax.lax.PrecisionLike = None
    kernel_init: Initialiser = CLASSIFIER
    bias_init: Initialiser = zeros
    backend: Backend = "auto"

    @nn.compact
    def __call__(self, x: Float[Array, "*b c"]) -> Float[Array, "*b features"]:
        """[..., c] → [..., features]."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), jnp.float32)
        if self.is_initializing():
            return placeholder(x, (*x.shape[:-1], self.features), self.dtype)
        y = matmul(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            bias=bias,
            activation=self.activation,
            out_dtype=self.dtype,
            precision=self.precision,
            backend=self.backend,
        )
        return product(y)
