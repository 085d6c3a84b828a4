"""Which algorithm is chosen where, and what XLA is given of the one that is its own."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import conv2d, windows
from pallas_kernels.conv2d_algorithms import (
    Algorithms,
    Convolution,
    default_algorithms,
    run,
)
from tests.pallas_kernels.arrays import normal


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


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "CHWN"])
@pytest.mark.parametrize(
    ("groups", "convolutions"), [(1, (1, 1)), (2, (2, 1)), (4, (4, 1)), (6, (1, 6))]
)
def test_a_gpu_gets_a_few_groups_side_by_side(monkeypatch, layout, groups, convolutions):
    """As many convolutions of as many groups: XLA gathers a batch for those of several."""
    monkeypatch.setattr("pallas_kernels.launch.platform", lambda: "gpu")
    one = replace(convolution((5, 6), (3, 3), (12, 24), groups=groups), layout=layout)
    x, w = normal(0, (2, 5, 6, 12)), normal(1, (3, 3, 12 // groups, 24))
    x_laid_out = x.transpose(["NHWC".index(axis) for axis in layout])
    compute = partial(run, "direct", convolution=one, dtype=jnp.float32)
    found = re.findall(r"feature_group_count=(\d+)", str(jax.make_jaxpr(compute)(x_laid_out, w)))
    count, grouped = convolutions
    assert found == [str(grouped)] * count
    y = compute(x_laid_out, w).transpose([layout.index(axis) for axis in "NHWC"])
    expected = jax.lax.conv_general_dilated(
        x,
        w,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


FAST_ON_A_CPU = "b01f_01io->b01f"


def orders(program):
    """The orders of axes of the convolutions that XLA has in the end."""
    return re.findall(r"dim_labels=(\S+?),? ", program.as_text())


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 3),
        ({"layout": "NCHW"}, 3),
        ({"dilation": (2, 1)}, 3),
        ({"groups": 2}, 6),
        ({"strides": (2, 2), "padding": ((5, 4), (5, 4))}, 3),
    ],
)
def test_in_a_loop_too_a_cpu_convolves_in_its_fast_order(options, count):
    x, w = jnp.ones((4, 8, 8, 8)), jnp.ones((3, 3, 3, 8 // options.get("groups", 1), 8))

    def scanned(x, w):
        layer = lambda x, w: (jnp.tanh(conv2d(x, w, algorithm="direct", **options)), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    program = jax.jit(jax.grad(scanned, argnums=(0, 1))).lower(x, w).compile()
    assert orders(program) == [FAST_ON_A_CPU] * count


def test_a_loop_has_the_gradients_of_its_layers_one_after_another():
    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 8))
    w = 0.2 * jax.random.normal(jax.random.key(1), (2, 3, 3, 8, 8))

    def layer(x, w):
        return jnp.tanh(conv2d(x, w)), None

    looped = jax.grad(lambda x, w: jnp.sum(jax.lax.scan(layer, x, w)[0]), argnums=(0, 1))
    apart = jax.grad(lambda x, w: jnp.sum(layer(layer(x, w[0])[0], w[1])[0]), argnums=(0, 1))
    for got, want in zip(jax.jit(looped)(x, w), jax.jit(apart)(x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
