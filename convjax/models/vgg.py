"""VGG: nothing but 3×3 convolutions, and more of them.

Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition, 2014,
arXiv:1409.1556, table 1.

Two 3×3 layers see the 5×5 field of one larger layer with 18 C² parameters instead of 25 C², and one
more ReLU. Five stages double the filters and halve the image; then come three dense layers. The
names are the configurations A, B, D and E of the table by their depth, and `_bn` has batch
normalisation after each convolution (whose bias is then redundant, and kept as torchvision keeps
it).

Where peers differ: kernels start from He et al.'s normal by fan-out and dense layers from
N(0, 0.01²), as in torchvision; the paper took N(0, 0.01²) throughout and started its deep networks
from trained shallow ones. Any image is pooled to 7×7 before fc6, as in torchvision; at 224 pixels
that does nothing. The paper's configuration A-LRN and its 1×1 layers (C) are not here.
"""

from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers import (
    BatchNorm,
    Conv,
    Dense,
    Dropout,
    adaptive_avg_pool,
    max_pool,
    normal,
    variance_scaling,
)
from convjax.models.image_size import Window, check_size
from convjax.models.network import Network, Paper
from pallas_kernels import Backend

HE_NORMAL = variance_scaling(2.0, "fan_out", "normal")
NARROW = normal(0.01)


class VGG(Network):
    """Stages of 3×3 convolutions, each ended by 2×2 max pooling, then fc6-8.

    Attributes:
      stage_sizes: convolutions in each stage.
      widths: filters of each stage, of the same length.
      batch_norm: normalise after each convolution.
      dense_width: of fc6 and fc7.
      pooled: the image's sides that fc6 reads.
      dropout: of fc6's and fc7's outputs.
      num_classes: 0 gives the features of fc7.
    """

    paper: ClassVar[Paper] = Paper(
        "Simonyan, Zisserman",
        "Very Deep Convolutional Networks for Large-Scale Image Recognition",
        2014,
        "https://arxiv.org/abs/1409.1556",
    )
    head: ClassVar[str] = "fc8"

    stage_sizes: tuple[int, ...]
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    batch_norm: bool = False
    dense_width: int = 4096
    pooled: tuple[int, int] = (7, 7)
    dropout: float = 0.5
    num_classes: int = 1000
    dtype: Dtype = jnp.float32
    backend: Backend = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], train: bool = False
    ) -> Float[Array, "b classes"]:
        """Images [b, h, w, c] → logits [b, num_classes] in `dtype`; training needs a dropout key.

        Raises:
          ValueError: images of less than 2 pixels a stage to halve (32 for five stages), or stages
            without a convolution or a filter.
        """
        if (
            len(self.stage_sizes) != len(self.widths)
            or min((*self.stage_sizes, *self.widths), default=0) < 1
        ):
            raise ValueError(
                f"stage_sizes={self.stage_sizes} and widths={self.widths} must be equally long, "
                "each at least 1"
            )
        check_size(images, *[Window(2, 2)] * len(self.widths))
        x = images.astype(self.dtype)
        for stage, (depth, width) in enumerate(zip(self.stage_sizes, self.widths, strict=True), 1):
            for layer in range(1, depth + 1):
                x = self._layer(x, width, f"{stage}_{layer}", train)
            x = max_pool(x, (2, 2), (2, 2), backend=self.backend)
        x = adaptive_avg_pool(x, self.pooled).reshape(len(x), -1)

        dense = partial(Dense, kernel_init=NARROW, dtype=self.dtype, backend=self.backend)
        hidden = partial(dense, self.dense_width, activation="relu")
        x = Dropout(self.dropout, name="dropout6")(hidden(name="fc6")(x), train)
        x = Dropout(self.dropout, name="dropout7")(hidden(name="fc7")(x), train)
        return x if self.num_classes == 0 else dense(self.num_classes, name="fc8")(x)

    def _layer(self, x: Float[Array, "b h w c"], width: int, place: str, train: bool) -> Array:
        conv = partial(Conv, kernel_init=HE_NORMAL, dtype=self.dtype, backend=self.backend)
        activation = None if self.batch_norm else "relu"
        x = conv(width, (3, 3), padding=1, activation=activation, name=f"conv{place}")(x)
        if not self.batch_norm:
            return x
        norm = BatchNorm(convention="torch", dtype=self.dtype, name=f"norm{place}")
        return nn.relu(norm(x, train))


_CONFIGURATIONS = {
    "vgg11": (1, 1, 2, 2, 2),  # A
    "vgg13": (2, 2, 2, 2, 2),  # B
    "vgg16": (2, 2, 3, 3, 3),  # D
    "vgg19": (2, 2, 4, 4, 4),  # E
}

VARIANTS: dict[str, partial[VGG]] = {
    name + suffix: partial(VGG, stage_sizes=sizes, batch_norm=suffix == "_bn")
    for name, sizes in _CONFIGURATIONS.items()
    for suffix in ("", "_bn")
}
