"""Residual networks for ImageNet and CIFAR, and the plain networks that they are measured against.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2015, arXiv:1512.03385 (tables 1
and 6). Its sequel of 2016 is `preact_resnet`.

A block adds what it computes to what it was given, y = F(x) + shortcut(x). Where the shape changes
the shortcut is a strided 1×1 convolution (`projection`, the paper's option B, ImageNet) or strided
sampling with zeros for the new channels (`pad`, option A without parameters, CIFAR).

Where peers differ, and what is chosen here:
- `resnet50` and deeper halve the image in the 3×3 of a bottleneck ("v1.5": torchvision and most
  code since); the paper's own choice, the first 1×1, is `resnet50_v1`. Basic blocks have no 1×1, so
  `resnet18_v1` is `resnet18`.
- Padding is symmetric, as in the paper's Caffe models and torch, never XLA's "SAME".
- Batch norm keeps the unbiased running variance, torch's convention.
- Kernels start from He et al.'s normal by fan-out, as in the authors' Torch code.
- `zero_init_residual` starts the last scale of every F at 0, so that each block starts as its
  shortcut (Goyal et al., 2017, arXiv:1706.02677); off, as in the paper, unless asked for.

The first block of a stage, which may change the shape, is `conv3_1`; the others are equal, and are
one block `conv3_x` under a scan, its parameters stacked on a leading axis. So a network of 1,202
layers compiles about as fast as one of 110 (16.3 s against 15.6 s on two CPU cores, jax 0.10).
"""

from collections.abc import Callable
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
    global_avg_pool,
    max_pool,
    ones,
    stack,
    variance_scaling,
    zeros,
)
from convjax.models.network import Network, Paper, check_names
from pallas_kernels import Backend

BlockKind = Literal["basic", "bottleneck"]
ShortcutKind = Literal["projection", "pad", "none"]
StemKind = Literal["imagenet", "cifar"]
StridedLayer = Literal["1x1", "3x3"]
ConvFactory = Callable[..., nn.Module]
NormFactory = Callable[..., nn.Module]

CONV = partial(Conv, use_bias=False, kernel_init=variance_scaling(2.0, "fan_out", "normal"))
NORM = partial(BatchNorm, convention="torch")


class Shortcut(nn.Module):
    """x in the shape of F(x): x itself where it has it, else by projection or by padding."""

    kind: ShortcutKind
    features: int
    strides: int
    conv: ConvFactory
    norm: NormFactory | None

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], train: bool) -> Array:
        if self.strides == 1 and x.shape[-1] == self.features:
            return x
        if self.kind == "projection":
            strides = (self.strides, self.strides)
            x = self.conv(self.features, (1, 1), strides=strides, name="conv")(x)
            return x if self.norm is None else self.norm(name="norm")(x, train)
        x = x[:, :: self.strides, :: self.strides]
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.features - x.shape[-1])))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions: relu(F(x) + shortcut(x)), or relu(F(x)) in a plain network."""

    features: int
    strides: int
    shortcut: ShortcutKind
    conv: ConvFactory
    norm: NormFactory
    zero_init_residual: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], train: bool) -> Array:
        last_scale = zeros if self.zero_init_residual else ones
        strides = (self.strides, self.strides)
        y = self.conv(self.features, (3, 3), strides=strides, padding=1, name="conv1")(x)
        y = nn.relu(self.norm(name="norm1")(y, train))
        y = self.conv(self.features, (3, 3), padding=1, name="conv2")(y)
        y = self.norm(scale_init=last_scale, name="norm2")(y, train)
        if self.shortcut != "none":
            y = y + Shortcut(
                self.shortcut, self.features, self.strides, self.conv, self.norm, name="shortcut"
            )(x, train)
        return nn.relu(y)


class Bottleneck(nn.Module):
    """1×1 → 3×3 → 1×1 with `features` channels inside and four times as many outside."""

    features: int
    strides: int
    shortcut: ShortcutKind
    conv: ConvFactory
    norm: NormFactory
    zero_init_residual: bool = False
    strided_layer: StridedLayer = "3x3"

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], train: bool) -> Array:
        last_scale = zeros if self.zero_init_residual else ones
        strides = (self.strides, self.strides)
        first, second = (strides, (1, 1)) if self.strided_layer == "1x1" else ((1, 1), strides)
        y = self.conv(self.features, (1, 1), strides=first, name="conv1")(x)
        y = nn.relu(self.norm(name="norm1")(y, train))
        y = self.conv(self.features, (3, 3), strides=second, padding=1, name="conv2")(y)
        y = nn.relu(self.norm(name="norm2")(y, train))
        outside = 4 * self.features
        y = self.conv(outside, (1, 1), name="conv3")(y)
        y = self.norm(scale_init=last_scale, name="norm3")(y, train)
        if self.shortcut != "none":
            y = y + Shortcut(
                self.shortcut, outside, self.strides, self.conv, self.norm, name="shortcut"
            )(x, train)
        return nn.relu(y)


class ResNet(Network):
    """A residual network: stem, stages of blocks, global average pooling, one dense layer.

    Attributes:
      stage_sizes: blocks in each stage.
      widths: channels of the 3×3 convolutions in each stage, of the same length.
      stem: "imagenet" is 7×7/2 and a 3×3/2 max pooling, "cifar" one 3×3.
      stem_strides: of the stem's convolution; None means 2 for "imagenet" and 1 for "cifar".
      strided_layer: which layer of a bottleneck halves the image.
      zero_init_residual: start each block as its shortcut.
      num_classes: 0 gives the pooled features.
    """

    paper: ClassVar[Paper] = Paper(
        "He, Zhang, Ren, Sun",
        "Deep Residual Learning for Image Recognition",
        2015,
        "https://arxiv.org/abs/1512.03385",
    )
    head: ClassVar[str] = "fc"

    stage_sizes: tuple[int, ...]
    widths: tuple[int, ...] = (64, 128, 256, 512)
    block: BlockKind = "basic"
    shortcut: ShortcutKind = "projection"
    stem: StemKind = "imagenet"
    stem_strides: int | None = None
    strided_layer: StridedLayer = "3x3"
    zero_init_residual: bool = False
    num_classes: int = 1000
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
          ValueError: an unknown name, or a stage without a block or a channel.
        """
        check_names(
            block=(self.block, BlockKind),
            shortcut=(self.shortcut, ShortcutKind),
            stem=(self.stem, StemKind),
            strided_layer=(self.strided_layer, StridedLayer),
        )
        conv = partial(self.conv, dtype=self.dtype, backend=self.backend)
        norm = partial(self.norm, dtype=self.dtype)
        x = self._stem(images.astype(self.dtype), train, conv, norm)
        kind = (
            BasicBlock
            if self.block == "basic"
            else partial(Bottleneck, strided_layer=self.strided_layer)
        )
        block = partial(
            kind,
            shortcut=self.shortcut,
            conv=conv,
            norm=norm,
            zero_init_residual=self.zero_init_residual,
        )
        x = global_avg_pool(apply_stages(block, self.stage_sizes, self.widths, x, train))
        if self.num_classes == 0:
            return x
        return Dense(self.num_classes, dtype=self.dtype, backend=self.backend, name="fc")(x)

    def _stem(self, x: Array, train: bool, conv: ConvFactory, norm: NormFactory) -> Array:
        size, strides = (7, 2) if self.stem == "imagenet" else (3, 1)
        strides = strides if self.stem_strides is None else self.stem_strides
        x = conv(
            self.widths[0],
            (size, size),
            strides=(strides, strides),
            padding=size // 2,
            name="conv1",
        )(x)
        x = nn.relu(norm(name="norm1")(x, train))
        if self.stem == "imagenet":
            x = max_pool(x, (3, 3), (2, 2), padding=1, backend=self.backend)
        return x


