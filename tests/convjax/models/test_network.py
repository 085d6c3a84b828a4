"""How networks come to their parameters, and that others' layers and NNX take them as they are."""

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

from convjax import create_model
from convjax.layers import Conv, normal
from convjax.layers.initialisers import Draw
from convjax.models import replace_head
from convjax.models.image_size import Window, check_size
from tests.convjax.models.families import narrow

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
    "name",
    [
        *("alexnet", "alexnet_owt", "zfnet", "vgg11_bn", "googlenet", "resnet18", "plain20_cifar"),
        *("preact_resnet164_cifar", "vit_ti16"),
    ],
)
def test_no_network_needs_flaxs_own_way(name):
    side = 32 if name.endswith("_cifar") else 224
    images = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    assert create_model(name)._declared(KEY, images, {}) is not None


SMALL = create_model("resnet8_cifar", widths=(4, 4, 4))


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_parameters_can_be_made_under_a_mesh(axis):
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(axis,))):
        under = SMALL.init(KEY, IMAGES)
    jax.tree.map(np.testing.assert_array_equal, under, SMALL.init(KEY, IMAGES))


def test_an_ensemble_has_an_axis_of_its_own():
    kinds = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}}
    ensemble = nn.vmap(type(SMALL), axis_size=3, in_axes=None, **kinds)(
        stage_sizes=(1,), widths=(4,), stem="cifar"
    )
    variables = ensemble.init(KEY, IMAGES)
    kernel = variables["params"]["conv1"]["kernel"]
    assert kernel.shape == (3, 3, 3, 3, 4)
    assert jnp.any(kernel[0] != kernel[1])
    assert ensemble.apply(variables, IMAGES).shape == (3, 1, 1000)


def test_training_outputs_can_be_had_with_the_variables():
    logits, variables = SMALL.init_with_output(KEY, jnp.ones((2, 8, 8, 3)), train=True)
    assert logits.shape == (2, 10)
    assert set(variables) == {"params", "batch_stats"}


def test_annotated_parameters_keep_their_annotation():
    boxed = nn.with_partitioning(normal(0.1), (None, None, None, "model"))
    model = SMALL.clone(conv=partial(Conv, use_bias=False, kernel_init=boxed))
    kernel = model.init(KEY, IMAGES)["params"]["conv1"]["kernel"]
    assert kernel.names == (None, None, None, "model")
    assert kernel.value.shape == (3, 3, 3, 4)


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "googlenet", "resnet50", "vit_b16"])
def test_a_model_can_be_sent_to_another_process(name):
    model, images = create_model(name), jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    there = pickle.loads(pickle.dumps(model))
    assert there.shapes(images) == model.shapes(images)


def test_a_table_of_flaxs_and_no_images():
    assert "conv2_1" in SMALL.tabulate(KEY, IMAGES)
    variables = SMALL.init(KEY, IMAGES[:0])
    assert SMALL.apply(variables, IMAGES[:0]).shape == (0, 10)


def test_another_networks_variables_get_no_new_head():
    wide = create_model("resnet8_cifar", widths=(8, 8, 8))
    with pytest.raises(ValueError, match=r"not the model's variables: .*params/conv1"):
        replace_head(SMALL, wide.init(KEY, IMAGES), KEY, IMAGES)


def test_parts_are_drawn_as_the_whole_draws_them():
    whole, parts = SMALL.init(KEY, IMAGES), SMALL.init_parts(KEY, IMAGES, ("fc",))
    jax.tree.map(np.testing.assert_array_equal, parts["params"].pop("fc"), whole["params"]["fc"])
    left = jax.tree.leaves(parts)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in left)
    assert len(left) == len(jax.tree.leaves(whole)) - 2


def test_a_new_head_draws_nothing_else(monkeypatch):
    variables, drawn = SMALL.init(KEY, IMAGES), []
    draw = Draw.__call__
    monkeypatch.setattr(Draw, "__call__", lambda self, key: drawn.append(self) or draw(self, key))
    replace_head(SMALL, variables, KEY, IMAGES)
    assert sorted(each.shape for each in drawn) == [(4, 10), (10,)]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ((1, 8, 8, 1), "images have channels=1, and the variables are for channels=3"),
        ((1, 8, 8, 4), "images have channels=4, and the variables are for channels=3"),
    ],
)
def test_images_with_other_channels_than_the_variables(images, message):
    variables = SMALL.init(KEY, IMAGES)
    for apply in (SMALL.apply, jax.jit(SMALL.apply)):
        with pytest.raises(ValueError, match=message):
            apply(variables, jnp.zeros(images))


def test_another_networks_variables_and_images_of_another_size():
    wide = create_model("resnet8_cifar", widths=(8, 8, 8)).init(KEY, IMAGES)
    with pytest.raises(ValueError, match=r"conv1/kernel has shape \(3, 3, 3, 8\), and images of"):
        SMALL.apply(wide, IMAGES)
    alexnet, large = narrow("alexnet"), jnp.zeros((1, 96, 96, 3))
    with pytest.raises(ValueError, match=r"fc6/kernel has shape \(8, 16\), .* need \(32, 16\)"):
        jax.eval_shape(alexnet.apply, alexnet.shapes(jnp.zeros((1, 64, 64, 3))), large)


@pytest.mark.parametrize("key", [0, None, jnp.int32(0), {"dropout": KEY}], ids=str)
def test_what_is_no_key(key):
    with pytest.raises(ValueError, match=r"must be a key, such as jax\.random\.key\(0\)"):
        SMALL.init(key, IMAGES)


def test_a_wrong_field_is_found_out_once(monkeypatch):
    model, calls = SMALL.clone(stage_sizes=(1,)), []
    call = nn.Module.init_with_output
    monkeypatch.setattr(
        nn.Module, "init_with_output", lambda *args, **kw: calls.append(1) or call(*args, **kw)
    )
    with pytest.raises(ValueError, match=r"stage_sizes=\(1,\) and widths=\(4, 4, 4\) must be"):
        model.init(KEY, IMAGES)
    assert len(calls) == 1


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
