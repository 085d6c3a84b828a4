"""GoogLeNet: the sizes of table 1, what differs between its forms, and heads for training alone."""

import jax
import jax.numpy as jnp
import pytest

from convjax import create_model

IMAGES = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)


def traced(model, train, mutable):
    return jax.eval_shape(
        lambda v, x: model.apply(
            v,
            x,
            train=train,
            capture_intermediates=True,
            mutable=mutable,
            rngs={"dropout": jax.random.key(0)},
        ),
        model.shapes(IMAGES),
        IMAGES,
    )


@pytest.mark.parametrize("name", ["googlenet", "googlenet_torchvision"])
def test_sizes_of_table_1(name):
    _, sown = traced(create_model(name), False, ["intermediates"])
    shapes = {
        k: v["__call__"][0].shape for k, v in sown["intermediates"].items() if k != "__call__"
    }
    assert shapes["conv1"] == (2, 112, 112, 64)
    assert shapes["conv2"] == (2, 56, 56, 192)
    assert shapes["inception_3a"] == (2, 28, 28, 256)
    assert shapes["inception_3b"] == (2, 28, 28, 480)
    assert shapes["inception_4a"] == shapes["inception_4b"] == (2, 14, 14, 512)
    assert shapes["inception_4e"] == (2, 14, 14, 832)
    assert shapes["inception_5b"] == (2, 7, 7, 1024)
    assert shapes["fc"] == (2, 1000)
    assert "aux1" not in shapes


def test_auxiliary_heads_speak_while_training_alone():
    mutable = ["auxiliary_logits", "batch_stats"]
    logits, sown = traced(create_model("googlenet"), True, mutable)
    assert logits.shape == (2, 1000)
    heads = {name: head["logits"][0].shape for name, head in sown["auxiliary_logits"].items()}
    assert heads == {"aux1": (2, 1000), "aux2": (2, 1000)}
    _, silent = traced(create_model("googlenet"), False, mutable)
    assert "auxiliary_logits" not in silent
    params = create_model("googlenet", auxiliary_heads=False).shapes(IMAGES)["params"]
    assert not {"aux1", "aux2"} & set(params)


def test_the_forms_differ_in_kernels_and_norms():
    paper, torchvision = (
        create_model(name).shapes(IMAGES) for name in ("googlenet", "googlenet_torchvision")
    )
    place = paper["params"]["inception_3a"]["5x5"]["conv"]
    assert place["kernel"].shape == (5, 5, 16, 32)
    assert place["bias"].shape == (32,)
    place = torchvision["params"]["inception_3a"]["5x5"]
    assert place["conv"]["kernel"].shape == (3, 3, 16, 32)
    assert set(place["conv"]) == {"kernel"}
    assert place["norm"]["scale"].shape == (32,)
    assert "batch_stats" not in paper


@pytest.mark.parametrize(
    ("side", "fields", "least"),
    [
        (78, {}, '79×79, or fewer with auxiliary_pool="adaptive"'),
        (46, {"auxiliary_pool": "adaptive"}, "47×47"),
        (46, {"auxiliary_heads": False}, "47×47"),
    ],
)
def test_what_would_take_smaller_images_is_named(side, fields, least):
    images = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    with pytest.raises(ValueError, match="too small") as caught:
        create_model("googlenet", **fields).shapes(images)
    message = f"images of {side}×{side} pixels are too small: at least {least}"
    assert str(caught.value) == message


@pytest.mark.usefixtures("unchecked")
def test_wrong_names():
    with pytest.raises(ValueError, match="norm='batchnorm' must be one of 'response', 'batch'"):
        create_model("googlenet", norm="batchnorm").shapes(IMAGES)
