"""GoogLeNet: four branches side by side, and cheap 1×1 convolutions before the dear ones.

Szegedy et al.: Going Deeper with Convolutions, 2014, arXiv:1409.4842, table 1 and figure 3.

A block looks at its input through 1×1, 3×3 and 5×5 convolutions and a max pooling at once; 1×1
convolutions first reduce the channels that the larger ones read. While training, two auxiliary
heads after 4a and 4d bring gradients to the lower layers. Their logits are sown, not returned:

    logits, sown = model.apply(variables, images, train=True, mutable=["auxiliary_logits"], ...)
    sown["auxiliary_logits"]["aux1"]["logits"]   # ([b, classes],), and so for "aux2"

and the paper adds their losses times 0.3. Variants:

| name | 5×5 branch | norm | pooling before 5a | auxiliary pooling | dropout, auxiliary |
|---|---|---|---|---|---|
| `googlenet` | 5×5 | LRN twice | 3×3/2 | 5×5/3 | 0.4, 0.7 |
| `googlenet_bn` | 5×5 | batch norm | 3×3/2 | 5×5/3 | 0.4, 0.7 |
| `googlenet_torchvision` | 3×3 | batch norm, ε 1e-3 | 2×2/2 | to 4×4 | 0.2, 0.7 |

The third is the form that torchvision's published weights froze: its "5×5" has 3×3 kernels. Pooling
rounds up in all. The paper gives no initialiser; kernels start from He et al.'s normal.
"""

from functools import partial
from typing import ClassVar, Literal

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
    avg_pool,
    global_avg_pool,
    max_pool,
)
from convjax.models.image_size import Window, check_size
from convjax.models.network import Network, Paper, check_names
from pallas_kernels import Backend, ResponseNormConvention, local_response_norm

NormKind = Literal["response", "batch", "none"]
AuxiliaryPool = Literal["5x5", "adaptive"]

# Table 1: 1×1, 3×3 reduce, 3×3, 5×5 reduce, 5×5, pool projection.
BLOCKS: dict[str, tuple[int, int, int, int, int, int]] = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


class Unit(nn.Module):
    """A convolution and its ReLU; with `batch_norm`, the norm between them instead of a bias."""

    features: int
    size: int = 1
    strides: int = 1
    batch_norm: bool = False
    dtype: Dtype = jnp.float32
    backend: Backend = "auto"

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], train: bool
    ) -> Float[Array, "b h_out w_out features"]:
        x = Conv(
            self.features,
            (self.size, self.size),
            (self.strides, self.strides),
            padding=self.size // 2,
            use_bias=not self.batch_norm,
            activation=None if self.batch_norm else "relu",
            dtype=self.dtype,
            backend=self.backend,
            name="conv",
        )(x)
        if not self.batch_norm:
            return x
        norm = BatchNorm(convention="torch", epsilon=1e-3, dtype=self.dtype, name="norm")
        return nn.relu(norm(x, train))


class Inception(nn.Module):
    """Four branches, one after another along the channels."""

    widths: tuple[int, ...]
    large_size: int
    unit: partial[Unit]

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], train: bool) -> Float[Array, "b h w features"]:
        c1, reduce3, c3, reduce5, c5, pool_proj = self.widths
        pooled = max_pool(x, (3, 3), (1, 1), padding=1, backend=self.unit.keywords["backend"])
        small = self.unit(reduce3, name="3x3_reduce")(x, train)
        large = self.unit(reduce5, name="5x5_reduce")(x, train)
        branches = (
            self.unit(c1, name="1x1")(x, train),
            self.unit(c3, 3, name="3x3")(small, train),
            self.unit(c5, self.large_size, name="5x5")(large, train),
            self.unit(pool_proj, name="pool_proj")(pooled, train),
        )
        return jnp.concatenate(branches, axis=-1)


class AuxiliaryHead(nn.Module):
    """Average pooling, a 1×1 convolution and two dense layers; the logits are sown."""

    num_classes: int
    pool: AuxiliaryPool
    dropout: float
    unit: partial[Unit]

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], train: bool) -> None:
        x = avg_pool(x, (5, 5), (3, 3)) if self.pool == "5x5" else adaptive_avg_pool(x, (4, 4))
        x = self.unit(128, name="conv")(x, train)
        fields = {name: self.unit.keywords[name] for name in ("dtype", "backend")}
        x = Dense(1024, activation="relu", name="fc1", **fields)(x.reshape(len(x), -1))
        x = Dropout(self.dropout, name="dropout")(x, train)
        logits = Dense(self.num_classes, name="fc2", **fields)(x)
        if not self.is_initializing():
            self.sow("auxiliary_logits", "logits", logits)


