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

On one device the split is `groups`. With `tower_axis`, inside `jax.shard_map`, each device has one
tower, and where the paper's figure crosses from one GPU to the other, at conv3, fc6, fc7 and fc8,
a gather stands before the layer. The parameters and the numbers are the same; see
`convjax.sharding.Towers`.

Not here: PCA colour noise is data augmentation; the paper's momentum rule is the optimiser's.
"""

from functools import partial
from typing import ClassVar, Literal

import jax
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
      tower_axis: inside `jax.shard_map`, the mesh's axis over which the towers lie, one a device;
        parameters are then those of the device's own tower, and fc8's are whole.
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
    tower_axis: str | None = None
    dtype: Dtype = jnp.float32
    backend: Backend = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], train: bool = False
    ) -> Float[Array, "b classes"]:
        """Images [b, h, w, c] → logits [b, num_classes] in `dtype`; training needs a dropout key.

        Raises:
          ValueError: an unknown source, images of less than 52 pixels (of 224 in the paper), or a
            `tower_axis` that is not one of `towers` devices.
        """
        check_names(source=(self.source, Source))
        self._check_tower_axis()
        pool = Window(3, 2, ceil_mode=True)
        stem = Window(self.stem_size, self.stem_strides, ceil_mode=True)
        check_size(images, stem, pool, pool, pool)
        archive = self.source == "archive"
        conv = partial(Conv, activation="relu", dtype=self.dtype, backend=self.backend)
        own = partial(conv, groups=self._towers_here(), bias_init=constant(1.0))
        before_pool = None if archive else "relu"
        stddev = self.kernel_stddev
        narrow = normal(0.01 if stddev is None else stddev)
        wide = normal(0.03) if archive and stddev is None else narrow
        c1, c2, c3, c4, c5 = map(self._here, self.widths)

        size, strides = (self.stem_size, self.stem_size), (self.stem_strides, self.stem_strides)
        conv1 = partial(conv, activation=before_pool, kernel_init=narrow, name="conv1")
        x = conv1(c1, size, strides, self._rounded_up(images))(images.astype(self.dtype))
        x = self._pool(self._response_norm(x))
        x = nn.relu(x) if archive else x
        x = own(c2, (5, 5), padding=2, kernel_init=narrow, name="conv2")(x)
        x = self._response_norm(x)
        x = self._pool(pixel_response_norm(x) if archive else x)
        x = conv(c3, (3, 3), padding=1, kernel_init=wide, name="conv3")(self._both(x, "conv3"))
        x = own(c4, (3, 3), padding=1, kernel_init=wide, name="conv4")(x)
        conv5 = partial(own, activation=before_pool, kernel_init=wide, name="conv5")
        x = self._pool(conv5(c5, (3, 3), padding=1)(x))
        x = nn.relu(x) if archive else x
        return self._classifier(self._both(x, "fc6"), narrow, train)

    def _classifier(
        self, x: Float[Array, "b h w c"], kernel_init: Initialiser, train: bool
    ) -> Array:
        dense = partial(Dense, kernel_init=kernel_init, dtype=self.dtype, backend=self.backend)
        units = self._here(self.dense_width)
        hidden = partial(dense, units, activation="relu", bias_init=constant(1.0))
        dropout = partial(Dropout, self.dropout, None if self._is_whole() else self.tower_axis)
        x = dropout(name="dropout6")(hidden(name="fc6")(x.reshape(len(x), -1)), train)
        x = dropout(name="dropout7")(hidden(name="fc7")(self._both(x, "fc7")), train)
        x = self._both(x, "fc8", to="invarying")  # both compute all classes
        return x if self.num_classes == 0 else dense(self.num_classes, name="fc8")(x)

    def _both(
        self,
        x: Float[Array, "b *rest"],
        reader: str,
        to: Literal["varying", "invarying"] = "varying",
    ) -> Array:
        """The channels of both towers, which the layer `reader` reads: here devices talk."""
        if self._is_whole():
            return x
        with jax.named_scope(reader):
            return jax.lax.all_gather(x, self.tower_axis, axis=x.ndim - 1, tiled=True, to=to)

    def _check_tower_axis(self) -> None:
        mesh = jax.sharding.get_abstract_mesh()
        is_mapped = self.tower_axis in mesh.manual_axes
        if self._is_whole() or (is_mapped and mesh.shape[self.tower_axis] == self.towers):
            return
        raise ValueError(
            f"tower_axis={self.tower_axis!r} must be an axis of {self.towers} devices around this "
            "call, in jax.shard_map: see convjax.sharding.Towers"
        )

    def _is_whole(self) -> bool:
        """Whether all towers are on this device; their parameters are drawn as if they were."""
        return self.tower_axis is None or self.is_initializing()

    def _towers_here(self) -> int:
        return self.towers if self._is_whole() else 1

    def _here(self, width: int) -> int:
        """Of `width` filters or units, those on this device."""
        return width * self._towers_here() // self.towers

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
            x, convention=convention, groups=self._towers_here(), backend=self.backend
        )

    def _pool(self, x: Float[Array, "b h w c"]) -> Array:
        return max_pool(x, (3, 3), (2, 2), ceil_mode=True, backend=self.backend)


VARIANTS: dict[str, partial[AlexNet]] = {
    "alexnet": partial(AlexNet),
    "alexnet_one_tower": partial(AlexNet, towers=1),
}
