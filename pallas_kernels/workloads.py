"""Named real shapes: every operation of five networks that has a kernel.

    for workload in workloads("resnet50/conv3_*"):
        y = jax.eval_shape(workload.call.function(), **workload.call.operands())

Tests, tuning, the inspector and benchmarks take their shapes from here. A shape that occurs more
than once in a network is there once, under the name of the first layer that has it, with the number
of its layers in `count`: ResNet-50's `conv2_1/1x1_expand` is also its stage's shortcut.

Each network has the batch of its paper where one GPU can hold it: 128 for AlexNet, 256 for VGG-16
and ResNet-50. GoogLeNet's paper names none and ViT-B/16's 4,096 is spread over many devices: 128.
Epilogues are those of the networks: bias and ReLU where they follow, nothing where a batch norm
does.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from pallas_kernels.calls import (
    Attention,
    Call,
    Conv2d,
    CrossEntropy,
    LayerNorm,
    LocalResponseNorm,
    Matmul,
    MaxPool,
)
from pallas_kernels.epilogue import Activation

CLASSES = 1000
"""Of ImageNet."""


@dataclass(frozen=True)
class Workload:
    """A layer of a published network, and the call that it is."""

    network: str
    layer: str
    """As the paper names it."""
    paper: str
    call: Call
    count: int = 1
    """Layers of the network with this very call."""

    @property
    def name(self) -> str:
        """network/layer."""
        return f"{self.network}/{self.layer}"


def workloads(pattern: str = "*") -> list[Workload]:
    """All workloads whose name matches `pattern`, as in a shell: "resnet50/*", "*/fc?"."""
    return [
        workload
        for name in NETWORKS
        for workload in network(name)
        if fnmatchcase(workload.name, pattern)
    ]


def network(name: str, batch: int | None = None) -> list[Workload]:
    """The workloads of one of NETWORKS, in order; by default with the batch of its paper."""
    paper, layers = _NETWORKS[name]
    return _distinct(name, paper, layers() if batch is None else layers(batch))


def _distinct(network: str, paper: str, layers: Iterable[tuple[str, Call]]) -> list[Workload]:
    """The network's layers, in order, each call once."""
    found: dict[Call, Workload] = {}
    for layer, call in layers:
        if call in found:
            found[call] = replace(found[call], count=found[call].count + 1)
        else:
            found[call] = Workload(network, layer, paper, call)
    return list(found.values())


def _conv(
    batch: int,
    size: int,
    c_in: int,
    c_out: int,
    taps: int,
    *,
    stride: int = 1,
    edge: int | None = None,
    groups: int = 1,
    fused: bool = True,
) -> Conv2d:
    """A square convolution padded by `edge` pixels, by default those that keep the image's size;
    with bias and ReLU if `fused`."""
    edge = taps // 2 if edge is None else edge
    return Conv2d(
        (batch, size, size, c_in),
        (taps, taps, c_in // groups, c_out),
        strides=(stride, stride),
        padding=((edge, edge), (edge, edge)),
        groups=groups,
        bias=fused,
        activation="relu" if fused else None,
    )


def _dense(
    rows: tuple[int, ...], c_in: int, c_out: int, activation: Activation | None = None
) -> Matmul:
    return Matmul((*rows, c_in), (c_in, c_out), bias=True, activation=activation)


def _pool(batch: int, size: int, channels: int, taps: int = 3, *, over: int = 0) -> MaxPool:
    """Windows two pixels apart, the last of which hang `over` the edge."""
    shape = (batch, size, size, channels)
    return MaxPool(shape, (taps, taps), (2, 2), padding=((0, over), (0, over)))


def _loss(batch: int) -> CrossEntropy:
    return CrossEntropy((batch, CLASSES))


def _alexnet(batch: int = 128) -> Iterable[tuple[str, Call]]:
    """Two towers are groups=2, but conv1 reads the image, conv3 and fc6-8 both towers."""
    # The original rounds up: a 224 input padded after its last pixels is 227 without padding.
    conv1 = _conv(batch, 224, 3, 96, 11, stride=4, edge=0)
    yield "conv1", replace(conv1, padding=((0, 3), (0, 3)))
    yield "norm1", LocalResponseNorm((batch, 55, 55, 96), groups=2)
    yield "pool1", _pool(batch, 55, 96)
    yield "conv2", _conv(batch, 27, 96, 256, 5, groups=2)
    yield "norm2", LocalResponseNorm((batch, 27, 27, 256), groups=2)
    yield "pool2", _pool(batch, 27, 256)
    yield "conv3", _conv(batch, 13, 256, 384, 3)
    yield "conv4", _conv(batch, 13, 384, 384, 3, groups=2)
    yield "conv5", _conv(batch, 13, 384, 256, 3, groups=2)
    yield "pool5", _pool(batch, 13, 256)
    yield "fc6", _dense((batch,), 6 * 6 * 256, 4096, "relu")
    yield "fc7", _dense((batch,), 4096, 4096, "relu")
    yield "fc8", _dense((batch,), 4096, CLASSES)
    yield "loss", _loss(batch)


def _vgg16(batch: int = 256) -> Iterable[tuple[str, Call]]:
    """Configuration D."""
    c_in, size = 3, 224
    for stage, (depth, c_out) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], 1):
        for index in range(1, depth + 1):
            yield f"conv{stage}_{index}", _conv(batch, size, c_in, c_out, 3)
            c_in = c_out
        yield f"pool{stage}", _pool(batch, size, c_out, 2)
        size //= 2
    yield "fc6", _dense((batch,), 7 * 7 * 512, 4096, "relu")
    yield "fc7", _dense((batch,), 4096, 4096, "relu")
    yield "fc8", _dense((batch,), 4096, CLASSES)
    yield "loss", _loss(batch)


