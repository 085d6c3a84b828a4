"""torchvision's names for the convolutional networks; timm's for ResNets are the same.

Each function gives a table its entries. torchvision numbers the layers of AlexNet and VGG in one
sequence of which activations and poolings are members too, so the numbers have gaps.
"""

import math

from convjax.weights.entries import Table, after_flatten


def name_resnet(table: Table) -> None:
    """Stage 2 of the paper is `layer1`; our stacks hold the blocks from the second on."""
    table.conv("conv1", "conv1")
    table.batch_norm("norm1", "bn1")
    stage = 2
    while table.has(f"conv{stage}_1"):
        _name_block(table, f"conv{stage}_1", f"layer{stage - 1}.0", None)
        stacked = f"conv{stage}_x"
        if table.has(stacked):
            for index in range(table.depth(stacked)):
                _name_block(table, stacked, f"layer{stage - 1}.{index + 1}", index)
        stage += 1
    table.head("fc", "fc")


def _name_block(table: Table, block: str, name: str, index: int | None) -> None:
    for layer in range(1, 4 if table.has(f"{block}/conv3") else 3):
        table.conv(f"{block}/conv{layer}", f"{name}.conv{layer}", index)
        table.batch_norm(f"{block}/norm{layer}", f"{name}.bn{layer}", index)
    if table.has(f"{block}/shortcut"):
        table.conv(f"{block}/shortcut/conv", f"{name}.downsample.0", index)
        table.batch_norm(f"{block}/shortcut/norm", f"{name}.downsample.1", index)


def name_alexnet(table: Table) -> None:
    """The form of 2014; that of 2012 is not in torchvision."""
    for layer, place in enumerate((0, 3, 6, 8, 10), start=1):
        table.conv(f"conv{layer}", f"features.{place}")
    _name_dense(table, "conv5", ("classifier.1", "classifier.4", "classifier.6"))


def name_vgg(table: Table) -> None:
    """Convolution, perhaps batch norm, activation; each stage ends with a pooling."""
    place, stage, last = 0, 1, ""
    while table.has(f"conv{stage}_1"):
        layer = 1
        while table.has(f"conv{stage}_{layer}"):
            last = f"conv{stage}_{layer}"
            table.conv(last, f"features.{place}")
            place += 2
            if table.has(f"norm{stage}_{layer}"):
                table.batch_norm(f"norm{stage}_{layer}", f"features.{place - 1}")
                place += 1
            layer += 1
        place += 1
        stage += 1
    _name_dense(table, last, ("classifier.0", "classifier.3", "classifier.6"))


def _name_dense(table: Table, last: str, names: tuple[str, str, str]) -> None:
    """fc6-8; fc6 reads the flattened maps of the convolution `last`, pooled to a square."""
    channels = table.shapes[f"params/{last}/kernel"][-1]
    side = math.isqrt(table.shapes["params/fc6/kernel"][0] // channels)
    table.layer("fc6", names[0], after_flatten(side, side))
    table.dense("fc7", names[1])
    table.head("fc8", names[2])


_BRANCHES = {
    "1x1": "branch1",
    "3x3_reduce": "branch2.0",
    "3x3": "branch2.1",
    "5x5_reduce": "branch3.0",
    "5x5": "branch3.1",
    "pool_proj": "branch4.1",
}
_INCEPTIONS = ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")


def name_googlenet(table: Table) -> None:
    """torchvision's has batch norm, and 3×3 kernels in the branch that the paper calls 5×5."""
    if not table.has("conv1/norm"):
        raise ValueError(f"{table.format} has no GoogLeNet without batch normalisation")
    if table.shapes["params/inception_3a/5x5/conv/kernel"][:2] != (3, 3):
        raise ValueError(f"{table.format} has GoogLeNet with 3×3 kernels in its third branch only")
    for unit, name in (("conv1", "conv1"), ("conv2_reduce", "conv2"), ("conv2", "conv3")):
        _name_unit(table, unit, name)
    for inception in _INCEPTIONS:
        for branch, name in _BRANCHES.items():
            _name_unit(table, f"inception_{inception}/{branch}", f"inception{inception}.{name}")
    for aux in ("aux1", "aux2"):
        if table.has(aux):
            _name_unit(table, f"{aux}/conv", f"{aux}.conv")
            table.layer(f"{aux}/fc1", f"{aux}.fc1", after_flatten(4, 4))
            table.head(f"{aux}/fc2", f"{aux}.fc2")
        else:
            table.left_out.append(f"{aux}.")
    table.head("fc", "fc")


def _name_unit(table: Table, unit: str, name: str) -> None:
    table.conv(f"{unit}/conv", f"{name}.conv")
    table.batch_norm(f"{unit}/norm", f"{name}.bn")
