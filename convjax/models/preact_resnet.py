"""Pre-activation residual networks for CIFAR: a clean identity from the first layer to the last.

He, Zhang, Ren, Sun: Identity Mappings in Deep Residual Networks, 2016, arXiv:1603.05027, tables 3
and 4.

A block normalises before it convolves, y = F(x) + shortcut(x), and nothing follows the sum: signals
and gradients pass through any number of equal blocks unchanged. Where the shape changes, the
projection too reads the normalised x and has no norm of its own, as in the authors' Torch code; the
paper's figures leave that open. Kernels, padding, batch norm and the names of stages are those of
`resnet`.
"""

from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers import Dense, global_avg_pool, ones, zeros
from convjax.models.network import Network, Paper, check_names
from convjax.models.resnet import (
    CONV,
    NORM,
    ConvFactory,
    NormFactory,
    Shortcut,
    ShortcutKind,
    apply_stages,
)
from pallas_kernels import Backend


class PreActBottleneck(nn.Module):
    """norm, relu, 1×1 → norm, relu, 3×3 → norm, relu, 1×1; four times `features` come out."""

    features: int
    strides: int
    shortcut: ShortcutKind
    conv: ConvFactory
    norm: NormFactory
    zero_init_residual: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], train: bool) -> Array:
        last_scale = zeros if self.zero_init_residual else ones
        strides, outside = (self.strides, self.strides), 4 * self.features
        pre = nn.relu(self.norm(name="norm1")(x, train))
        y = self.conv(self.features, (1, 1), strides=strides, name="conv1")(pre)
        y = nn.relu(self.norm(name="norm2")(y, train))
        y = self.conv(self.features, (3, 3), padding=1, name="conv2")(y)
        y = nn.relu(self.norm(scale_init=last_scale, name="norm3")(y, train))
        y = self.conv(outside, (1, 1), name="conv3")(y)
        if self.shortcut == "none":
            return y
        same_shape = self.strides == 1 and x.shape[-1] == outside
        return y + Shortcut(
            self.shortcut, outside, self.strides, self.conv, norm=None, name="shortcut"
        )(x if same_shape else pre, train)


class PreActResNet(Network):
    """A 3×3 stem, stages of pre-activation bottlenecks, norm and relu, global average, dense.

    Attributes:
      stage_sizes: blocks in each stage.
      widths: channels of the 3×3 convolutions in each stage, of the same length.
      zero_init_residual: start each block as its shortcut.
      num_classes: 0 gives the pooled features.
    """

    paper: ClassVar[Paper] = Paper(
        "He, Zhang, Ren, Sun",
        "Identity Mappings in Deep Residual Networks",
        2016,
        "https://arxiv.org/abs/1603.05027",
    )
    head: ClassVar[str] = "fc"

    stage_sizes: tuple[int, ...]
    widths: tuple[int, ...] = (16, 32, 64)
    shortcut: ShortcutKind = "projection"
    zero_init_residual: bool = False
    num_classes: int = 10
    dtype: Dtype = jnp.float32
    backend: Backend = "auto"
    conv: ConvFactory = CONV
    norm: NormFactory = NORM

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], train: bool = False
    ) -> Float[Array, "b classes"]:
        """Images [b, h, w, c] of any size → logits [b, num_classes] in `dtype`.

        Raises:
          ValueError: an unknown shortcut, or a stage without a block or a channel.
        """
        check_names(shortcut=(self.shortcut, ShortcutKind))
        conv = partial(self.conv, dtype=self.dtype, backend=self.backend)
        norm = partial(self.norm, dtype=self.dtype)
        x = conv(self.widths[0], (3, 3), padding=1, name="conv1")(images.astype(self.dtype))
        block = partial(
            PreActBottleneck,
            shortcut=self.shortcut,
            conv=conv,
            norm=norm,
            zero_init_residual=self.zero_init_residual,
        )
        x = apply_stages(block, self.stage_sizes, self.widths, x, train)
        x = global_avg_pool(nn.relu(norm(name="norm")(x, train)))
        if self.num_classes == 0:
            return x
        return Dense(self.num_classes, dtype=self.dtype, backend=self.backend, name="fc")(x)


VARIANTS: dict[str, partial[PreActResNet]] = {
    # Table 4: 9n + 2 layers in three stages of n bottlenecks.
    f"preact_resnet{depth}_cifar": partial(PreActResNet, stage_sizes=((depth - 2) // 9,) * 3)
    for depth in (164, 1001)
}
