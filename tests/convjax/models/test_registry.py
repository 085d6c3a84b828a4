"""Models by name: what there is, and what a typing error is answered with."""

import jax.numpy as jnp
import pytest

from convjax import create_model, list_models


def test_every_name_of_the_resnet_papers():
    assert list_models("resnet*_v1") == [f"resnet{d}_v1" for d in (101, 152, 18, 34, 50)]
    assert list_models("plain*") == [f"plain{d}_cifar" for d in (110, 20, 32, 44, 56)]
    assert list_models("preact*") == ["preact_resnet1001_cifar", "preact_resnet164_cifar"]
    assert {f"resnet{d}" for d in (18, 34, 50, 101, 152)} <= set(list_models())
    assert {f"resnet{d}_cifar" for d in (8, 20, 32, 44, 56, 110, 1202)} <= set(list_models())


def test_fields_override_those_of_the_variant():
    model = create_model("resnet50", num_classes=7, dtype=jnp.bfloat16, widths=(8, 16, 32, 64))
    assert (model.num_classes, model.dtype, model.widths) == (7, jnp.bfloat16, (8, 16, 32, 64))
    assert create_model("resnet50").num_classes == 1000
    assert create_model("resnet20_cifar").num_classes == 10


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match="unknown model 'rsnet152'; nearest: resnet152,"):
        create_model("rsnet152")
    with pytest.raises(ValueError, match=r"unknown model 'zzz'; see convjax\.list_models"):
        create_model("zzz")


def test_unknown_fields_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match="resnet50 has no field 'width'; nearest: widths; all: st"):
        create_model("resnet50", width=(1, 2, 3, 4))
    with pytest.raises(ValueError, match="'depht'; nearest: depth; all: ") as caught:
        create_model("vit_b16", depht=3)
    named = str(caught.value).partition("; all: ")[2].split(", ")
    assert named[:3] == ["patch_size", "width", "depth"]
    assert named[-3:] == ["num_classes", "dtype", "backend"]


def test_a_negative_number_of_classes():
    with pytest.raises(ValueError, match="num_classes=-1 must not be negative"):
        create_model("resnet18", num_classes=-1)
