"""How networks come to their parameters, and that others' layers and NNX take them as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from convjax import create_model
from convjax.layers import normal
from convjax.models.network import Window, check_size

KEY = jax.random.key(0)
IMAGES = jnp.zeros((1, 8, 8, 3))


def test_an_array_depends_on_the_key_and_its_path_alone():
    small, large = (
        create_model("resnet8_cifar", stage_sizes=sizes, widths=widths).init(KEY, IMAGES)["params"]
        for sizes, widths in [((1,), (4,)), ((3, 2), (4, 8))]
    )
    np.testing.assert_array_equal(small["conv1"]["kernel"], large["conv1"]["kernel"])
    kernels = [
        leaf.ravel()[:36]
        for path, leaf in jax.tree.leaves_with_path(large)
        if path[-1].key == "kernel"
    ]
    assert len(np.unique(np.stack([kernel[:12] for kernel in kernels]), axis=0)) == len(kernels)


def test_a_layer_of_somebody_else_is_initialised_by_flax():
    def conv(features, size, strides=(1, 1), padding=0, name=None, **_):
        init = normal(0.1)
        return nn.Conv(
            features, size, strides, padding, use_bias=False, kernel_init=init, name=name
        )

    model = create_model("resnet8_cifar", widths=(4, 4, 4), conv=conv)
    kernel = model.init(KEY, IMAGES)["params"]["conv1"]["kernel"]
    assert kernel.shape == (3, 3, 3, 4)
    assert 0.05 < float(kernel.std()) < 0.15


def test_init_with_output_gives_what_apply_gives():
    model = create_model("resnet8_cifar", widths=(4, 4, 4))
    images = jax.random.normal(KEY, (2, 8, 8, 3))
    logits, variables = model.init_with_output({"params": KEY}, images)
    np.testing.assert_array_equal(logits, model.apply(variables, images))
    jax.tree.map(np.testing.assert_array_equal, variables, model.init(KEY, images))


def test_a_model_is_an_nnx_module_through_flaxs_bridge():
    model = create_model("resnet8_cifar", widths=(4, 4, 4))
    bridged = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(bridged, IMAGES)
    params = nnx.state(bridged, nnx.Param)
    variables = {"params": jax.tree.map(jnp.asarray, nnx.to_pure_dict(params))}
    stats = {"batch_stats": model.init(KEY, IMAGES)["batch_stats"]}
    images = jax.random.normal(KEY, (2, 8, 8, 3))
    np.testing.assert_array_equal(bridged(images), model.apply(variables | stats, images))


@pytest.mark.parametrize(
    ("layers", "smallest"),
    [
        ([Window(3, 2)], 3),
        ([Window(3, 2, ceil_mode=True), Window(2, 1)], 4),
        ([Window(7, 2, 6), Window(3, 2, 2)], 1),
        ([Window(11, 4), Window(3, 2), Window(3, 2), Window(3, 2)], 67),
    ],
)
def test_the_smallest_image_that_leaves_a_pixel(layers, smallest):
    check_size(jnp.zeros((1, smallest, smallest, 1)), *layers)
    if smallest > 1:
        with pytest.raises(ValueError, match=f"at least {smallest}×{smallest}"):
            check_size(jnp.zeros((1, smallest, smallest - 1, 1)), *layers)
