"""Residual networks for ImageNet and CIFAR, and the plain networks that they are measured against.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2015, arXiv:1512.03385 (tables 1
and 6); the same: Identity Mappings in Deep Residual Networks, 2016, arXiv:1603.05027 (`preact_*`).

A block adds what it computes to what it was given, y = F(x) + shortcut(x). Where the shape changes
the shortcut is a strided 1×1 convolution (`projection`, the paper's option B, ImageNet) or strided
sampling with zeros for the new channels (`pad`, option A without parameters, CIFAR).

Where peers differ, and what is chosen here:
- `resnet50` and deeper halve the image in the 3×3 of a bottleneck ("v1.5": torchvision and most
  code since); the paper's own choice, the first 1×1, is `resnet50_v1`. Basic blocks have no 1×1, so
  `resnet18_v1` is `resnet18`.
- Padding is symmetric, as in the paper's Caffe models and torch, never XLA's "SAME".
- Batch norm keeps the unbiased running variance (`norm=BatchNorm` with convention="torch").
- Kernels start from He et al.'s normal by fan-out, as in the authors' Torch code.
- `zero_init_residual` starts the last scale of every F at 0, so that each block starts as its
  shortcut (Goyal et al., 2017, arXiv:1706.02677); off, as in the paper, unless asked for.

The first block of a stage, which may change the shape, is `conv3_1`; the others are equal, and are
one block `conv3_x` under a scan, its parameters stacked on a leading axis. A network of 1,202 layers
therefore compiles about as fast as one of 110.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers import BatchNorm, Conv, Dense, global_avg_pool, max_pool
from pallas_kernels import Backend

BlockKind = Literal["basic", "bottleneck", "preact"]
ShortcutKind = Literal["projection", "pad", "none"]
StridedLayer = Literal["1x1", "3x3"]
ConvFactory = Callable[..., Conv]
NormFactory = Callable[..., BatchNorm]

_HE_FAN_OUT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


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
        last_scale = nn.initializers.zeros if self.zero_init_residual else nn.initializers.ones
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
        last_scale = nn.initializers.zeros if self.zero_init_residual else nn.initializers.ones
        strides = (self.strides, self.strides)
        first, second = (strides, (1, 1)) if self.strided_layer == "1x1" else ((1, 1), strides)
        y = self.conv(self.features, (1, 1), strides=first, name="conv1")(x)
        y = nn.relu(self.norm(name="norm1")(y, train))
        y = self.conv(self.features, (3, 3), strides=second, padding=1, name="conv2")(y)
        y = nn.relu(self.norm(name="norm2")(y, train))
        y = self.conv(4 * self.features, (1, 1), name="conv3")(y)
        y = self.norm(scale_init=last_scale, name="norm3")(y, train)
        if self.shortcut != "none":
            y = y + Shortcut(
                self.shortcut, 4 * self.features, self.strides, self.conv, self.norm, name="shortcut"
            )(x, train)
        return nn.relu(y)


class PreActBottleneck(nn.Module):
    """A bottleneck that normalises before it convolves: y = F(x) + shortcut(x), nothing after.

    Where the shape changes, the projection too reads the normalised x, and has no norm of its own.
    """

    features: int
    strides: int
    shortcut: ShortcutKind
    conv: ConvFactory
    norm: NormFactory
    zero_init_residual: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], train: bool) -> Array:
        last_scale = nn.initializers.zeros if self.zero_init_residual else nn.initializers.ones
        strides = (self.strides, self.strides)
        outside = 4 * self.features
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


class ResNet(nn.Module):
    """A residual network: stem, stages of blocks, global average pooling, one dense layer.

    Fields:
        stage_sizes: blocks in each stage.
        widths: channels of the 3×3 convolutions in each stage, of the same length.
        stem: "imagenet" is 7×7/2 and a 3×3/2 max pooling, "cifar" one 3×3.
        stem_strides: of the stem's convolution; None means 2 for "imagenet" and 1 for "cifar".
        strided_layer: which layer of a bottleneck halves the image.
        num_classes: 0 gives the pooled features.
    """

    stage_sizes: tuple[int, ...]
    widths: tuple[int, ...] = (64, 128, 256, 512)
    block: BlockKind = "basic"
    shortcut: ShortcutKind = "projection"
    stem: Literal["imagenet", "cifar"] = "imagenet"
    stem_strides: int | None = None
    strided_layer: StridedLayer = "3x3"
    zero_init_residual: bool = False
    num_classes: int = 1000
    dtype: Dtype = jnp.float32
    backend: Backend = "auto"
    norm: NormFactory = partial(BatchNorm, convention="torch")

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], train: bool = False
    ) -> Float[Array, "b classes"]:
        """Images [b, h, w, c] of any size → logits [b, num_classes] in `dtype`.

        Raises:
            ValueError: `stage_sizes` and `widths` of different lengths.
        """
        if len(self.stage_sizes) != len(self.widths):
            raise ValueError(
                f"stage_sizes={self.stage_sizes} and widths={self.widths} must be equally long"
            )
        conv = partial(
            Conv, use_bias=False, kernel_init=_HE_FAN_OUT, dtype=self.dtype, backend=self.backend
        )
        norm = partial(self.norm, dtype=self.dtype)
        x = self._stem(images.astype(self.dtype), train, conv, norm)
        for stage, (size, features) in enumerate(
            zip(self.stage_sizes, self.widths, strict=True), start=2
        ):
            block = partial(
                self._block_class(),
                features=features,
                shortcut=self.shortcut,
                conv=conv,
                norm=norm,
                zero_init_residual=self.zero_init_residual,
            )
            x = block(strides=1 if stage == 2 else 2, name=f"conv{stage}_1")(x, train)
            if size > 1:
                x = _repeat(block(strides=1, name=f"conv{stage}_x"), x, train, size - 1)
        if self.block == "preact":
            x = nn.relu(norm(name="norm")(x, train))
        x = global_avg_pool(x)
        if self.num_classes == 0:
            return x
        return Dense(self.num_classes, dtype=self.dtype, backend=self.backend, name="fc")(x)

    def _stem(self, x: Array, train: bool, conv: ConvFactory, norm: NormFactory) -> Array:
        size, strides = (7, 2) if self.stem == "imagenet" else (3, 1)
        strides = self.stem_strides or strides
        x = conv(
            self.widths[0],
            (size, size),
            strides=(strides, strides),
            padding=size // 2,
            name="conv1",
        )(x)
        if self.block != "preact":
            x = nn.relu(norm(name="norm1")(x, train))
        if self.stem == "imagenet":
            x = max_pool(x, (3, 3), (2, 2), padding=1, backend=self.backend)
        return x

    def _block_class(self) -> Callable[..., nn.Module]:
        blocks: dict[BlockKind, Callable[..., nn.Module]] = {
            "basic": BasicBlock,
            "bottleneck": partial(Bottleneck, strided_layer=self.strided_layer),
            "preact": PreActBottleneck,
        }
        return blocks[self.block]


def _repeat(block: nn.Module, x: Array, train: bool, times: int) -> Array:
    """`times` equal blocks one after another, compiled once; parameters stacked on axis 0."""
    scan = nn.scan(
        lambda block, x, _: (block(x, train), None),
        variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
        split_rngs={"params": True},
        length=times,
    )
    return scan(block, x, None)[0]


def _imagenet(block: BlockKind, stage_sizes: tuple[int, ...], **fields: str) -> partial[ResNet]:
    return partial(ResNet, stage_sizes=stage_sizes, block=block, **fields)


def _cifar(depth: int, block: BlockKind = "basic", **fields: str) -> partial[ResNet]:
    """Table 6: 6n + 2 layers in three stages of n basic blocks; bottlenecks have 9n + 2."""
    blocks = (depth - 2) // (6 if block == "basic" else 9)
    fields = {"shortcut": "pad" if block == "basic" else "projection"} | fields
    return partial(
        ResNet,
        stage_sizes=(blocks,) * 3,
        widths=(16, 32, 64),
        block=block,
        stem="cifar",
        num_classes=10,
        **fields,
    )


VARIANTS: dict[str, Callable[..., ResNet]] = {
    # Table 1: layers and blocks a stage.
    "resnet18": _imagenet("basic", (2, 2, 2, 2)),
    "resnet34": _imagenet("basic", (3, 4, 6, 3)),
    "resnet50": _imagenet("bottleneck", (3, 4, 6, 3)),
    "resnet101": _imagenet("bottleneck", (3, 4, 23, 3)),
    "resnet152": _imagenet("bottleneck", (3, 8, 36, 3)),
    "resnet18_v1": _imagenet("basic", (2, 2, 2, 2)),
    "resnet34_v1": _imagenet("basic", (3, 4, 6, 3)),
    "resnet50_v1": _imagenet("bottleneck", (3, 4, 6, 3), strided_layer="1x1"),
    "resnet101_v1": _imagenet("bottleneck", (3, 4, 23, 3), strided_layer="1x1"),
    "resnet152_v1": _imagenet("bottleneck", (3, 8, 36, 3), strided_layer="1x1"),
    # Table 6, and section 4.2 for 1,202 layers; 8 layers are the smallest of the rule.
    **{f"resnet{depth}_cifar": _cifar(depth) for depth in (8, 20, 32, 44, 56, 110, 1202)},
    **{f"plain{depth}_cifar": _cifar(depth, shortcut="none") for depth in (20, 32, 44, 56, 110)},
    **{f"preact_resnet{depth}_cifar": _cifar(depth, block="preact") for depth in (164, 1001)},
}
