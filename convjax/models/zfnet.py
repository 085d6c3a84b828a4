"""ZFNet: AlexNet looked at from inside, and mended where its first layer was too coarse.

Zeiler, Fergus: Visualizing and Understanding Convolutional Networks, 2013, arXiv:1311.2901,
figure 3.

conv1 has kernels of 7×7 with stride 2 in place of 11×11 with stride 4, conv2 stride 2, and there
are no towers. Sizes are the figure's: 224 → 110 → 55 → 26 → 13 → 13 → 6, which takes a padding of 1
in conv1, none in conv2, and pooling that rounds up. "Contrast normalised across feature maps" is
AlexNet's response normalisation, after each of the first two poolings, as in the figure. Parameters
start from N(0, 0.01²) and biases from 0, as the paper says.

Not here: the paper renormalises first-layer filters whose RMS exceeds 0.1 while training.
"""

from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers import Conv, Dense, Dropout, max_pool, normal
from convjax.models.image_size import Window, check_size
from convjax.models.network import Network, Paper
from pallas_kernels import Backend, ResponseNormConvention, local_response_norm


class ZFNet(Network):
    """conv1-5 with overlapping max pooling after 1, 2 and 5, then fc6-8.

    Attributes:
      widths: filters of conv1-5.
      dense_width: of fc6 and fc7.
      stem_size: the kernel of conv1, in pixels.
      stem_strides: of conv1.
      conv2_strides: of conv2.
      response_norm: the convention of both normalisations.
      kernel_stddev: of the normal from which kernels start; a narrow network learns nothing from
        the paper's 0.01.
      dropout: of fc6's and fc7's outputs.
      num_classes: 0 gives the features of fc7.
    """

    paper: ClassVar[Paper] = Paper(
        "Zeiler, Fergus",
        "Visualizing and Understanding Convolutional Networks",
        2013,
        "https://arxiv.org/abs/1311.2901",
    )
    head: ClassVar[str] = "fc8"

    widths: tuple[int, int, int, int, int] = (96, 256, 384, 384, 256)
    dense_width: int = 4096
    stem_size: int = 7
    stem_strides: int = 2
    conv2_strides: int = 2
    response_norm: ResponseNormConvention = "paper"
    kernel_stddev: float = 0.01
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
          ValueError: images of less than 63 pixels (the paper's have 224).
        """
        over = Window(3, 2, ceil_mode=True)
        stem, second = Window(self.stem_size, self.stem_strides, 2), Window(5, self.conv2_strides)
        check_size(images, stem, over, second, over, over)
        layer = partial(
            Conv,
            activation="relu",
            kernel_init=normal(self.kernel_stddev),
            dtype=self.dtype,
            backend=self.backend,
        )
        c1, c2, c3, c4, c5 = self.widths
        x = images.astype(self.dtype)
        size, strides = (self.stem_size, self.stem_size), (self.stem_strides, self.stem_strides)
        x = self._norm(self._pool(layer(c1, size, strides, padding=1, name="conv1")(x)))
        strides = (self.conv2_strides, self.conv2_strides)
        x = self._norm(self._pool(layer(c2, (5, 5), strides, name="conv2")(x)))
        x = layer(c3, (3, 3), padding=1, name="conv3")(x)
        x = layer(c4, (3, 3), padding=1, name="conv4")(x)
        x = self._pool(layer(c5, (3, 3), padding=1, name="conv5")(x))

        dense = partial(
            Dense, kernel_init=normal(self.kernel_stddev), dtype=self.dtype, backend=self.backend
        )
        hidden = partial(dense, self.dense_width, activation="relu")
        x = hidden(name="fc6")(x.reshape(len(x), -1))
        x = hidden(name="fc7")(Dropout(self.dropout, name="dropout6")(x, train))
        x = Dropout(self.dropout, name="dropout7")(x, train)
        return x if self.num_classes == 0 else dense(self.num_classes, name="fc8")(x)

    def _norm(self, x: Float[Array, "b h w c"]) -> Array:
        return local_response_norm(x, convention=self.response_norm, backend=self.backend)

    def _pool(self, x: Float[Array, "b h w c"]) -> Array:
        return max_pool(x, (3, 3), (2, 2), ceil_mode=True, backend=self.backend)


VARIANTS: dict[str, partial[ZFNet]] = {"zfnet": partial(ZFNet)}