# Table 1 of the paper: image side, channels in, and channels of each branch: 1×1, 3×3 reduce, 3×3,
# 5×5 reduce, 5×5, pool projection.
_INCEPTIONS = {
    "3a": (28, 192, 64, 96, 128, 16, 32, 32),
    "3b": (28, 256, 128, 128, 192, 32, 96, 64),
    "4a": (14, 480, 192, 96, 208, 16, 48, 64),
    "4b": (14, 512, 160, 112, 224, 24, 64, 64),
    "4c": (14, 512, 128, 128, 256, 24, 64, 64),
    "4d": (14, 512, 112, 144, 288, 32, 64, 64),
    "4e": (14, 528, 256, 160, 320, 32, 128, 128),
    "5a": (7, 832, 256, 160, 320, 32, 128, 128),
    "5b": (7, 832, 384, 192, 384, 48, 128, 128),
}


def _googlenet(batch: int = 128) -> Iterable[tuple[str, Call]]:
    """Without the auxiliary heads; the 5×5 branch is 5×5."""
    yield "conv1", _conv(batch, 224, 3, 64, 7, stride=2)
    yield "pool1", _pool(batch, 112, 64, over=1)
    yield "norm1", LocalResponseNorm((batch, 56, 56, 64))
    yield "conv2/3x3_reduce", _conv(batch, 56, 64, 64, 1)
    yield "conv2/3x3", _conv(batch, 56, 64, 192, 3)
    yield "norm2", LocalResponseNorm((batch, 56, 56, 192))
    yield "pool2", _pool(batch, 56, 192, over=1)
    for name, (size, c_in, c1, r3, c3, r5, c5, pool) in _INCEPTIONS.items():
        block = f"inception_{name}"
        yield f"{block}/1x1", _conv(batch, size, c_in, c1, 1)
        yield f"{block}/3x3_reduce", _conv(batch, size, c_in, r3, 1)
        yield f"{block}/3x3", _conv(batch, size, r3, c3, 3)
        yield f"{block}/5x5_reduce", _conv(batch, size, c_in, r5, 1)
        yield f"{block}/5x5", _conv(batch, size, r5, c5, 5)
        around = ((1, 1), (1, 1))
        yield f"{block}/pool", MaxPool((batch, size, size, c_in), (3, 3), (1, 1), around)
        yield f"{block}/pool_proj", _conv(batch, size, c_in, pool, 1)
        if name in ("3b", "4e"):
            yield f"pool{name[0]}", _pool(batch, size, c1 + c3 + c5 + pool, over=1)
    yield "linear", _dense((batch,), 1024, CLASSES)
    yield "loss", _loss(batch)


def _resnet50(batch: int = 256) -> Iterable[tuple[str, Call]]:
    """With the stride in the 3×3 ("v1.5"); a batch norm follows every convolution."""
    bare = partial(_conv, batch, fused=False)
    yield "conv1", bare(224, 3, 64, 7, stride=2)
    yield "pool1", replace(_pool(batch, 112, 64), padding=((1, 1), (1, 1)))
    c_in, size = 64, 56
    for stage, depth in enumerate([3, 4, 6, 3], 2):
        width = 64 * 2 ** (stage - 2)
        for index in range(1, depth + 1):
            block = f"conv{stage}_{index}"
            stride = 2 if index == 1 and stage > 2 else 1
            out_size = size // stride
            yield f"{block}/1x1_reduce", bare(size, c_in, width, 1)
            yield f"{block}/3x3", bare(size, width, width, 3, stride=stride)
            yield f"{block}/1x1_expand", bare(out_size, width, 4 * width, 1)
            if index == 1:
                yield f"{block}/shortcut", bare(size, c_in, 4 * width, 1, stride=stride)
            c_in, size = 4 * width, out_size
    yield "fc", _dense((batch,), 2048, CLASSES)
    yield "loss", _loss(batch)


def _vit_b16(batch: int = 128) -> Iterable[tuple[str, Call]]:
    """196 patches and one class token, 12 blocks of width 768."""
    tokens, width = (batch, 197), 768
    patches = replace(_conv(batch, 224, 3, width, 16, stride=16, edge=0), activation=None)
    yield "patch_embedding", patches
    for block in range(1, 13):
        yield f"block_{block}/norm1", LayerNorm((*tokens, width))
        yield f"block_{block}/qkv", _dense(tokens, width, 3 * width)
        yield f"block_{block}/attention", Attention((*tokens, 12, width // 12))
        yield f"block_{block}/projection", _dense(tokens, width, width)
        yield f"block_{block}/norm2", LayerNorm((*tokens, width))
        yield f"block_{block}/mlp1", _dense(tokens, width, 4 * width, "gelu")
        yield f"block_{block}/mlp2", _dense(tokens, 4 * width, width)
    yield "norm", LayerNorm((*tokens, width))
    yield "head", _dense((batch,), width, CLASSES)
    yield "loss", _loss(batch)


_NETWORKS: dict[str, tuple[str, Callable[..., Iterable[tuple[str, Call]]]]] = {
    # Krizhevsky, Sutskever and Hinton, "ImageNet Classification with Deep Convolutional Neural
    # Networks", NIPS 2012.
    "alexnet": ("Krizhevsky et al., NIPS 2012", _alexnet),
    "vgg16": ("Simonyan and Zisserman, arXiv:1409.1556", _vgg16),
    "googlenet": ("Szegedy et al., arXiv:1409.4842", _googlenet),
    "resnet50": ("He et al., arXiv:1512.03385", _resnet50),
    "vit_b16": ("Dosovitskiy et al., arXiv:2010.11929", _vit_b16),
}
"""Papers and layers."""

NETWORKS = tuple(_NETWORKS)
"""The names of the networks."""
