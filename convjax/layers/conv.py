"""Convolution as a module: a kernel, a bias, and one call of `pallas_kernels.conv2d`."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers.initialisers import Initialiser, variance_scaling, zeros
from convjax.layers.padding import Padding, explicit
from convjax.layers.placeholder import placeholder
from convjax.layers.product import product
from pallas_kernels import Activation, Algorithm, Backend, conv2d, windows

HE_NORMAL = variance_scaling(2.0, "fan_in", "truncated_normal")


class Conv(nn.Module):
    """2-D convolution of NHWC images with parameters `kernel` (HWIO, float32) and `bias`.

    Fields follow `pallas_kernels.conv2d`; `dtype` is the type of the arithmetic's operands and of
    the output (accumulation is float32), parameters stay float32. He et al.'s (2015) initialiser.
    """

    features: int
    kernel_size: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: Padding = 0
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    use_bias: bool = True
    activation: Activation | None = None
    dtype: Dtype = jnp.float32
    precision: jax.lax.PrecisionLike = None
    kernel_init: Initialiser = HE_NORMAL
    bias_init: Initialiser = zeros
    backend: Backend = "auto"
    algorithm: Algorithm | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b h w c"],
        residual: Float[Array, "b h_out w_out features"] | None = None,
    ) -> Float[Array, "b h_out w_out features"]:
        """[b, h, w, c] → [b, h_out, w_out, features]; `residual` is added before the activation.

        Raises:
          ValueError: `groups` does not divide the channels, or the shape leaves no output.
        """
        if self.groups < 1 or x.shape[-1] % self.groups:
            raise ValueError(f"groups={self.groups} must divide c_in={x.shape[-1]}")
        if self.features % self.groups:
            raise ValueError(f"groups={self.groups} must divide features={self.features}")
        kernel_shape = (*self.kernel_size, x.shape[-1] // self.groups, self.features)
        kernel = self.param("kernel", self.kernel_init, kernel_shape, jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), jnp.float32)
        padding = explicit(self.padding)
        if self.is_initializing():
            rows, columns = windows.resolve(
                (x.shape[1], x.shape[2]),
                self.kernel_size,
                strides=self.strides,
                padding=padding,
                dilation=self.dilation,
            )
            shape = (x.shape[0], rows.count, columns.count, self.features)
            return placeholder(x, shape, self.dtype)
        y = conv2d(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            strides=self.strides,
            padding=padding,
            dilation=self.dilation,
            groups=self.groups,
            bias=bias,
            residual=residual,
            activation=self.activation,
            out_dtype=self.dtype,
            precision=self.precision,
            backend=self.backend,
            algorithm=self.algorithm,
        )
        return product(y)
