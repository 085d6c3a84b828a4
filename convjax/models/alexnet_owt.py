"""AlexNet as its author simplified it: one tower, no response normalisation, fewer filters.

Krizhevsky: One weird trick for parallelizing convolutional neural networks, 2014, arXiv:1404.5997.

The form is that of torchvision's `alexnet`: 64 and 192 filters in conv1 and conv2, 256 in conv4,
dropout before fc6 and fc7 instead of after, and any image pooled to 6×6 before them. (The paper's
own network has 384 filters in conv4; torchvision's published weights have 256.) Pooling rounds
down. Parameters start from U(±1/√fan_in), torch's default.
"""

from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers import Conv, Dense, Dropout, adaptive_avg_pool, max_pool, variance_scaling
from convjax.models.image_size import Window, check_size
from convjax.models.network import Network, Paper
from pallas_kernels import Backend

TORCH = variance_scaling(1 / 3, "fan_in", "uniform")
POOLED = (6, 6)
"""What fc6 reads, whatever the image."""


class OneWeirdTrick(Network):
    """conv1-5 with overlapping max pooling after 1, 2 and 5, then fc6-8.

    Attributes:
      widths: filters of conv1-5.
      dense_width: of fc6 and fc7.
      dropout: of what fc6 and fc7 read.
      num_classes: 0 gives the features of fc7.
    """

    paper: ClassVar[Paper] = Paper(
        "Krizhevsky",
        "One weird trick for parallelizing convolutional neural networks",
        2014,
        "https://arxiv.org/abs/1404.5997",
    )
    head: ClassVar[str] = "fc8"

    widths: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256)
    dense_width: int = 4096
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
          ValueError: images of less than 63 pixels.
        """
        over = Window(3, 2)
        check_size(images, Window(11, 4, 4), over, over, over)
        layer = partial(
            Conv, activation="relu", kernel_init=TORCH, dtype=self.dtype, backend=self.backend
        )
        pool = partial(max_pool, window=(3, 3), strides=(2, 2), backend=self.backend)
        c1, c2, c3, c4, c5 = self.widths
        x = images.astype(self.dtype)
        x = pool(layer(c1, (11, 11), (4, 4), padding=2, name="conv1")(x))
        x = pool(layer(c2, (5, 5), padding=2, name="conv2")(x))
        x = layer(c3, (3, 3), padding=1, name="conv3")(x)
        x = layer(c4, (3, 3), padding=1, name="conv4")(x)
        x = pool(layer(c5, (3, 3), padding=1, name="conv5")(x))
        x = adaptive_avg_pool(x, POOLED).reshape(len(x), -1)

        dense = partial(Dense, dtype=self.dtype, backend=self.backend)
        hidden = partial(dense, self.dense_width, activation="relu")
        x = hidden(name="fc6")(Dropout(self.dropout, name="dropout6")(x, train))
        x = hidden(name="fc7")(Dropout(self.dropout, name="dropout7")(x, train))
        return x if self.num_classes == 0 else dense(self.num_classes, name="fc8")(x)


VARIANTS: dict[str, partial[OneWeirdTrick]] = {"alexnet_owt": partial(OneWeirdTrick)}
