"""AlexNet: five convolutions and three dense layers on two GPUs, the network that began it all.

Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks,
NIPS 2012.

Two towers have half of the filters each. conv2, conv4 and conv5 read their own tower only, which is
a convolution of two groups; conv3 and the dense layers read both. `alexnet_one_tower` is the same
network without the split. The authors' later form, without response normalisation, is another
paper's: `alexnet_owt`.

Where the paper and the authors' code differ (`source`, whose public copy is `layers-145.cfg`):

| | "paper" | "archive" |
|---|---|---|
| ReLU of conv1, conv5 | before norm and pooling | after them: norm1 sees negative values |
| response normalisation | α sums as it is | α / n |
| after norm2 | nothing | a second normalisation, over 5×5 pixels of each map |
| kernels of conv3-5 | N(0, 0.01²) | N(0, 0.03²) |

Both start with biases of 1 in conv2, conv4, conv5 and the hidden dense layers, and 0 elsewhere.
Images of 224 pixels fit because the code rounds up: conv1 is padded after its last pixels until
strides of 4 come out even, so that 224 gives the 55×55 of the paper's figure, as 227 does.

Not here: PCA colour noise is data augmentation; the paper's momentum rule is the optimiser's. The
split over devices is the layer's `groups` here, and the same arithmetic.
"""

from functools import partial
from typing import ClassVar, Literal

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers import (
    Conv,
    Dense,
    Dropout,
    Initialiser,
    constant,
    max_pool,
    normal,
    pixel_response_norm,
)
from convjax.models.image_size import Window, check_size
from convjax.models.network import Network, Paper, check_names
from pallas_kernels import Backend, ResponseNormConvention, local_response_norm

Source = Literal["paper", "archive"]


class AlexNet(Network):
    """conv1-5 with overlapping max pooling after 1, 2 and 5, then fc6-8.

    Attributes:
      towers: the groups of conv2, conv4, conv5 and of response normalisation.
      source: whose order and constants; see the module's table.
      widths: filters of conv1-5, of all towers together.
      dense_width: of fc6 and fc7.
      stem_size: the kernel of conv1, in pixels.
      stem_strides: of conv1.
      response_norm: None is the source's own convention.
      kernel_stddev: of the normal from which all kernels start; None is the source's own. A narrow
        network learns nothing from 0.01.
      dropout: of fc6's and fc7's outputs.
      num_classes: 0 gives the features of fc7.
    """

    paper: ClassVar[Paper] = Paper(
        "Krizhevsky, Sutskever, Hinton",
        "ImageNet Classification with Deep Convolutional Neural Networks",
        2012,
        "https://papers.nips.cc/paper/4824",
    )
    head: ClassVar[str] = "fc8"

    towers: int = 2
    source: Source = "paper"
    widths: tuple[int, int, int, int, int] = (96, 256, 384, 384, 256)
    dense_width: int = 4096
    stem_size: int = 11
    stem_strides: int = 4
    response_norm: ResponseNormConvention | None = None
    kernel_stddev: float | None = None
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
          ValueError: an unknown source, or images of less than 52 pixels (of 224 in the paper).
        """
        check_names(source=(self.source, Source))
        pool = Window(3, 2, ceil_mode=True)
        stem = Window(self.stem_size, self.stem_strides, ceil_mode=True)
        check_size(images, stem, pool, pool, pool)
        archive = self.source == "archive"
        conv = partial(Conv, activation="relu", dtype=self.dtype, backend=self.backend)
        own = partial(conv, groups=self.towers, bias_init=constant(1.0))
        before_pool = None if archive else "relu"
        stddev = self.kernel_stddev
        narrow = normal(0.01 if stddev is None else stddev)
        wide = normal(0.03) if archive and stddev is None else narrow
        c1, c2, c3, c4, c5 = self.widths

        size, strides = (self.stem_size, self.stem_size), (self.stem_strides, self.stem_strides)
        conv1 = partial(conv, activation=before_pool, kernel_init=narrow, name="conv1")
        x = conv1(c1, size, strides, self._rounded_up(images))(images.astype(self.dtype))
        x = self._pool(self._response_norm(x))
        x = nn.relu(x) if archive else x
        x = own(c2, (5, 5), padding=2, kernel_init=narrow, name="conv2")(x)
        x = self._response_norm(x)
        x = self._pool(pixel_response_norm(x) if archive else x)
        x = conv(c3, (3, 3), padding=1, kernel_init=wide, name="conv3")(x)
        x = own(c4, (3, 3), padding=1, kernel_init=wide, name="conv4")(x)
        conv5 = partial(own, activation=before_pool, kernel_init=wide, name="conv5")
        x = self._pool(conv5(c5, (3, 3), padding=1)(x))
        x = nn.relu(x) if archive else x
        return self._classifier(x.reshape(len(x), -1), narrow, train)

    def _classifier(
        self, x: Float[Array, "b pixels"], kernel_init: Initialiser, train: bool
    ) -> Array:
        dense = partial(Dense, kernel_init=kernel_init, dtype=self.dtype, backend=self.backend)
        hidden = partial(dense, self.dense_width, activation="relu", bias_init=constant(1.0))
        x = Dropout(self.dropout, name="dropout6")(hidden(name="fc6")(x), train)
        x = Dropout(self.dropout, name="dropout7")(hidden(name="fc7")(x), train)
        return x if self.num_classes == 0 else dense(self.num_classes, name="fc8")(x)

    def _rounded_up(self, images: Array) -> tuple[tuple[int, int], tuple[int, int]]:
        """Padding after the last pixels, under which the strides of conv1 come out even."""
        height, width = images.shape[1:3]
        return (
            (0, (self.stem_size - height) % self.stem_strides),
            (0, (self.stem_size - width) % self.stem_strides),
        )

    def _response_norm(self, x: Float[Array, "b h w c"]) -> Array:
        convention = self.source if self.response_norm is None else self.response_norm
        return local_response_norm(
            x, convention=convention, groups=self.towers, backend=self.backend
        )

    def _pool(self, x: Float[Array, "b h w c"]) -> Array:
        return max_pool(x, (3, 3), (2, 2), ceil_mode=True, backend=self.backend)


VARIANTS: dict[str, partial[AlexNet]] = {
    "alexnet": partial(AlexNet),
    "alexnet_one_tower": partial(AlexNet, towers=1),
}
