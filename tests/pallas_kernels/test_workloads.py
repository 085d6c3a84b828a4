"""The workloads against the papers' tables and the networks' published costs."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.calls import Conv2d, Matmul
from pallas_kernels.workloads import workloads

NETWORKS = ("alexnet", "vgg16", "googlenet", "resnet50", "vit_b16")


def one(name):
    (workload,) = workloads(name)
    return workload


@pytest.mark.parametrize(
    ("network", "gmacs"),
    [
        ("alexnet", 0.724),
        ("vgg16", 15.470),
        ("googlenet", 1.583),
        ("resnet50", 4.089),
        ("vit_b16", 17.564),
    ],
)
def test_the_layers_of_a_network_make_its_published_multiply_adds(network, gmacs):
    layers = workloads(f"{network}/*")
    (batch,) = {layer.call.batch for layer in layers}
    products = [layer for layer in layers if layer.call.is_product]
    total = sum(layer.count * layer.call.work().flops for layer in products)
    assert round(total / 2 / batch / 1e9, 3) == gmacs


@pytest.mark.parametrize(
    ("network", "layers", "distinct", "batch"),
    [
        # Beside convolutions and dense layers: two norms, three pools and the loss,
        ("alexnet", 8 + 6, 8 + 6, 128),
        # five pools and the loss,
        ("vgg16", 16 + 6, 12 + 6, 256),
        # four pools, nine (of six shapes) in inceptions, two norms and the loss,
        ("googlenet", 58 + 16, 50 + 13, 128),
        # a pool and the loss,
        ("resnet50", 54 + 2, 24 + 2, 256),
        # attention in each of 12 blocks, two norms in each and one more, and the loss.
        ("vit_b16", 50 + 12 + 25 + 1, 6 + 3, 128),
    ],
)
def test_every_layer_is_counted_and_no_shape_is_there_twice(network, layers, distinct, batch):
    found = workloads(f"{network}/*")
    assert sum(workload.count for workload in found) == layers
    assert len(found) == len({workload.call for workload in found}) == distinct
    assert {workload.call.batch for workload in found} == {batch}


def test_names_are_unique_and_chosen_by_pattern():
    names = [workload.name for workload in workloads()]
    assert len(names) == len(set(names)) == 130
    assert [w.name for w in workloads("alexnet/fc?")] == [f"alexnet/fc{n}" for n in (6, 7, 8)]
    assert workloads("lenet/*") == []
    assert tuple(dict.fromkeys(w.network for w in workloads())) == NETWORKS


def test_a_layer_is_what_its_paper_says():
    assert one("resnet50/conv3_2/3x3").call == Conv2d(
        (256, 28, 28, 128), (3, 3, 128, 128), padding=((1, 1), (1, 1))
    )
    assert one("resnet50/conv3_2/3x3").count == 3
    # Three blocks' last convolution and the first block's shortcut.
    assert one("resnet50/conv2_1/1x1_expand").count == 4
    shortcut = one("resnet50/conv4_1/shortcut").call
    assert (shortcut.w, shortcut.strides) == ((1, 1, 512, 1024), (2, 2))
    assert one("googlenet/inception_4d/5x5").call.w == (5, 5, 32, 64)
    assert one("vit_b16/block_1/mlp1").call == Matmul(
        (128, 197, 768), (768, 3072), bias=True, activation="gelu"
    )
    assert one("vit_b16/block_1/mlp1").count == 12


def test_alexnet_has_its_two_towers_where_the_paper_has_them():
    groups = [workload.call.groups for workload in workloads("alexnet/conv*")]
    assert groups == [1, 2, 1, 2, 2]
    conv1 = one("alexnet/conv1").call
    assert (conv1.x, conv1.padding) == ((128, 224, 224, 3), ((0, 3), (0, 3)))
    assert conv1.y == (128, 55, 55, 96)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_workload_is_a_call_that_its_operation_takes(network):
    for workload in workloads(f"{network}/*"):
        call = workload.call
        y = jax.eval_shape(call.function(), **call.operands())
        loss = call.operation == "cross_entropy"
        assert (y.shape, y.dtype) == (call.y, jnp.float32 if loss else jnp.bfloat16)


def test_operands_are_named_and_a_bias_is_a_float32_parameter():
    call = Conv2d((8, 3, 5, 4), (3, 3, 2, 6), groups=2, bias=True, residual=True, layout="NCHW")
    assert {name: (x.shape, x.dtype) for name, x in call.operands().items()} == {
        "x": ((8, 3, 5, 4), jnp.bfloat16),
        "w": ((3, 3, 2, 6), jnp.bfloat16),
        "bias": ((6,), jnp.float32),
        "residual": ((8, 6, 5, 4), jnp.bfloat16),
    }


def test_bytes_are_of_every_operand_once():
    assert Matmul((2, 3), (3, 5), dtype="float32").work().bytes_moved == 4 * (6 + 15 + 10)
    call = Conv2d((2, 4, 4, 3), (3, 3, 3, 7), padding="VALID")
    assert call.work().bytes_moved == 2 * (2 * 4 * 4 * 3 + 3 * 3 * 3 * 7 + 2 * 2 * 2 * 7)
    assert call.macs == 2 * 2 * 2 * 7 * 3 * 3 * 3