def apply_stages(
    block: Callable[..., nn.Module],
    sizes: tuple[int, ...],
    widths: tuple[int, ...],
    x: Float[Array, "b h w c"],
    train: bool,
) -> Array:
    """Stages of sizes[i] blocks with widths[i] features; each but the first halves the image."""
    if len(sizes) != len(widths) or min((*sizes, *widths), default=0) < 1:
        raise ValueError(
            f"stage_sizes={sizes} and widths={widths} must be equally long, each at least 1"
        )
    for stage, (size, features) in enumerate(zip(sizes, widths, strict=True), start=2):
        strides = 1 if stage == 2 else 2
        x = block(features=features, strides=strides, name=f"conv{stage}_1")(x, train)
        if size > 1:
            equal = block(features=features, strides=1, name=f"conv{stage}_x")
            x = stack(equal, size - 1, x, train)
    return x


def _cifar(depth: int, shortcut: ShortcutKind) -> partial[ResNet]:
    """Table 6: 6n + 2 layers in three stages of n basic blocks."""
    return partial(
        ResNet,
        stage_sizes=((depth - 2) // 6,) * 3,
        widths=(16, 32, 64),
        shortcut=shortcut,
        stem="cifar",
        num_classes=10,
    )


def _imagenet(
    block: BlockKind, *stage_sizes: int, strided_layer: StridedLayer = "3x3"
) -> partial[ResNet]:
    """Table 1: blocks in each stage."""
    return partial(ResNet, stage_sizes=stage_sizes, block=block, strided_layer=strided_layer)


VARIANTS: dict[str, partial[ResNet]] = {
    "resnet18": _imagenet("basic", 2, 2, 2, 2),
    "resnet34": _imagenet("basic", 3, 4, 6, 3),
    "resnet50": _imagenet("bottleneck", 3, 4, 6, 3),
    "resnet101": _imagenet("bottleneck", 3, 4, 23, 3),
    "resnet152": _imagenet("bottleneck", 3, 8, 36, 3),
    "resnet18_v1": _imagenet("basic", 2, 2, 2, 2),
    "resnet34_v1": _imagenet("basic", 3, 4, 6, 3),
    "resnet50_v1": _imagenet("bottleneck", 3, 4, 6, 3, strided_layer="1x1"),
    "resnet101_v1": _imagenet("bottleneck", 3, 4, 23, 3, strided_layer="1x1"),
    "resnet152_v1": _imagenet("bottleneck", 3, 8, 36, 3, strided_layer="1x1"),
    # Table 6, and section 4.2 for 1,202 layers; 8 are the fewest that the rule allows.
    **{f"resnet{n}_cifar": _cifar(n, "pad") for n in (8, 20, 32, 44, 56, 110, 1202)},
    **{f"plain{n}_cifar": _cifar(n, "none") for n in (20, 32, 44, 56, 110)},
}