class GoogLeNet(Network):
    """A stem, nine blocks in three stages, global average pooling and one dense layer.

    Attributes:
      norm: "response", twice in the stem; "batch", after every convolution; or "none".
      response_norm: the convention of "response".
      large_size: the kernel of the blocks' largest convolution, in pixels.
      last_pool: the window before block 5a.
      stem_strides: of conv1; with 1 and images of 28 pixels the blocks see 7, 4 and 2.
      width: scales the channels of every block and of the stem; 1 is the paper's.
      auxiliary_heads: make and train the two heads; evaluation never computes them.
      auxiliary_pool: "5x5", every 3 pixels, or "adaptive", to 4×4 from any size.
      auxiliary_dropout: of the heads' hidden layers.
      dropout: of the pooled features.
      num_classes: 0 gives the pooled features, and no auxiliary heads.
    """

    paper: ClassVar[Paper] = Paper(
        "Szegedy, Liu, Jia, Sermanet, Reed, Anguelov, Erhan, Vanhoucke, Rabinovich",
        "Going Deeper with Convolutions",
        2014,
        "https://arxiv.org/abs/1409.4842",
    )
    head: ClassVar[str] = "fc"
    training_only: ClassVar[tuple[str, ...]] = ("aux1", "aux2")

    norm: NormKind = "response"
    response_norm: ResponseNormConvention = "paper"
    large_size: int = 5
    last_pool: int = 3
    stem_strides: int = 2
    width: float = 1.0
    auxiliary_heads: bool = True
    auxiliary_pool: AuxiliaryPool = "5x5"
    auxiliary_dropout: float = 0.7
    dropout: float = 0.4
    num_classes: int = 1000
    dtype: Dtype = jnp.float32
    backend: Backend = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], train: bool = False
    ) -> Float[Array, "b classes"]:
        """Images [b, h, w, c] → logits [b, num_classes] in `dtype`; training needs a dropout key.

        Raises:
          ValueError: an unknown name, or images that are too small: of less than 47 pixels, or of
            79 with auxiliary heads that pool 5×5 windows.
        """
        check_names(norm=(self.norm, NormKind), auxiliary_pool=(self.auxiliary_pool, AuxiliaryPool))
        auxiliary = self.auxiliary_heads and self.num_classes > 0
        self._check_size(images, auxiliary)
        fields = {"dtype": self.dtype, "backend": self.backend}
        unit = partial(Unit, batch_norm=self.norm == "batch", **fields)
        head = partial(
            AuxiliaryHead, self.num_classes, self.auxiliary_pool, self.auxiliary_dropout, unit
        )
        x = self._stem(images.astype(self.dtype), train, unit)
        for place, widths in BLOCKS.items():
            if place in ("4a", "5a"):
                x = self._pool(x, 3 if place == "4a" else self.last_pool)
            block = Inception(
                self._scaled(widths), self.large_size, unit, name=f"inception_{place}"
            )
            x = block(x, train)
            if auxiliary and place in ("4a", "4d") and (train or self.is_initializing()):
                name = "aux1" if place == "4a" else "aux2"
                head(name=name)(x, train)
        x = Dropout(self.dropout, name="dropout")(global_avg_pool(x), train)
        return x if self.num_classes == 0 else Dense(self.num_classes, name="fc", **fields)(x)

    def _stem(self, x: Float[Array, "b h w c"], train: bool, unit: partial[Unit]) -> Array:
        first, second = self._scaled((64, 192))
        x = self._pool(unit(first, 7, self.stem_strides, name="conv1")(x, train))
        x = unit(first, name="conv2_reduce")(self._response_norm(x), train)
        x = self._response_norm(unit(second, 3, name="conv2")(x, train))
        return self._pool(x)

    def _scaled(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(1, round(self.width * width)) for width in widths)

    def _response_norm(self, x: Float[Array, "b h w c"]) -> Array:
        if self.norm != "response":
            return x
        return local_response_norm(x, convention=self.response_norm, backend=self.backend)

    def _pool(self, x: Float[Array, "b h w c"], size: int = 3) -> Array:
        return max_pool(x, (size, size), (2, 2), ceil_mode=True, backend=self.backend)

    def _check_size(self, images: Array, auxiliary: bool) -> None:
        pool, last = Window(3, 2, ceil_mode=True), Window(self.last_pool, 2, ceil_mode=True)
        before = (Window(7, self.stem_strides, 6), pool, pool, pool)
        if auxiliary and self.auxiliary_pool == "5x5":
            try:
                check_size(images, *before, Window(5, 3))
            except ValueError as error:
                raise ValueError(f'{error}, or fewer with auxiliary_pool="adaptive"') from None
        check_size(images, *before, last)


VARIANTS: dict[str, partial[GoogLeNet]] = {
    "googlenet": partial(GoogLeNet),
    "googlenet_bn": partial(GoogLeNet, norm="batch"),
    "googlenet_torchvision": partial(
        GoogLeNet,
        norm="batch",
        large_size=3,
        last_pool=2,
        auxiliary_pool="adaptive",
        dropout=0.2,
    ),
}
