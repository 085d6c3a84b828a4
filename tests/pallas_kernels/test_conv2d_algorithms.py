"""Which algorithm is chosen where."""

import pytest

from pallas_kernels import windows
from pallas_kernels.conv2d_algorithms import Algorithms, Convolution, default_algorithms


def convolution(image, kernel, channels, *, strides=(1, 1), padding="SAME", groups=1):
    rows, columns = windows.resolve(image, kernel, strides=strides, padding=padding)
    return Convolution(rows, columns, *channels, groups, "NHWC", None)


LAYERS = {
    "ResNet 3x3": convolution((56, 56), (3, 3), (64, 64)),
    "ResNet 1x1": convolution((56, 56), (1, 1), (64, 256)),
    "ResNet 1x1 strided": convolution((56, 56), (1, 1), (256, 512), strides=(2, 2)),
    "ResNet stem": convolution((224, 224), (7, 7), (3, 64), strides=(2, 2)),
    "AlexNet conv2": convolution((27, 27), (5, 5), (96, 256), groups=2),
    "depthwise": convolution((56, 56), (3, 3), (64, 64), groups=64),
    "one channel": convolution((28, 28), (3, 3), (1, 16)),
    "ViT": convolution((224, 224), (16, 16), (3, 384), strides=(16, 16), padding="VALID"),
}


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("ResNet 3x3", ("direct", "direct", "direct")),
        ("ResNet 1x1", ("pointwise",) * 3),
        ("ResNet 1x1 strided", ("pointwise",) * 3),
        ("ResNet stem", ("direct", "direct", "direct")),
        ("AlexNet conv2", ("direct", "direct", "direct")),
        ("depthwise", ("shifted",) * 3),
        ("one channel", ("shifted", "direct", "direct")),
        ("ViT", ("patches",) * 3),
    ],
)
def test_each_pass_has_its_own_algorithm_on_a_cpu(layer, expected):
    assert default_algorithms(LAYERS[layer], "cpu") == Algorithms(*expected)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("layer", LAYERS)
def test_accelerators_get_their_own_convolution_except_for_patches(layer, platform):
    algorithm = "patches" if layer == "ViT" else "direct"
    assert default_algorithms(LAYERS[layer], platform) == Algorithms(*[algorithm] * 3)
